"""How evenly a step's tokens kept the experts busy."""

from __future__ import annotations

from torch import Tensor

from common.engine.messages import ExpertLoad


def fold(loads: Tensor, ep: int) -> ExpertLoad:
    """`loads`: int64 `[layers, experts]`, tokens that visited each expert; `ep` ranks hold equal
    shares of the experts."""
    by_rank = loads.sum(0).view(ep, -1).sum(1)
    balancedness = loads.float().mean(1) / loads.amax(1).clamp(min=1)
    return ExpertLoad(tuple(by_rank.tolist()), float(balancedness.mean()))
