"""Logging, metrics, tracing, and the life cycle of a role's process."""
