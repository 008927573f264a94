"""The outputs of `LLM.generate`, in the form of vLLM's offline outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.common.core.errors import NodeError

_BY_ID = "token_id:"


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability (natural logarithm) and rank (1: the most likely token)."""

    logprob: float
    rank: int | None = None  # None: below the number of logprobs requested


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # per token; the chosen token comes first
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers. docs/clients.md describes `timeline`."""

    request_id: str
    prompt: str | None  # None if given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    timeline: dict[str, Any]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token
    finished: bool = True


def read_output(body: Any, prompt: str | None, num_logprobs: int | None) -> RequestOutput:
    """Builds the output from the body of a completion with token ids, a timeline and
    `num_logprobs` logprobs per token.

    Raises:
        NodeError: the body has another form.
    """
    try:
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        return RequestOutput(
            request_id=body["id"],
            prompt=prompt,
            prompt_token_ids=choices[0]["prompt_token_ids"],
            outputs=[_completion(choice, num_logprobs) for choice in choices],
            num_cached_tokens=body["usage"]["prompt_tokens_details"]["cached_tokens"],
            timeline=body["pdserve"]["timeline"],
            prompt_logprobs=_prompt_logprobs(choices[0].get("prompt_logprobs")),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise NodeError(f"the server's answer has another form: {error!r}") from error


def _completion(choice: dict[str, Any], num_logprobs: int | None) -> CompletionOutput:
    found = None if num_logprobs is None else choice["logprobs"]
    return CompletionOutput(
        index=choice["index"],
        text=choice["text"],
        token_ids=choice["token_ids"],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        logprobs=None if found is None else _logprobs(found, num_logprobs or 0),
        cumulative_logprob=None if found is None else sum(found["token_logprobs"]),
    )


def _logprobs(found: dict[str, Any], count: int) -> list[dict[int, Logprob]]:
    """Returns the logprobs per token. The server lists the `count` most likely tokens in order,
    then the chosen one if it is not among them."""
    places = []
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        ranked = {
            _id(name): Logprob(value, rank if rank <= count else None)
            for rank, (name, value) in enumerate(top.items(), 1)
        }
        places.append({_id(token): ranked[_id(token)], **ranked})
    return places


def _prompt_logprobs(
    found: list[dict[str, Any] | None] | None,
) -> list[dict[int, Logprob] | None] | None:
    if found is None:
        return None
    return [
        None
        if place is None
        else {int(i): Logprob(each["logprob"], each["rank"]) for i, each in place.items()}
        for place in found
    ]


def _id(token: str) -> int:
    return int(token.removeprefix(_BY_ID))
