"""Logging, metrics and the per-request timeline."""
