"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.common.core.sampling import SampledToken
from pdserve.common.text.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no -Infinity


class CompletionLogprobs:
    """`/v1/completions`: parallel lists. One object per choice: it counts text offsets."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def add(self, tokens: Sequence[SampledToken]) -> dict[str, list[Any]]:
        result: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token in tokens:
            text = self._tokenizer.token_text(token.token_id)
            result["text_offset"].append(self._offset)
            result["tokens"].append(self._name(token.token_id))
            result["token_logprobs"].append(_logprob(token))
            result["top_logprobs"].append(self._top(token))
            self._offset += len(text)
        return result

    def _top(self, token: SampledToken) -> dict[str, float]:
        """The most likely tokens and the chosen one, which may be one of them."""
        top = token.logprobs.top if token.logprobs else ()
        pairs: dict[str, float] = {}
        for token_id, logprob in (*top, (token.token_id, _logprob(token))):
            pairs.setdefault(self._name(token_id), max(logprob, _FLOOR))
        return pairs

    def _name(self, token_id: int) -> str:
        """The token's text; parts of a character, which have none, as `bytes:\\xf0\\x9f`, so
        that two of them differ (as OpenAI's API names them)."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(
    tokens: Sequence[SampledToken], tokenizer: Tokenizer
) -> dict[str, list[dict[str, Any]]]:
    """`/v1/chat/completions`: one entry per token."""
    content = []
    for token in tokens:
        top = token.logprobs.top if token.logprobs else ()
        entry = _entry(token.token_id, _logprob(token), tokenizer)
        entry["top_logprobs"] = [_entry(i, max(p, _FLOOR), tokenizer) for i, p in top]
        content.append(entry)
    return {"content": content}


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _logprob(token: SampledToken) -> float:
    return _FLOOR if token.logprobs is None else max(token.logprobs.logprob, _FLOOR)
