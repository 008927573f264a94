"""The dense MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from common.core.model_spec import ModelSpec
from common.model.layers import MergedColumnParallelLinear, RowParallelLinear
from common.model.placement import Placement, Shard, shards_of


class MLP:
    """SwiGLU (arXiv:2002.05202) with `inner` features between its two products."""

    def __init__(
        self,
        prefix: str,
        spec: ModelSpec,
        inner: int,
        placement: Placement,
        reduce_results: bool = True,
    ) -> None:
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up_proj = MergedColumnParallelLinear(
            names, spec.hidden_size, inner, spec.mlp_bias, placement
        )
        self.down_proj = RowParallelLinear(
            f"{prefix}.down_proj", inner, spec.hidden_size, spec.mlp_bias, placement, reduce_results
        )

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def shards(self) -> Iterator[Shard]:
        return shards_of(self.gate_up_proj, self.down_proj)
