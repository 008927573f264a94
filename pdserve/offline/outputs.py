"""What generations leave behind, in the shapes of vLLM's offline outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.common.core.errors import NodeError

_BY_ID = "token_id:"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one place: natural logarithm, and 1 for the most likely one."""

    logprob: float
    rank: int | None = None  # None: beyond those that were asked for


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a prompt's `n` answers."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # of each token: the chosen one first
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers. `timeline` says where the time went: docs/clients.md."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    timeline: dict[str, Any]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first token has none
    finished: bool = True


def read_output(body: Any, prompt: str | None, num_logprobs: int | None) -> RequestOutput:
    """Of a completion's body, which has token ids and a timeline; `num_logprobs` were asked for.

    Raises:
        NodeError: it has another form.
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
    """The server names the most likely ones in order, then the chosen one if it is not of them."""
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
