"""Tokenizer, chat templates, incremental detokenizer, stop strings."""
