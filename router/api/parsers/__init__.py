"""Parsers of a model's text: they split it into content, reasoning and tool calls."""
