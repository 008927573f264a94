"""The table of request parameters: names, types and bounds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import MAX_GRAMMAR

MAX_TOKENS = 2**31 - 1  # a context window is shorter
MAX_CHOICES = 128  # per prompt
MAX_LOGPROBS = 20  # besides the chosen token
MAX_TOKENS_NAMED = 1024  # in a list of token ids
MAX_BAD_WORDS = 128  # encoding this many takes the router about 10 ms
MAX_CACHE_SALT = 1024  # characters
MAX_STOPS, MAX_STOP_TEXT = 256, 8192  # stop strings, and characters of all of them


class ParamType(StrEnum):
    """The type of a parameter, as docs/clients.md shows it."""

    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    TEXT = "string"
    TEXT_OR_TEXTS = "string or strings"
    TEXTS = "strings"
    TOKEN_IDS = "token ids"
    TOKEN_ID_LISTS = "lists of token ids"
    BIASES = "token id (as a string) → number"
    OBJECT = "object"
    OBJECT_OR_TEXT = "object or string"


OPENAI, VLLM, PDSERVE = "OpenAI", "vLLM", "pdserve"
_GUIDED = "older form of `structured_outputs`"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A row of the table. Bounds are inclusive. They are wider than any client needs, and narrow
    enough that arithmetic on float32 logits cannot overflow."""

    name: str
    kind: ParamType
    origin: str  # the API that defines it
    number: int | None = None  # field number in pdserve.v1.SamplingParams; None: no such field
    low: float | None = None  # bounds of a number, or of each bias
    high: float | None = None
    positive: bool = False  # excludes 0
    fewest: int = 0  # entries, if the parameter is given
    most: int = 0
    longest: int = 0  # most characters (tokens) of an entry; the least is 1
    default: str = ""  # in words, if it differs from the field of SamplingParams
    meaning: str = ""
    http: bool = True  # whether both HTTP endpoints accept it in this form; else only gRPC

    def check(self, value: Any, vocab_size: int) -> None:
        """Raises InvalidRequest, with the name as `param`, if a node must not get `value`."""
        if self.kind in (ParamType.INTEGER, ParamType.NUMBER) and value is not None:
            self.check_range(value)
        if self.kind in (ParamType.TOKEN_IDS, ParamType.BIASES) and value:
            self.check_count(value)
            check_token_ids(value, vocab_size, self.name)
        if self.kind is ParamType.BIASES:
            for bias in value.values():
                self.check_range(bias)
        if self.kind is ParamType.TEXT and len(value) > self.longest:
            raise InvalidRequest(f"{self.name} is longer than {self.longest}", param=self.name)
        if self.kind is ParamType.TOKEN_ID_LISTS:
            self.check_count(value)
            for token_ids in value:
                self.check_length(token_ids)
                check_token_ids(token_ids, vocab_size, self.name)

    def check_range(self, value: float) -> None:
        check_range(self.name, value, self.low, self.high, self.positive)

    def check_count(self, given: Collection[object]) -> None:
        if not self.fewest <= len(given) <= self.most:
            bound = f"most {self.most}" if len(given) > self.most else f"least {self.fewest}"
            raise InvalidRequest(f"{self.name} takes at {bound}", param=self.name)

    def check_length(self, entry: Sequence[object]) -> None:
        if not 0 < len(entry) <= self.longest:
            what = "characters" if isinstance(entry, str) else "tokens"
            raise InvalidRequest(
                f"{self.name} must have 1 to {self.longest} {what}", param=self.name
            )


PARAMETERS: dict[str, Parameter] = {
    each.name: each
    for each in (
        Parameter(
            "model", ParamType.TEXT, OPENAI, default="the served model",
            meaning="unknown names: 404",
        ),
        Parameter(
            "max_tokens", ParamType.INTEGER, OPENAI, 1, low=1, high=MAX_TOKENS,
            default="completions, gRPC: 16; chat: the rest of the context",
            meaning="`max_completion_tokens` (chat) takes precedence",
        ),
        Parameter(
            "min_tokens", ParamType.INTEGER, VLLM, 2, low=0, high=MAX_TOKENS,
            meaning="no end token and no stop string before this many tokens",
        ),
        Parameter(
            "temperature", ParamType.NUMBER, OPENAI, 3, low=0, high=100, meaning="0 is greedy"
        ),
        Parameter("top_p", ParamType.NUMBER, OPENAI, 4, low=0, high=1, positive=True),
        Parameter(
            "top_k", ParamType.INTEGER, VLLM, 5, low=-1, high=2**31 - 1, meaning="0 or −1: all"
        ),
        Parameter("min_p", ParamType.NUMBER, VLLM, 6, low=0, high=1),
        Parameter(
            "seed", ParamType.INTEGER, OPENAI, 7, low=0, high=2**63 - 1, default="random",
            meaning="same seed and parameters give the same tokens; −1 (HTTP): random",
        ),
        Parameter(
            "n", ParamType.INTEGER, OPENAI, 16, low=1, high=MAX_CHOICES, default="1",
            meaning="choices share one prefill and one transfer",
        ),
        Parameter(
            "stop", ParamType.TEXT_OR_TEXTS, OPENAI, 12, most=MAX_STOPS, longest=1024, default="–",
            meaning=f"at most {MAX_STOP_TEXT} characters in total",
        ),
        Parameter(
            "stop_token_ids", ParamType.TOKEN_IDS, VLLM, 13, most=MAX_TOKENS_NAMED,
            meaning="each of them ends the answer",
        ),
        Parameter("include_stop_str_in_output", ParamType.BOOLEAN, VLLM, 23, default="false"),
        Parameter("ignore_eos", ParamType.BOOLEAN, VLLM, 14),
        Parameter("presence_penalty", ParamType.NUMBER, OPENAI, 8, low=-2, high=2),
        Parameter("frequency_penalty", ParamType.NUMBER, OPENAI, 9, low=-2, high=2),
        Parameter("repetition_penalty", ParamType.NUMBER, VLLM, 10, low=0.01, high=100),
        Parameter(
            "logit_bias", ParamType.BIASES, OPENAI, 11, low=-100, high=100, most=MAX_TOKENS_NAMED
        ),
        Parameter(
            "allowed_token_ids", ParamType.TOKEN_IDS, VLLM, 17, fewest=1, most=MAX_TOKENS_NAMED,
            meaning="only these tokens are generated (end tokens included); log-probabilities are "
            "still the model's",
        ),
        Parameter(
            "bad_words", ParamType.TEXTS, VLLM, 18, most=MAX_BAD_WORDS, longest=64, default="–",
            meaning="encoded with and without a leading space; the last token of a word is not "
            "generated after its other tokens",
        ),
        Parameter(
            "bad_words_token_ids", ParamType.TOKEN_ID_LISTS, PDSERVE, 19, http=False,
            most=2 * MAX_BAD_WORDS, longest=64, meaning="`bad_words` as token ids",
        ),
        Parameter(
            "logprobs", ParamType.INTEGER, OPENAI, 15, low=0, high=MAX_LOGPROBS, http=False,
            meaning="the chosen token and this many of the most likely; over HTTP: see below",
        ),
        Parameter(
            "prompt_logprobs", ParamType.INTEGER, VLLM, 22, low=0, high=MAX_LOGPROBS,
            meaning="for each prompt token except the first, and this many of the most likely in "
            "its place; over HTTP not with `stream`",
        ),
        Parameter(
            "return_tokens_as_token_ids", ParamType.BOOLEAN, VLLM, default="false",
            meaning="log-probabilities name tokens as `token_id:N`",
        ),
        Parameter(
            "return_token_ids", ParamType.BOOLEAN, VLLM, default="false",
            meaning="adds `token_ids` to choices, and `prompt_token_ids` (completions: to choices, "
            "chat: beside them; streams: in the first event); gRPC: a field of the request",
        ),
        Parameter(
            "truncate_prompt_tokens", ParamType.INTEGER, VLLM, 25, low=-1, high=MAX_TOKENS,
            default="–", meaning="keeps only this many last tokens of a prompt; −1: as many as fit",
        ),
        Parameter("skip_special_tokens", ParamType.BOOLEAN, VLLM, 24, default="true"),
        Parameter(
            "cache_salt", ParamType.TEXT, VLLM, longest=MAX_CACHE_SALT, default="–",
            meaning="cached prefixes are shared only among requests with the same salt (also over "
            "gRPC)",
        ),
        Parameter(
            "priority", ParamType.INTEGER, VLLM, low=-(2**31), high=2**31 - 1, default="0",
            meaning="lower values are served first; other values than 0 need "
            "[`--scheduling-policy priority`](admission.md#queue-order) (also over gRPC)",
        ),
        Parameter(
            "timeline", ParamType.BOOLEAN, PDSERVE, default="false",
            meaning="adds [the request's timeline](#where-the-time-went) to the answer",
        ),
        Parameter(
            "stream", ParamType.BOOLEAN, OPENAI, default="false", meaning="server-sent events"
        ),
        Parameter(
            "stream_options", ParamType.OBJECT, OPENAI, default="–",
            meaning="only with `stream`; `include_usage`: a last event with `usage` and no "
            "choices; `continuous_usage_stats`: also the usage so far in every event",
        ),
        Parameter(
            "response_format", ParamType.OBJECT, OPENAI, default="–",
            meaning="`text`, `json_object`, `json_schema` or `structural_tag`: see below",
        ),
        Parameter(
            "structured_outputs", ParamType.OBJECT, VLLM, 20, default="–",
            meaning="`json`, `regex`, `choice`, `grammar` …: see below",
        ),
        Parameter(
            "grammar", ParamType.TEXT, PDSERVE, 21, longest=MAX_GRAMMAR, default="–", http=False,
            meaning="the router's translation of `structured_outputs`; not for clients",
        ),
        Parameter("guided_json", ParamType.OBJECT_OR_TEXT, VLLM, default="–", meaning=_GUIDED),
        Parameter("guided_regex", ParamType.TEXT, VLLM, default="–", meaning=_GUIDED),
        Parameter("guided_choice", ParamType.TEXTS, VLLM, default="–", meaning=_GUIDED),
        Parameter("guided_grammar", ParamType.TEXT, VLLM, default="–", meaning=_GUIDED),
        Parameter("guided_whitespace_pattern", ParamType.TEXT, VLLM, default="–", meaning=_GUIDED),
        Parameter(
            "guided_decoding_backend", ParamType.TEXT, VLLM, default="–",
            meaning="`auto` or `guidance`, the only backend",
        ),
        Parameter(
            "user", ParamType.TEXT, OPENAI, default="–", meaning="accepted and ignored"
        ),
    )
}  # fmt: skip
"""The parameters that completions and chat share, and those of gRPC's SamplingParams. The HTTP body
schema (`router/api/schema.py`), the checks of router and nodes, the conversion to protobuf and the
table in docs/clients.md are derived from it; a test compares it with `proto/inference.proto`."""


def check_range(
    name: str, value: float, low: float | None, high: float | None, positive: bool = False
) -> None:
    """Raises InvalidRequest unless low ≤ value ≤ high (None: no bound) and value is finite. A float
    is rounded to float32 first, because the nodes get it in that form."""
    number, least, most = (_as_sent(each) for each in (value, low, high))
    finite = isinstance(number, int) or math.isfinite(number)
    below = least is not None and (number <= least if positive else number < least)
    if finite and not below and (most is None or number <= most):
        return
    bounds = "a finite number"
    if low is not None:
        bounds = f"{'greater than' if positive else 'at least'} {low}"
    if high is not None:
        bounds += f" and at most {high}"
    raise InvalidRequest(f"{name} must be {bounds}, not {_shown(value)}", param=name)


def _as_sent(value: Any) -> Any:
    return ctypes.c_float(value).value if isinstance(value, float) else value


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequest unless all ids are in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"token id {_shown(wrong)} in {param} is not in 0…{vocab_size - 1}", param=param
        )


def _shown(value: float) -> str:
    """Formats a value for a message; Python raises for integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return str(value)
