"""Batches without a server of one's own: `LLM` for programs, `pdserve run-batch` for files."""
