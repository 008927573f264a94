"""Measures the exchange of tokens with their experts' ranks, for each all-to-all backend.

Each row is one layer's dispatch and combine, without the experts' computation: bytes sent by all
ranks together, and median milliseconds; also the all-reduce at the end of every layer (`replicated`
is only that). The last columns are the ratios alltoallv / allgather_reducescatter: below 1 it sends
less, or is faster.

    uniform   all experts are equally likely
    skewed    the n-th expert is chosen n times less often than the first (Zipf)
    one rank  all tokens use only the first rank's experts

    python benchmarks/bench_all2all.py [--ranks 2,4] [--tokens 1,16,64,512] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import msgspec
import torch
from rank_steps import step_all
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pdserve.common.distributed.all2all import RoutedTokens, make_all2all
from pdserve.common.distributed.check import CheckConfig, CheckWorker
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.measure import time_calls

EXCHANGES = ("allgather_reducescatter", "alltoallv")
ROUTINGS = ("uniform", "skewed", "one rank")


@dataclass(frozen=True)
class Case:
    ranks: int
    tokens: int  # of a step, over all ranks
    routing: str
    hidden: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Exchange:
    nbytes: int
    ms: float


@dataclass(frozen=True)
class Result:
    case: Case
    exchanges: dict[str, Exchange]
    all_reduce_ms: float


class CountingGroup:
    """A group that adds up what leaves this rank."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self.sent += (self.size - 1) * tensor.nbytes
        return self._group.all_gather(tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.sent += tensor.nbytes * (self.size - 1) // self.size
        return self._group.reduce_scatter(tensor, dim)

    def all_to_all(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        width = rows.shape[1:].numel() * rows.element_size()
        self.sent += (len(rows) - sends[self.rank]) * width
        return self._group.all_to_all(rows, sends, receives)


class BenchWorker(CheckWorker):
    """A rank of cluster-check; a step is a case. Its tensor-parallel ranks hold experts here."""

    def step(self, message: bytes) -> bytes:
        case, group = msgspec.msgpack.decode(message, type=Case), self.state.tp
        exchanges = {name: self._exchange(case, name) for name in EXCHANGES}
        hidden = torch.zeros(case.tokens, case.hidden)
        seconds = time_calls(group, lambda: group.all_reduce(hidden), self.config.seconds)
        return msgspec.msgpack.encode(Result(case, exchanges, 1e3 * seconds))

    def _exchange(self, case: Case, name: str) -> Exchange:
        counting: Any = CountingGroup(self.state.tp)
        _round_trip(make_all2all(name, counting), case)
        sent = self.state.tp.all_reduce(torch.tensor([counting.sent]))
        manager = make_all2all(name, self.state.tp)
        seconds = time_calls(self.state.tp, lambda: _round_trip(manager, case), self.config.seconds)
        return Exchange(int(sent), 1e3 * seconds)


def _round_trip(manager: Any, case: Case) -> None:
    own = manager.share(case.tokens)
    experts = _choices(case)[own]
    hidden = torch.zeros(len(experts), case.hidden)
    tokens = RoutedTokens(hidden, experts, torch.ones(experts.shape), case.experts)
    dispatched = manager.dispatch(tokens, case.tokens)
    manager.combine(dispatched.tokens.hidden, dispatched)


def _choices(case: Case) -> Tensor:
    """int64 `[tokens, top_k]`, equal on all ranks."""
    chances = torch.ones(case.experts)
    if case.routing == "skewed":
        chances /= torch.arange(1, case.experts + 1)
    elif case.routing == "one rank":
        chances[case.experts // case.ranks :] = 0
    rows = chances.expand(case.tokens, -1)
    return rows.multinomial(case.top_k, generator=torch.Generator().manual_seed(0))


def run(cases: list[Case], communicator: str, seconds: float) -> list[Result]:
    ranks = cases[0].ranks
    config = CheckConfig(ranks, communicator=communicator, seconds=seconds)
    messages = [msgspec.msgpack.encode(case) for case in cases]
    answers = asyncio.run(step_all("bench_all2all:BenchWorker", ranks, config, messages))
    return [msgspec.msgpack.decode(answer, type=Result) for answer in answers]


def show(results: list[Result], title: str) -> None:
    table = Table(title=title)
    for column in ("ranks", "tokens", "routing"):
        table.add_column(column, justify="left" if column == "routing" else "right")
    for column in ("KiB ag/rs", "KiB a2av", "ms ag/rs", "ms a2av", "ms all-reduce"):
        table.add_column(column, justify="right")
    for column in ("KiB ratio", "ms ratio"):
        table.add_column(column, justify="right")
    for each in results:
        gather, to_all = (each.exchanges[name] for name in EXCHANGES)
        table.add_row(
            *(str(each.case.ranks), str(each.case.tokens), each.case.routing),
            *(f"{exchange.nbytes / 1024:.0f}" for exchange in (gather, to_all)),
            *(f"{ms:.3f}" for ms in (gather.ms, to_all.ms, each.all_reduce_ms)),
            *(f"{to_all.nbytes / gather.nbytes:.2f}", f"{to_all.ms / gather.ms:.2f}"),
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="that hold different experts")
    parser.add_argument("--tokens", default="1,16,64,512", help="of a step, separated by commas")
    parser.add_argument("--communicator", default="auto", help="as --device-communicator")
    parser.add_argument("--hidden", type=int, default=1024, help="numbers of a token, float32")
    parser.add_argument("--experts", type=int, default=32, help="of the layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts a token visits")
    parser.add_argument("--seconds", type=float, default=0.3, help="per figure")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    shape = (args.hidden, args.experts, args.top_k)
    results = []
    for ranks in map(int, args.ranks.split(",")):
        pairs = product(map(int, args.tokens.split(",")), ROUTINGS)
        cases = [Case(ranks, tokens, routing, *shape) for tokens, routing in pairs]
        results += run(cases, args.communicator, args.seconds)
    title = "hidden {}, {} experts, {} of them for each token".format(*shape)
    show(results, f"{title}, {args.communicator}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(each) for each in results], file, indent=2)


if __name__ == "__main__":
    main()
