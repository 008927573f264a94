"""FlashInfer's own Python layer over fake kernels: it runs without a GPU, and says which compiled
modules it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flashinfer
import pytest
import torch

from fake_cuda import CAPABILITY


@dataclass(slots=True)
class Asked:
    """`modules`: (kind, the arguments of FlashInfer's `gen_batch_<kind>_module`) of each plan.
    `run`: the kernels that were run, in order: "decode", or the backend of a prefill kernel."""

    modules: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    run: list[str] = field(default_factory=list)


class FakeKernels:
    """A compiled module."""

    def __init__(self, run: list[str], name: str) -> None:
        self._called, self._name = run, name

    def plan(self, *_: object) -> list[int]:
        return [0] * 15

    def _run(self, *_: object) -> None:
        self._called.append(self._name)

    run = paged_run = _run


def fake_kernels(patch: pytest.MonkeyPatch, backend: str) -> Asked:
    """Replaces the kernels. `backend`: what FlashInfer chooses for prefill on this card, fa2 or
    fa3 (Hopper)."""
    asked = Asked()
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made: torch.Tensor = empty(*args, **options)
        return made

    def loader(kind: str) -> Callable[..., FakeKernels]:
        def load(*args: Any) -> FakeKernels:
            asked.modules.append((kind, args))
            return FakeKernels(asked.run, args[0] if kind == "prefill" else kind)

        return load

    patch.setattr(torch, "empty", unpinned)
    fakes: dict[str, Any] = {
        "get_batch_prefill_module": loader("prefill"),
        "get_batch_decode_module": loader("decode"),
        "determine_attention_backend": lambda *_, **__: backend,
        "device_support_pdl": lambda _: False,
        "_check_workspace_buffer_alignment": lambda *_: None,  # fakes have no address
        "block_sparse_indices_to_vector_sparse_offsets": lambda ids, *_: ids,  # a kernel of 0.5
    }
    for module in (flashinfer.prefill, flashinfer.decode):
        for name in fakes.keys() & vars(module).keys():
            patch.setattr(module, name, fakes[name])
        for name in [each for each in vars(module) if "compute_capability" in each]:
            patch.setattr(module, name, lambda *_, **__: CAPABILITY)
    return asked
