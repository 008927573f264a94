"""Mechanism without policy: sequences, block pool, prefix cache, runner, sampler."""
