"""Log-probabilities as JSON: OpenAI's of completions and of chat, and vLLM's of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.sampling import SampledToken
from pdserve.common.text.detokenizer import TextOffsets, whole_characters
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.schema import CompletionBody, GenerationBody

MIN_LOGPROB = -9999.0  # JSON has no -Infinity


def logprob_of(token: SampledToken) -> float:
    return MIN_LOGPROB if token.logprobs is None else max(token.logprobs.logprob, MIN_LOGPROB)


def token_name(token_id: int, text: str, body: GenerationBody) -> str:
    """Returns the name of a token in log-probabilities."""
    return f"token_id:{token_id}" if body.return_tokens_as_token_ids else text


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[SampledToken], body: GenerationBody
) -> dict[str, Any]:
    """Returns one entry for each token."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_name(token_id, tokenizer.token_text(token_id), body),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for token in tokens:
        top = token.logprobs.top if token.logprobs else ()
        tops = [entry(token_id, max(logprob, MIN_LOGPROB)) for token_id, logprob in top]
        content.append(entry(token.token_id, logprob_of(token)) | {"top_logprobs": tops})
    return {"content": content}


class CompletionLogprobs:
    """The log-probabilities of one choice of a completion, as parallel lists. It counts text
    offsets in characters of the text that the client gets."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionBody, echo: str, prompt: Sequence[int]
    ) -> None:
        """`echo` is the prompt's text, if the answer begins with it."""
        self._tokenizer = tokenizer
        self._body = body
        self._echo = echo
        skip_special = body.skip_special_tokens is not False
        before = prompt if body.echo else ()
        self._offsets = TextOffsets(tokenizer, skip_special, len(echo), before)

    def add(
        self,
        tokens: Sequence[SampledToken],
        prompt: Sequence[int] = (),
        scored: PromptLogprobs | None = None,
    ) -> dict[str, list[Any]]:
        """Returns the lists for more tokens; before them the `prompt`'s, if it is echoed and
        `scored`."""
        echoed = scored if self._body.echo else None
        offsets = [self._offsets.push(token.token_id) for token in tokens]
        if echoed is not None:
            before = echoed.tokens(prompt[1:], self._body.logprobs or 0)
            tokens = [SampledToken(prompt[0]), *before, *tokens]
            offsets = _echo_offsets(self._tokenizer, prompt, self._echo) + offsets
        result: dict[str, list[Any]] = {
            "text_offset": offsets,
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token in tokens:
            result["tokens"].append(self._name(token.token_id))
            result["token_logprobs"].append(logprob_of(token))
            result["top_logprobs"].append(self._top(token))
        if echoed is not None:
            result["token_logprobs"][0] = result["top_logprobs"][0] = None
        return result

    def _top(self, token: SampledToken) -> dict[str, float]:
        """Returns the most likely tokens and the chosen one, which may be one of them."""
        top = token.logprobs.top if token.logprobs else ()
        pairs: dict[str, float] = {}
        for token_id, logprob in (*top, (token.token_id, logprob_of(token))):
            pairs.setdefault(self._name(token_id), max(logprob, MIN_LOGPROB))
        return pairs

    def _name(self, token_id: int) -> str:
        """The token's text; parts of a character, which have none, as `bytes:\\xf0\\x9f`, so
        that two of them differ (as OpenAI's API names them)."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return token_name(token_id, text, self._body)


def _echo_offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Returns the offset of each of a prompt's tokens in its text, be that the client's or the
    decoded one. Tokens that the tokenizer puts before a text (a BOS) are at offset 0."""
    decoded = tokenizer.decode(prompt, skip_special_tokens=False)
    if not decoded.endswith(text):  # the answer has the rest of the last character
        decoded = tokenizer.decode(whole_characters(tokenizer, prompt), skip_special_tokens=False)
    is_its_end = decoded.endswith(text)
    offsets = TextOffsets(tokenizer, skip_special_tokens=not is_its_end)
    before = len(decoded) - len(text) if is_its_end else 0
    return [min(max(0, offsets.push(each) - before), len(text)) for each in prompt]


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], found: PromptLogprobs, num_top: int
) -> msgspec.Raw:
    """vLLM's JSON: for each token, by id, the token itself and the most likely ones; null for the
    first. It may have hundreds of thousands of entries."""
    texts: dict[int, str] = {}

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        if (text := texts.get(token_id)) is None:
            text = texts[token_id] = tokenizer.token_text(token_id)
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    tokens: list[dict[str, Any] | None] = [None]
    for token_id, (logprob, rank, top) in zip(token_ids[1:], found.rows(num_top), strict=True):
        entries = {str(token_id): entry(token_id, logprob, rank)}
        for place, (other, likely) in enumerate(top, 1):
            if other != token_id:
                entries[str(other)] = entry(other, likely, place)
        tokens.append(entries)
    return msgspec.Raw(msgspec.json.encode(tokens))
