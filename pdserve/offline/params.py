"""`SamplingParams`, the parameters of `LLM.generate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, make_dataclass
from typing import Any

from pdserve.common.core.parameters import PARAMETERS

# Parameters of a request that are not about sampling.
_OURS = {"model", "stream", "stream_options", "user", "return_token_ids"}
_OURS |= {"return_tokens_as_token_ids", "timeline"}
_NAMES = [each.name for each in PARAMETERS.values() if each.http and each.name not in _OURS]
_Fields: Any = make_dataclass(
    "_Fields",
    [(name, Any, None) for name in (*_NAMES, "logprobs")],
    frozen=True,
    kw_only=True,
    repr=False,
)


class SamplingParams(_Fields):
    """The sampling parameters of docs/clients.md, and `logprobs`: how many of the most likely
    tokens to return per token. None takes the server's default. The server checks the values.

    Raises:
        TypeError: the parameter does not exist.
    """

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given())
        return f"SamplingParams({given})"

    def body(self) -> dict[str, Any]:
        """Returns the parameters as fields of a completion request."""
        found = dict(self._given())
        if self.logprobs is not None:
            found["return_tokens_as_token_ids"] = True
        return {**found, "return_token_ids": True}

    def _given(self) -> Iterator[tuple[str, Any]]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ((name, value) for name, value in values if value is not None)
