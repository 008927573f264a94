"""Which of a test's cases wait for `make test-all`, and how many examples are drawn."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 25))  # for a parser


def slow(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def thinned(cases: Sequence[Any], every: int, first: int = 0) -> list[Any]:
    """`make test` has each `every`-th of them, from the `first` on."""
    return only(cases, [case for number, case in enumerate(cases) if number % every == first])


def only(cases: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """`make test` has those that are among the `few`."""
    return [case if case in few else as_slow(case) for case in cases]


def as_slow(case: Any) -> Any:
    if hasattr(case, "marks"):  # a `pytest.param`
        return slow(*case.values, id=case.id)
    return slow(*case) if isinstance(case, tuple) else slow(case)
