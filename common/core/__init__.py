"""Ids, sampling parameters, the error tree, block hashing, plugins. Standard library only."""
