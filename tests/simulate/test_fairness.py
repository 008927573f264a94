"""Fairness at full scale, on the virtual clock: a client's prompt of 128k tokens and its batch of
prompts delay another client's short prompts by little, and all are served."""

from __future__ import annotations

import pytest

from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.config.router import RoutingConfig
from pdserve.router.cluster.policies import load_policy
from pdserve.simulate.calibration import linear
from pdserve.simulate.cluster import ROLES, Setup, simulate
from pdserve.simulate.workloads import Arrival

SPEED = 10_000  # prompt tokens that a prefill node computes in a second
LONG, STEP, SHORT = 131_072, 2000, 500
FLOOD = [Arrival(10.0, LONG, [], 8, client="flood")]
FLOOD += [Arrival(10.0, STEP, [], 8, client="flood") for _ in range(64)]
POLITE = [Arrival(10.5 + number, SHORT, [], 8, client="polite") for number in range(20)]
BEFORE = [Arrival(number, SHORT, [], 8, client="polite") for number in range(6)]


@pytest.mark.parametrize("before", [[], BEFORE], ids=["cold", "measured"])
@pytest.mark.parametrize("options", [{}, {"max_concurrent_requests": 8}, {"prefill_backlog": 0.5}])
def test_a_long_prompt_and_a_batch_delay_another_client_by_little(
    options: dict[str, float], before: list[Arrival]
) -> None:
    policies = {role: load_policy("cost", "policy") for role in ROLES.values()}
    steps = SchedulerConfig(max_num_batched_tokens=STEP)
    setup = Setup("1P1D", linear(SPEED), policies, RoutingConfig(**options), steps)
    arrivals = [*before, *FLOOD, *POLITE]
    found = simulate(setup, arrivals)
    assert not found.refused and len(found.answered) == len(arrivals)
    ttft = {each.arrived: each.ttft for each in found.answered}
    # Without the flood 0.05 s; with it up to two prompts of the batch go first, then half a step.
    assert max(ttft[each.time] for each in POLITE) < 0.7
