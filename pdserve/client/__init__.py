"""A client of OpenAI-compatible servers that raises pdserve's errors, and terminal helpers."""
