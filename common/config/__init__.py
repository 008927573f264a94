"""Frozen, composed dataclasses; flags, environment and YAML are derived from them."""
