"""What the text of an answer must be: a request's constraint, as data.

The router makes it of the fields that clients know (`router/api/structured.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdserve.common.core.errors import InvalidRequest

MAX_CONSTRAINT = 64 * 1024  # bytes of a constraint's text
MAX_GRAMMAR = 4 * MAX_CONSTRAINT  # bytes of what becomes of it, with its opening
MAX_OPENING = 256
# What may stand between JSON's tokens unless a client says otherwise, as compact printers write it.
# A small model that may add white space often adds nothing else until its budget is spent.
COMPACT_WHITESPACE = " ?"


@dataclass(frozen=True, slots=True)
class Opening:
    """What may come before the text that must match, or instead of it."""

    thought: tuple[int, int] | None = None  # tokens that begin and end one, before the text
    thinking: bool = False  # the answer begins within it
    call: int | None = None  # token that begins tool calls instead of the text


class ConstraintKind(StrEnum):
    """By vLLM's names in `structured_outputs`."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    GRAMMAR = "grammar"  # GBNF/EBNF or Lark
    STRUCTURAL_TAG = "structural_tag"  # a JSON object: free text with constrained parts


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The whole text of each choice must match."""

    kind: ConstraintKind
    text: str
    param: str = "structured_outputs"  # the field the client gave it in, for errors
    any_whitespace: bool = True  # between JSON's tokens: `COMPACT_WHITESPACE`; false: none
    whitespace_pattern: str | None = None  # a regex instead

    def __post_init__(self) -> None:
        """Raises InvalidRequest: it is too large to be looked at, or no text."""
        try:
            size = len(self.text.encode()) + len((self.whitespace_pattern or "").encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{self.param} has half a character", param=self.param) from error
        if size > MAX_CONSTRAINT:
            raise InvalidRequest(
                f"{self.param} has {size} bytes; at most {MAX_CONSTRAINT} are compiled",
                param=self.param,
            )

    @classmethod
    def of_json(
        cls,
        kind: ConstraintKind,
        value: Any,
        param: str,
        any_whitespace: bool = True,
        whitespace_pattern: str | None = None,
    ) -> StructuredOutput:
        """Of a value whose text is JSON: a schema, choices, a structural tag. The order of its
        keys is kept: it is that of the answer's."""
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return cls(kind, text, param, any_whitespace, whitespace_pattern)
