"""Benchmarks: `pdserve bench step` (engine steps) and `pdserve bench serve` (a server)."""
