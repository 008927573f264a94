"""The MLP of a decoder layer: dense, or a mixture of experts (a router, the experts, and perhaps
one that everybody visits)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.moe_spec import MoESpec
from pdserve.common.distributed.all2all import RoutedTokens
from pdserve.common.model.experts import FusedExperts
from pdserve.common.model.layers import MergedColumnParallelLinear, RowParallelLinear
from pdserve.common.model.sharding import Placement, Shard, shards_of


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


# ---- mixture of experts ----


class Router:
    """Scores every expert for a token and chooses the best `top_k`. Each rank holds all of it."""

    def __init__(self, name: str, spec: MoESpec, hidden: int, placement: Placement) -> None:
        self.name, self.spec = name, spec
        self.weight = placement.zeros(spec.num_experts, hidden)

    def __call__(self, x: Tensor) -> RoutedTokens:
        """`[T, H]`. The product is in the model's dtype, what follows in float32."""
        scores = F.linear(x, self.weight).softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(self.spec.top_k)
        if self.spec.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return RoutedTokens(x, experts, weights, self.spec.num_experts)

    def shards(self) -> Iterator[Shard]:
        shape = tuple(self.weight.shape)
        yield Shard(f"{self.name}.weight", shape, (slice(None), slice(None)), self.weight)


class SharedExpert:
    """An MLP for every token, scaled by a gate of its own. Ranks split it as a dense one."""

    def __init__(self, prefix: str, spec: ModelSpec, inner: int, placement: Placement) -> None:
        self.name = f"{prefix}.shared_expert_gate.weight"
        self.gate = placement.zeros(1, spec.hidden_size)
        self.mlp = MLP(f"{prefix}.shared_expert", spec, inner, placement, reduce_results=False)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, H]` → this rank's part of the sum over ranks."""
        return F.linear(x, self.gate).sigmoid() * self.mlp(x)

    def shards(self) -> Iterator[Shard]:
        yield Shard(self.name, tuple(self.gate.shape), (slice(None), slice(None)), self.gate)
        yield from self.mlp.shards()


class MoE:
    """`[T, H]`, equal on all tensor-parallel ranks → `[T, H]`, equal again."""

    def __init__(self, prefix: str, spec: ModelSpec, moe: MoESpec, placement: Placement) -> None:
        self.group, self.all2all = placement.group, placement.all2all
        self.router = Router(f"{prefix}.gate", moe, spec.hidden_size, placement)
        self.experts = FusedExperts(prefix, moe, spec.hidden_size, placement)
        self.shared: SharedExpert | None = None
        if inner := moe.shared_intermediate_size:
            self.shared = SharedExpert(prefix, spec, inner, placement)
        self.loads = torch.zeros(moe.num_experts, dtype=torch.int64)
        """int64 `[num_experts]`: how many tokens of the last step visited each expert."""

    def __call__(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x) if self.shared is None else self.shared(x)
        own = self.all2all.share(len(x))
        dispatched = self.all2all.dispatch(self.router(x[own]), len(x))
        total[own] += self.all2all.combine(self.experts(dispatched.tokens), dispatched)
        self.loads = dispatched.loads
        return self.group.all_reduce(total)

    def shards(self) -> Iterator[Shard]:
        yield from shards_of(self.router, self.experts)
        if self.shared is not None:
            yield from self.shared.shards()
