"""Turns a client's parameters into `SamplingParams`: one validation for HTTP and gRPC."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.parameters import (
    MAX_STOP_TEXT,
    MAX_TOKENS_NAMED,
    PARAMETERS,
    Parameter,
    ParamType,
    check_range,
)
from pdserve.common.core.sampling import SAMPLING_PARAMETERS, SamplingParams, check_sampling
from pdserve.router.cluster.served_model import ServedModel

STOP, BAD_WORDS = PARAMETERS["stop"], PARAMETERS["bad_words"]


def make_sampling(given: Mapping[str, Any], model: ServedModel, max_tokens: int) -> SamplingParams:
    """Returns validated sampling parameters. `given` has the client's by name; other names in it
    are ignored. A missing one, or None, takes the default; a missing seed is drawn at random.

    Raises:
        InvalidRequest: a value is out of range; `param` names it.
    """
    given = {**model.defaults, **{k: v for k, v in given.items() if v is not None}}
    values = {
        each.name: _for_nodes(each, given[each.name])
        for each in SAMPLING_PARAMETERS
        if given.get(each.name) is not None
    }
    if values.get("seed") == -1:
        del values["seed"]
    for name in {"logprobs", "prompt_logprobs"} & values.keys():
        check_range(name, values[name], 0, model.max_logprobs)
    if words := given.get("bad_words"):
        BAD_WORDS.check_count(words)
        sequences = _encode_words(model, tuple(words))
        values["bad_words_token_ids"] = (*values.get("bad_words_token_ids", ()), *sequences)
    values = {"seed": secrets.randbits(63), **values, "max_tokens": max_tokens}
    params = SamplingParams(**values)
    check_sampling(params, model.vocab_size)
    return params


def with_seed(params: SamplingParams, given: int | None) -> SamplingParams:
    """Returns the parameters for another prompt of a body: with a seed of its own, unless the
    client gave one."""
    return params if given not in (None, -1) else replace(params, seed=secrets.randbits(63))


@lru_cache(maxsize=32)  # the prompts of a body have the same, and so have a client's requests
def _encode_words(model: ServedModel, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each word at the start of a text and after a space, which mostly
    differ."""
    sequences: dict[tuple[int, ...], None] = {}
    longest = PARAMETERS["bad_words_token_ids"].longest
    for word in words:
        BAD_WORDS.check_length(text := word.lstrip())
        BAD_WORDS.check_length(word)
        for form in (text, f" {text}"):
            token_ids = model.tokenizer.encode(form, add_special_tokens=False)
            if len(token_ids) > longest:
                raise InvalidRequest(
                    f"a word of bad_words has {len(token_ids)} tokens, more than {longest}",
                    param=BAD_WORDS.name,
                )
            sequences[token_ids] = None
    return tuple(each for each in sequences if each and max(each) < model.vocab_size)


def _for_nodes(parameter: Parameter, value: Any) -> Any:
    """Returns the value as SamplingParams holds it."""
    if isinstance(value, Collection) and not isinstance(value, str):
        parameter.check_count(value)  # first: there may be millions
    if parameter.kind is ParamType.TOKEN_IDS:
        return tuple(value)
    if parameter.kind is ParamType.TOKEN_ID_LISTS:  # lists over HTTP, messages over gRPC
        return tuple(tuple(getattr(each, "ids", each)) for each in value)
    if parameter.kind is ParamType.BIASES:
        try:
            return {int(key): bias for key, bias in value.items()}
        except ValueError as error:
            raise InvalidRequest(
                f"{parameter.name} keys must be token ids", param=parameter.name
            ) from error
    return 0 if parameter.name == "top_k" and value == -1 else value


def make_choices(n: int | None) -> int:
    """Returns the number of choices; 1 when absent."""
    PARAMETERS["n"].check_range(n := 1 if n is None else n)
    return n


def make_stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns stop strings as a tuple without repeats."""
    given = (stop,) if isinstance(stop, str) else (stop or ())
    stops = tuple(dict.fromkeys(given[: MAX_TOKENS_NAMED + 1]))
    STOP.check_count(stops if len(given) <= MAX_TOKENS_NAMED else given)
    for text in stops:
        STOP.check_length(text)
    if sum(map(len, stops)) > MAX_STOP_TEXT:
        raise InvalidRequest(f"stop takes at most {MAX_STOP_TEXT} characters in all", param="stop")
    return stops
