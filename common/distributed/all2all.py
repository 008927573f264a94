"""Moves tokens to the ranks of their experts, and the results back.

    All2AllManager
    ├── Replicated              every rank has every token already: nothing moves
    ├── AllGatherReduceScatter  each rank sends its tokens to all, and gets its rows of the sum
    ├── AllToAllV               each token goes once to each rank that has one of its experts
    └── a plugin                "module:Class", or an entry point

An MoE layer asks `share` which tokens this rank dispatches, dispatches them, computes its own
experts for all tokens that arrived, and combines. Experts have no capacity limit, so no token is
dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.plugins import resolve
from pdserve.common.distributed.group import GroupCoordinator

BUILTIN = {
    "replicated": "pdserve.common.distributed.all2all:Replicated",
    "allgather_reducescatter": "pdserve.common.distributed.all2all:AllGatherReduceScatter",
    "alltoallv": "pdserve.common.distributed.all2all:AllToAllV",
}
ENTRY_POINTS = "pdserve.all2all_managers"

NOWHERE = -1
"""The expert id of padding rows."""


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """`T` tokens and the `k` experts of each."""

    hidden: Tensor  # [T, H]
    experts: Tensor  # int64 [T, k]: the model's expert ids, or NOWHERE
    weights: Tensor  # float32 [T, k]: each expert's weight in the token's sum
    num_experts: int  # of the layer


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The tokens a rank must compute, and what `combine` needs to return them."""

    tokens: RoutedTokens  # some of their experts may be on other ranks
    loads: Tensor  # int64 [num_experts]: (token, expert) pairs in this step, over all ranks
    trip: Any = None  # private to the manager


class All2AllManager(ABC):
    """Moves tokens for the layers of one rank. Rank r of the group holds the r-th equal share of
    each layer's experts. All ranks must call the same methods in the same order."""

    host_waits: ClassVar[bool] = True
    """Whether the host waits for a number that the device computes. Steps that wait cannot be
    captured as CUDA graphs."""

    replicates: ClassVar[bool] = False
    """Whether each rank computes its experts for all tokens, so that no token moves."""

    def __init__(self, group: GroupCoordinator) -> None:
        """`group`: the ranks that hold different experts."""
        self.group = group

    def share(self, num_tokens: int) -> slice:
        """Returns which of the step's tokens, which all ranks have, this rank dispatches. Shares
        are equal, but the last ones may be shorter or empty."""
        most = self._most(num_tokens)
        start = min(self.group.rank * most, num_tokens)
        return slice(start, min(start + most, num_tokens))

    def _most(self, num_tokens: int) -> int:
        return -(-num_tokens // self.group.size)

    @abstractmethod
    def dispatch(self, tokens: RoutedTokens, num_tokens: int) -> Dispatched:
        """Sends this rank's share of the step's `num_tokens`; returns the `M` tokens that arrived,
        at least all that use an expert of this rank."""

    @abstractmethod
    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Takes `[M, H]`, the contribution of this rank's experts to each token that arrived;
        returns `[T, H]`, the sums over ranks for the tokens that this rank dispatched."""


def make_all2all(name: str, group: GroupCoordinator) -> All2AllManager:
    """Returns the manager of --all2all-backend; Replicated if each rank holds all experts.

    Raises:
        ConfigError: the manager does not exist.
    """
    manager: type[All2AllManager] = resolve(name, BUILTIN, ENTRY_POINTS, "--all2all-backend")
    return manager(group) if group.size > 1 else Replicated(group)


class Replicated(All2AllManager):
    """Every rank routes all tokens and computes its experts for all of them. The tensor-parallel
    all-reduce that follows also adds up the experts' outputs."""

    host_waits = False
    replicates = True

    def share(self, num_tokens: int) -> slice:
        return slice(0, num_tokens)

    def dispatch(self, tokens: RoutedTokens, num_tokens: int) -> Dispatched:
        return Dispatched(tokens, expert_loads(tokens))

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        return outputs


class AllGatherReduceScatter(All2AllManager):
    """The simplest exchange: a rank sends each of its tokens to the `R - 1` others, wherever its
    experts are, and returns a row for every token of theirs."""

    host_waits = False

    def dispatch(self, tokens: RoutedTokens, num_tokens: int) -> Dispatched:
        missing = self._most(num_tokens) - len(tokens.hidden)
        everyone = self.group.all_gather(_pack(_padded(tokens, missing)), dim=0)
        arrived = _unpack(everyone, tokens)
        return Dispatched(arrived, expert_loads(arrived), len(tokens.hidden))

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        count: int = dispatched.trip
        return self.group.reduce_scatter(outputs, dim=0)[:count]


@dataclass(frozen=True, slots=True)
class _RoundTrip:
    rows: Tensor  # int64 [sum(sends)]: indices of the sent tokens, ordered by rank
    sends: list[int]  # rows to each rank
    receives: list[int]
    num_tokens: int  # dispatched by this rank


class AllToAllV(All2AllManager):
    """Sends a token once to each rank that holds at least one of its experts (as DeepEP does).
    Ranks exchange the counts first, which costs a small collective, and on a GPU a wait of the
    host."""

    def dispatch(self, tokens: RoutedTokens, num_tokens: int) -> Dispatched:
        size, rank = self.group.size, self.group.rank
        goes = self._destinations(tokens)
        _, rows = goes.nonzero(as_tuple=True)
        mine = torch.cat((goes.sum(1), expert_loads(tokens)))
        counts = self.group.all_gather(mine[None], dim=0)  # [from rank, to rank … expert …]
        matrix = counts[:, :size].tolist()
        sends, receives = matrix[rank], [row[rank] for row in matrix]
        arrived = self.group.all_to_all(_pack(tokens)[rows], sends, receives)
        trip = _RoundTrip(rows, sends, receives, len(tokens.hidden))
        return Dispatched(_unpack(arrived, tokens), counts[:, size:].sum(0), trip)

    def _destinations(self, tokens: RoutedTokens) -> Tensor:
        """Returns bool `[rank, token]`: whether the token goes to the rank."""
        owners = tokens.experts // (tokens.num_experts // self.group.size)
        goes = owners.new_zeros((len(owners), self.group.size), dtype=torch.bool)
        return goes.scatter_(1, owners, True).t()

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Tensor:
        """Adds the parts in the order of ranks, so that results are reproducible."""
        trip: _RoundTrip = dispatched.trip
        back = self.group.all_to_all(outputs, trip.receives, trip.sends)
        total = outputs.new_zeros((trip.num_tokens, *outputs.shape[1:]))
        for rows, parts in zip(trip.rows.split(trip.sends), back.split(trip.sends), strict=True):
            total[rows] += parts
        return total


def expert_loads(tokens: RoutedTokens) -> Tensor:
    """Returns int64 `[num_experts]`: how many of the tokens use each expert."""
    return occurrences(tokens.experts, tokens.num_experts + 1)[: tokens.num_experts]


def occurrences(numbers: Tensor, count: int) -> Tensor:
    """Returns int64 `[count]`: how often each of `0 … count-1` occurs; -1 counts as the last one.
    Unlike `bincount` it does not make the host wait for a GPU."""
    flat = numbers.flatten().remainder(count)
    return flat.new_zeros(count).scatter_add_(0, flat, torch.ones_like(flat))


def _padded(tokens: RoutedTokens, missing: int) -> RoutedTokens:
    if not missing:
        return tokens
    below = (0, 0, 0, missing)
    return RoutedTokens(
        F.pad(tokens.hidden, below),
        F.pad(tokens.experts, below, value=NOWHERE),
        F.pad(tokens.weights, below),
        tokens.num_experts,
    )


# ---- tokens as bytes, so that one message carries everything ----


def _pack(tokens: RoutedTokens) -> Tensor:
    """uint8 `[T, …]`: experts, weights, hidden."""
    columns = (tokens.experts.to(torch.int32), tokens.weights, tokens.hidden)
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)


def _unpack(rows: Tensor, like: RoutedTokens) -> RoutedTokens:
    """`like`: any tokens of the layer."""
    k = like.experts.shape[1]
    experts, weights, hidden = rows.split((4 * k, 4 * k, rows.shape[1] - 8 * k), dim=1)
    return RoutedTokens(
        hidden.contiguous().view(like.hidden.dtype),
        experts.contiguous().view(torch.int32).to(torch.int64),
        weights.contiguous().view(torch.float32),
        like.num_experts,
    )
