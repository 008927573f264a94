"""Tokenizer, chat templates, incremental detokenizer, stop strings, grammars."""

import os

# transformers would warn about missing torch, which a tokenizer, and so a router, does not need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
