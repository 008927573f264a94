"""The option of speculative decoding and the fields of its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pdserve.common.config.shared import option
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import nearest

FLAG = "--speculative-config"
MAX_DRAFTS = 32  # draft tokens per step; beyond a handful they are rarely accepted
MAX_NGRAM = 64  # tokens
METHODS = ("ngram", "draft_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Speculative decoding"""

    speculative_config: dict[str, Any] = option(
        {},
        'draft tokens and verify several in one step, as JSON: {"method": "ngram", '
        '"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2} or '
        '{"method": "draft_model", "model": "FOLDER", "num_speculative_tokens": 3}; the output is '
        "the same; for decode nodes and nodes of both roles",
    )

    def __post_init__(self) -> None:
        _ = self.speculation

    @property
    def speculation(self) -> Speculation | None:
        """The parsed option, None if not set. Raises ConfigError for invalid JSON fields."""
        return Speculation.read(self.speculative_config) if self.speculative_config else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The fields of --speculative-config; names and defaults are vLLM's."""

    method: str
    num_speculative_tokens: int  # most draft tokens per step
    prompt_lookup_max: int = 0  # tokens of the longest n-gram that is looked up
    prompt_lookup_min: int = 0
    model: str | None = None  # folder of the draft model
    disable_by_batch_size: int | None = None  # with more running sequences nothing is drafted

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Speculation:
        known = [each.name for each in fields(cls)]
        for key in given:
            if key not in known:
                advice = nearest(key, known) or f"choose one of: {', '.join(known)}"
                raise ConfigError(f"{FLAG}: unknown key {key!r}; {advice}")
        values = dict(given)
        values.setdefault("method", "draft_model" if "model" in given else None)
        if values["method"] not in METHODS:
            raise ConfigError(f"{FLAG}: method must be one of {', '.join(METHODS)}")
        _check_count(values, "num_speculative_tokens", MAX_DRAFTS, required=True)
        _check_count(values, "disable_by_batch_size", 2**31 - 1)
        (_check_ngram if values["method"] == "ngram" else _check_draft_model)(values)
        return cls(**values)


def _check_ngram(values: dict[str, Any]) -> None:
    if values.get("model") is not None:
        raise ConfigError(f"{FLAG}: method ngram has no model")
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        _check_count(values, key, MAX_NGRAM)
    longest, shortest = values.get("prompt_lookup_max"), values.get("prompt_lookup_min")
    values["prompt_lookup_max"] = longest or shortest or 5
    values["prompt_lookup_min"] = shortest or longest or 5
    if values["prompt_lookup_min"] > values["prompt_lookup_max"]:
        raise ConfigError(
            f"{FLAG}: prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}"
        )


def _check_draft_model(values: dict[str, Any]) -> None:
    if not isinstance(values.get("model"), str) or not values["model"]:
        raise ConfigError(f"{FLAG}: method draft_model needs a model: a checkpoint folder")
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        if values.get(key) is not None:
            raise ConfigError(f"{FLAG}: {key} is for method ngram, not draft_model")
        values.pop(key, None)


def _check_count(values: Mapping[str, Any], key: str, most: int, required: bool = False) -> None:
    value = values.get(key)
    if value is None and not required:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{FLAG}: {key} must be a whole number from 1 to {most}")
