"""Marks cases as slow, for `make test-all` only, and sets the number of fuzz examples."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 25))  # examples per parser


def slow(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def thinned(cases: Sequence[Any], every: int, first: int = 0) -> list[Any]:
    """Marks all cases but each `every`-th, from the `first` on, as slow."""
    return only(cases, [case for number, case in enumerate(cases) if number % every == first])


def only(cases: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Marks all cases as slow that are not among the `few`."""
    return [case if case in few else as_slow(case) for case in cases]


def as_slow(case: Any) -> Any:
    if hasattr(case, "marks"):  # a `pytest.param`
        return slow(*case.values, id=case.id)
    return slow(*case) if isinstance(case, tuple) else slow(case)
