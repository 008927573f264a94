"""The model behind the API, as far as the router must know it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from common.core.errors import InvalidRequest, ModelNotFound
from common.core.sampling import MAX_TOKENS, check_token_ids
from common.text.tokenizer import Tokenizer

T = TypeVar("T")

# Encoding takes about 1 µs a character: longer texts would hold up the other requests' tokens.
_INLINE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Name, window and tokenizer, and the checks that need them."""

    name: str
    root: str  # path of the checkpoint
    max_model_len: int
    vocab_size: int  # rows of the model's embedding; may exceed the tokenizer's
    created: int  # Unix time, seconds
    tokenizer: Tokenizer

    def check_name(self, name: str | None) -> None:
        """Raises ModelNotFound for another model's name; none means this one."""
        if name is not None and name != self.name:
            raise ModelNotFound(
                f"The model `{name}` does not exist. This server has `{self.name}`.", param="model"
            )

    def check_ids(self, token_ids: Sequence[int], param: str) -> tuple[int, ...]:
        """The ids, if all are in the vocabulary."""
        check_token_ids(token_ids, self.vocab_size, param)
        return tuple(token_ids)

    def fit_max_tokens(
        self, prompt_tokens: int, requested: int | None, default: int | None, param: str
    ) -> int:
        """How many tokens may be generated: what was requested, or `default` (None = no limit)
        as far as the window allows.

        Raises:
            InvalidRequest: the prompt is empty, or it and the request exceed the window.
        """
        if prompt_tokens == 0:
            raise InvalidRequest(f"{param} has no tokens", param=param)
        room = self.max_model_len - prompt_tokens
        if requested is not None:
            requested = min(requested, MAX_TOKENS)  # the message must be able to write the sum
        if room < (requested or 1):
            raise InvalidRequest(
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"you requested {prompt_tokens + (requested or 1)} tokens ({prompt_tokens} in the "
                f"{param}, {requested or 1} for the completion). Please reduce the length of the "
                f"{param} or the completion.",
                param=param,
                code="CONTEXT_LENGTH_EXCEEDED",
            )
        if requested is not None:
            return requested
        return room if default is None else min(room, default)

    async def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text; a long one is encoded on a thread."""
        return await off_loop(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))


async def off_loop(num_chars: int, work: Callable[[], T]) -> T:
    """Runs `work` on a thread when so many characters would block the event loop."""
    if num_chars <= _INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)
