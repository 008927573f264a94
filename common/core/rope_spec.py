"""Reads rotary position embedding (arXiv:2104.09864) from a checkpoint's `config.json`. Standard
library only.

Both places of the settings are supported: `rope_parameters` (transformers 5), and `rope_theta` with
`rope_scaling` (older versions). Where both have a key, `rope_parameters` wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.common.core.config_values import POSITIVE, check_values
from pdserve.common.core.errors import ConfigError, InvalidCheckpoint
from pdserve.common.core.moe_spec import required_int

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
ORIGINAL = "original_max_position_embeddings"
LENGTH_DEPENDENT = ("longrope", "dynamic")
"""Kinds whose frequencies change for all positions once a sequence outgrows the original context.
Keys that were cached before have been rotated with other frequencies."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding.

    `kind` is "default", "linear" (arXiv:2306.15595: positions divided by `factor`), "llama3"
    (scales only wavelengths beyond the original context), "yarn" (arXiv:2309.00071), "longrope"
    (arXiv:2402.13753) or "dynamic" (dynamic NTK). The last two are limited to the original context.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0  # of cos and sin
    beta_fast: float = 32.0  # yarn: rotations per original context above which nothing is scaled
    beta_slow: float = 1.0  # yarn: rotations below which everything is scaled
    truncate: bool = True  # yarn: whether the bounds of the ramp are rounded to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope: divides each frequency

    @classmethod
    def from_config(cls, config: Mapping[str, Any], rotated: int) -> RopeSpec:
        """Reads the settings for heads with `rotated` rotary elements.

        Raises:
            ConfigError: a setting is missing or has a wrong value, or is not supported.
        """
        settings = rope_settings(config)
        kind = settings.get("rope_type") or "default"
        _check_kind(kind, settings, config)
        longest = required_int(config, "max_position_embeddings")
        original = longest
        if kind in ("llama3", "yarn", "longrope"):
            inside = _number(settings, ORIGINAL, longest)
            original = int(_number(config, ORIGINAL, inside))  # this order is transformers'
        theta = _number(settings, "rope_theta", 10000.0)
        if theta <= 1 or original <= 1:
            raise InvalidCheckpoint("config.json: the rope's theta and context must be more than 1")
        needed = kind in ("linear", "llama3", "yarn", "dynamic")
        factor = _number(settings, "factor", None if needed else longest / original)
        return cls(
            kind=kind,
            theta=theta,
            factor=factor,
            low_freq_factor=_number(settings, "low_freq_factor", 1.0),
            high_freq_factor=_number(settings, "high_freq_factor", 4.0),
            original_max_position_embeddings=original,
            attention_factor=_ATTENTION_FACTORS.get(kind, _unscaled)(settings, factor, original),
            beta_fast=_number(settings, "beta_fast", 32.0),
            beta_slow=_number(settings, "beta_slow", 1.0),
            truncate=bool(settings.get("truncate", True)),
            short_factors=_short_factors(settings, rotated // 2) if kind == "longrope" else (),
        )

    def context(self, max_position_embeddings: int) -> int:
        """Returns the context window in tokens for which these settings are valid."""
        if self.kind in LENGTH_DEPENDENT:
            return min(max_position_embeddings, self.original_max_position_embeddings)
        if self.kind == "yarn":  # configs made by Qwen's manual keep the original length
            scaled = int(self.factor * self.original_max_position_embeddings)
            return max(max_position_embeddings, scaled)
        return max_position_embeddings


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary settings merged from both places, with the kind as "rope_type"."""
    settings: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for place in ("rope_scaling", "rope_parameters"):
        given = config.get(place) or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"config.json: {place} must be an object, not {given!r}")
        settings.update(given)
        if "rope_type" not in given and "type" in given:
            settings["rope_type"] = given["type"]
    return settings


def _check_kind(kind: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    if kind == "mrope" or "mrope_section" in settings:
        raise ConfigError(
            "rope type 'mrope' rotates by the time, height and width of images, which pdserve does "
            "not serve: use the checkpoint of a text model"
        )
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    if settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(
            "partial_rotary_factor other than 1 is not supported: these families rotate whole heads"
        )


def _number(settings: Mapping[str, Any], key: str, default: float | None) -> float:
    """Returns a positive number, `default` if it is absent or null; ConfigError otherwise."""
    value = settings.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ConfigError(f"config.json: rope type {settings.get('rope_type')!r} needs a {key}")
    check_values({key: value}, {key: POSITIVE}, "config.json: the rope")
    return float(value)


def _short_factors(settings: Mapping[str, Any], count: int) -> tuple[float, ...]:
    factors = settings.get("short_factor")
    if not isinstance(factors, list) or len(factors) != count:
        raise ConfigError(f"config.json: the rope's short_factor must be a list of {count} numbers")
    return tuple(_number({"short_factor": each}, "short_factor", None) for each in factors)


# ---- the factor of cos and sin ----


def _unscaled(settings: Mapping[str, Any], factor: float, original: int) -> float:
    return 1.0


def _yarn_attention(settings: Mapping[str, Any], factor: float, original: int) -> float:
    derived = _yarn_scale(factor, 1)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        whole = _yarn_scale(factor, _number(settings, "mscale_all_dim", None))
        derived = _yarn_scale(factor, _number(settings, "mscale", None)) / whole
    return _number(settings, "attention_factor", derived)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope_attention(settings: Mapping[str, Any], factor: float, original: int) -> float:
    derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _number(settings, "attention_factor", derived)


_ATTENTION_FACTORS: dict[str, Callable[[Mapping[str, Any], float, int], float]] = {
    "yarn": _yarn_attention,
    "longrope": _longrope_attention,
}
