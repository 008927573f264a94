"""Offline inference: `LLM` for programs, `pdserve run-batch` for files."""
