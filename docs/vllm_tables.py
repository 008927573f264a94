"""Rows of the tables of docs/from-vllm.md, from those of the parser."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdserve.common.config.vllm import VARIABLES, names
from pdserve.common.config.vllm_flags import (
    ABSENT,
    CALLED,
    NOTES,
    SAME,
    SGLANG,
    WITHOUT_EFFECT,
    Rule,
)

Rows = Iterator[tuple[str, ...]]


def same() -> Iterator[str]:
    yield ", ".join(f"`--{name}`" for name in SAME if name not in NOTES) + "."


def differences() -> Rows:
    yield "flag", "here"
    yield from ((f"`--{name}`", note) for name, note in NOTES.items())


def called() -> Rows:
    yield "vLLM", "here", ""
    yield from ((_flags(rule), f"`--{rule.here}`", rule.why) for rule in CALLED)


def without_effect() -> Rows:
    yield "flags", "because"
    yield from ((_flags(rule), _marked(rule.why)) for rule in WITHOUT_EFFECT)


def absent() -> Rows:
    yield "flags", "because"
    yield from ((_flags(rule), _marked(rule.why)) for rule in ABSENT)


def variables() -> Rows:
    yield "variable", "here"
    for each in VARIABLES:
        option = f"`--{each.taken.replace('_', '-')}`"
        yield f"`{each.name}`", option if each.taken else _marked(each.why)


def sglang() -> Iterator[str]:
    yield ", ".join(f"{_flags(rule)} (`--{rule.here}`)" for rule in SGLANG if rule.here) + "."


def _flags(rule: Rule) -> str:
    long = (flag.name for flag in names(rule) if not flag.name.startswith("-"))
    return ", ".join(f"`--{name}`" for name in long)


def _marked(text: str) -> str:
    """Marks the flags in a sentence as code."""
    return re.sub(r"(?<![`\w-])(--[a-z0-9-]+)", r"`\1`", text)
