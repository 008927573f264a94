"""Figures that a replica measures of its steps and hand-offs."""

from __future__ import annotations

import pytest

from pdserve.common.engine.rates import FIRST, MeasuredRates, Rates, mean_rates


def test_nothing_is_known_before_the_first_step() -> None:
    assert MeasuredRates().now == Rates(0, 0, 0, 0)


def test_the_seconds_of_a_token_of_a_step_and_of_a_sequence_are_found() -> None:
    rates = MeasuredRates()
    for turn in range(100):
        rates.step(100 + turn, 2, (100 + turn) / 1000)
        rates.step(0, 1 + turn % 8, 0.02 + 0.003 * (1 + turn % 8))
        rates.handed_over(1000, 0.05)
    assert rates.now == pytest.approx((1e-3, 0.02, 0.003, 5e-5))


def test_steps_that_are_alike_say_nothing_of_one_sequence() -> None:
    rates = MeasuredRates()
    for _ in range(20):
        rates.step(0, 4, 0.04)
    assert rates.now == pytest.approx((0, 0.04, 0, 0))


def test_the_first_steps_do_not_count() -> None:
    rates = MeasuredRates()
    for _ in range(FIRST):
        rates.step(100, 0, 60.0)
        rates.step(0, 1, 60.0)
    assert rates.now == Rates()


def test_old_steps_fade() -> None:
    rates = MeasuredRates()
    for seconds in [1.0] * 50 + [0.1] * 500:
        rates.step(100, 0, seconds)
    assert rates.now.prefill == pytest.approx(0.001, rel=0.01)


def test_replicas_that_have_not_measured_do_not_count() -> None:
    found = mean_rates([Rates(1.0, 0.0), Rates(3.0, 2.0), Rates()])
    assert found == Rates(2.0, 2.0)
