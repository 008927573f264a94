"""A request's constraint on its output text, which `router/api/structured.py` builds from the
request's fields."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdserve.common.core import exact_json
from pdserve.common.core.errors import InvalidRequest

MAX_CONSTRAINT = 64 * 1024  # bytes of a constraint's text
MAX_GRAMMAR = 4 * MAX_CONSTRAINT  # bytes of the grammar compiled from it, with its opening
MAX_OPENING = 256
# White space between JSON tokens by default. If a small model may add more, it often generates
# nothing else until its token limit.
COMPACT_WHITESPACE = " ?"

# Keywords of JSON schemas whose values are schemas by name, and those whose values are data.
SCHEMAS_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
NO_SCHEMAS = {"const", "enum", "default", "examples"}


@dataclass(frozen=True, slots=True)
class Opening:
    """The optional parts of an answer before, or instead of, the text that must match."""

    thought: tuple[int, int] | None = None  # tokens that begin and end reasoning before the text
    # Consecutive tokens that must have appeared before the token that ends reasoning, with any
    # tokens in between. Empty: that token alone ends it.
    heading: tuple[int, ...] = ()
    thinking: bool = False  # whether the answer begins inside reasoning
    call: int | None = None  # token that begins tool calls instead of the text


class ConstraintKind(StrEnum):
    """The kinds of constraints, with vLLM's names in `structured_outputs`."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    GRAMMAR = "grammar"  # GBNF/EBNF or Lark
    STRUCTURAL_TAG = "structural_tag"  # a JSON object: free text with constrained parts


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint that the whole text of each choice must match."""

    kind: ConstraintKind
    text: str
    param: str = "structured_outputs"  # the client's field, for errors
    any_whitespace: bool = True  # `COMPACT_WHITESPACE` between JSON tokens; false: none
    whitespace_pattern: str | None = None  # a regex that replaces it

    def __post_init__(self) -> None:
        """Raises InvalidRequest if the text is too large or not valid Unicode."""
        try:
            size = len(self.text.encode()) + len((self.whitespace_pattern or "").encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{self.param} has an unpaired surrogate", param=self.param
            ) from error
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
        """Builds a constraint from JSON data: a schema, choices, a structural tag. Keeps the order
        of keys, which is the order in the answer.

        Raises:
            InvalidRequest: it has an unpaired surrogate, or is too large.
        """
        try:
            text = exact_json.dumps(value)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{param} has an unpaired surrogate", param=param) from error
        return cls(kind, text, param, any_whitespace, whitespace_pattern)
