"""What a pipeline stage gets from the one before it, and gives to the one after it."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.common.distributed.parallel_state import ParallelState


class Neighbours:
    """Rank r of a stage talks to rank r of the next. Hidden states are equal on all ranks of a
    stage: each sends its share of the columns, and the receivers gather them among themselves,
    since the ranks of a stage are closer to each other than stages are (as in Megatron-LM,
    arXiv:2104.04473, section 4.1)."""

    def __init__(self, state: ParallelState, hidden_size: int, dtype: torch.dtype) -> None:
        self._pp = state.pp
        self._tp = state.tp
        self._dtype = dtype
        splits = hidden_size % state.tp.size == 0
        self._width = hidden_size // state.tp.size if splits else hidden_size
        self._splits = splits and state.tp.size > 1

    def receive(self, num_tokens: int) -> Tensor:
        """`[num_tokens, hidden]` from the stage before; waits for it."""
        part = self._pp.recv((num_tokens, self._width), self._dtype, self._pp.rank - 1)
        return self._tp.all_gather(part, dim=-1) if self._splits else part

    def send(self, hidden: Tensor) -> None:
        """To the stage after; returns when that one has begun to take it, so that no stage runs
        ahead by more than a micro-batch."""
        if self._splits:
            start = self._tp.rank * self._width
            hidden = hidden[:, start : start + self._width]
        self._pp.send(hidden, self._pp.rank + 1)
