"""Ranks of a tensor-parallel group as threads of a test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Crowd:
    """Ranks as threads of this process: a fake of the real group's collectives."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=600)  # a failure ends it at once
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size

    def run(self, work: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
        results: dict[int, torch.Tensor] = {}
        errors: list[Exception] = []

        def rank_main(rank: int) -> None:
            try:
                with torch.inference_mode():
                    results[rank] = work(CrowdMember(self, rank))
            except Exception as error:
                errors.append(error)
                self.barrier.abort()  # the others wait for it

        ranks = range(len(self.parts))
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in ranks]


class CrowdMember:
    def __init__(self, crowd: Crowd, rank: int) -> None:
        self.crowd, self.rank, self.size = crowd, rank, len(crowd.parts)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.crowd.parts[self.rank] = tensor.clone()
        self.crowd.barrier.wait()
        parts = list(self.crowd.parts)
        self.crowd.barrier.wait()
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(tensor), dim=dim)
