"""Experts over real processes: tokens travel to them and back, and the model stays the model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.all2all import (
    BUILTIN,
    AllToAllV,
    RoutedTokens,
    make_all2all,
)
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.parallel_state import ParallelState
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from ranks import Ranks
from thinned import only, thinned
from tiny_engine import CPU, greedy, load, single_threaded_inference

TRAINED = ["mixtral", "qwen2-moe", "qwen3-moe"]
BACKENDS = list(BUILTIN)
EXCHANGES = ["allgather_reducescatter", "alltoallv"]
PROMPT, TABLE, COUNT = [17, 130, 3, 44, 256, 9, 80], [9, 3, 7, 1], 24
SPREAD = [(tp, ep, name) for tp, ep in [(2, 2), (4, 2), (4, 4)] for name in BACKENDS]


# ---- whole models ----


@cache
def alone(name: str) -> tuple[list[int], list[list[int]]]:
    with single_threaded_inference():
        model = load(MODELS / name)
        return greedy(model, PROMPT, COUNT, TABLE), loads_of(model)


def loads_of(model: Any) -> list[list[int]]:
    found: list[list[int]] = model.expert_loads().tolist()
    return found


def _generate(state: ParallelState, name: str, backend: str) -> tuple[list[int], list[list[int]]]:
    folder = MODELS / name
    sharding = Sharding(state.tp, CPU, torch.float32, make_all2all(backend, state.ep))
    config = ModelConfig(model=str(folder))
    model = load_model(ModelSpec.from_folder(folder), config, sharding)
    return greedy(model, PROMPT, COUNT, TABLE), loads_of(model)


PLACES = [(2, 1, BACKENDS[0]), (4, 1, "alltoallv"), *SPREAD]
FIRST = [  # each size with a manager and a model of its own
    ("mixtral", *PLACES[0]),
    *zip(TRAINED[::-1], *zip(*SPREAD[::4], strict=True), strict=True),
]


@pytest.mark.parametrize(
    ("name", "tp", "ep", "backend"),
    only([(name, *place) for place in PLACES for name in TRAINED], FIRST),
)
def test_tokens_are_those_of_the_whole_model(
    name: str, tp: int, ep: int, backend: str, ranks: Ranks
) -> None:
    """And every rank knows what all experts had to do."""
    found = ranks.run(_generate, name, backend, tp=tp, ep=ep)
    assert found == [alone(name)] * tp


def test_tokens_travel_over_tcp_too(ranks: Ranks) -> None:
    for backend in EXCHANGES:
        found = ranks.run(_generate, "mixtral", backend, tp=2, ep=2, communicator="gloo")
        assert found == [alone("mixtral")] * 2


# ---- managers ----

NUM_EXPERTS, TOP_K, HIDDEN = 8, 3, 6


def route(kind: str, count: int, dtype: torch.dtype) -> RoutedTokens:
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randint(-4, 5, (count, HIDDEN), generator=generator).to(dtype)
    scores = torch.rand(count, NUM_EXPERTS, generator=generator)
    if kind == "skewed":  # all tokens, and all their experts, to the last rank
        scores[:, -TOP_K:] += 1.0
    elif kind == "one":  # most experts are empty
        scores[:, 2] += 1.0
        scores[:, :2] -= 1.0
    experts = scores.topk(TOP_K).indices
    return RoutedTokens(hidden, experts, (experts + 1) / 4, NUM_EXPERTS)


def say(tokens: RoutedTokens, first: int, end: int) -> torch.Tensor:
    """Experts `first … end-1`: expert e multiplies by e + 1."""
    here = (tokens.experts >= first) & (tokens.experts < end)
    factors = (tokens.weights * (tokens.experts + 1) * here).sum(1, keepdim=True)
    return tokens.hidden * factors.to(tokens.hidden.dtype)


def _round_trip(
    state: ParallelState, backend: str, kind: str, count: int, dtype: torch.dtype
) -> tuple[int, int]:
    manager, whole = make_all2all(backend, state.ep), route(kind, count, dtype)
    own = manager.share(count)
    mine = RoutedTokens(whole.hidden[own], whole.experts[own], whole.weights[own], NUM_EXPERTS)
    dispatched = manager.dispatch(mine, count)
    share = NUM_EXPERTS // state.ep.size
    first = state.ep.rank * share
    total = torch.zeros_like(whole.hidden)
    total[own] += manager.combine(say(dispatched.tokens, first, first + share), dispatched)
    state.tp.all_reduce(total)
    expected = say(whole, 0, NUM_EXPERTS)
    if state.tp.size > state.ep.size:  # neighbours split experts; here each said all of it
        expected = expected * (state.tp.size // state.ep.size)
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 1e-1}
    torch.testing.assert_close(total, expected, **tolerance)
    loads = whole.experts.flatten().bincount(minlength=NUM_EXPERTS)
    assert torch.equal(dispatched.loads, loads)
    visitors = (whole.experts // share == state.ep.rank).any(1)
    return len(dispatched.tokens.hidden), int(visitors.sum())


@pytest.mark.parametrize(
    ("tp", "ep", "backend", "kind"),
    thinned([(*spread, kind) for spread in SPREAD for kind in ("random", "skewed", "one")], 4),
)
def test_every_token_gets_there_and_back(
    tp: int, ep: int, backend: str, kind: str, ranks: Ranks
) -> None:
    """Shares that do not divide, fewer tokens than ranks, one, none; every dtype of a model."""
    for count, dtype in [
        *((count, torch.float32) for count in (0, 1, 3, 5, 64, 331)),
        *((17, dtype) for dtype in (torch.bfloat16, torch.float16)),
    ]:
        found = ranks.run(_round_trip, backend, kind, count, dtype, tp=tp, ep=ep)
        if backend == "alltoallv":  # only those that visit, and each of them once
            assert all(came == visitors for came, visitors in found)


def test_a_manager_may_be_anyone_s() -> None:
    pair = GroupCoordinator("pair", ranks=(0, 1))
    assert type(make_all2all(f"{__name__}:Mine", pair)) is Mine
    with pytest.raises(ConfigError, match="allgather_reducescatter, alltoallv, replicated"):
        make_all2all("deepep", pair)


class Mine(AllToAllV):
    pass
