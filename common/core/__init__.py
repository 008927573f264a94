"""Errors, request and sampling types, model specs, plugins, the host. Standard library only."""
