"""Tensor-parallel layers, attention backends, decoder families, weight loading."""
