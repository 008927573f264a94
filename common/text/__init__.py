"""Tokenizer, chat templates, incremental detokenizer, stop strings."""

import os

# transformers would warn that there is no torch; a tokenizer, and so a router, needs none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
