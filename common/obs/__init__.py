"""Logging, metrics, and a role's process from start to end."""
