"""A mixture of experts in place of a decoder layer's MLP: a router, this rank's experts, computed
together, and an optional shared expert that every token uses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.moe_spec import ExpertGroups, MoESpec
from pdserve.common.distributed.all2all import RoutedTokens, occurrences
from pdserve.common.model.expert_weights import make_experts
from pdserve.common.model.layers import MLP
from pdserve.common.model.sharding import MatrixPart, Shard, Sharding, shards_of
from pdserve.common.model.weights import WeightMatrix


class MoE:
    """An MoE layer. Takes and returns `[T, H]`, equal on all tensor-parallel ranks."""

    def __init__(self, prefix: str, spec: ModelSpec, moe: MoESpec, sharding: Sharding) -> None:
        self.group, self.all2all = sharding.group, sharding.all2all
        native = sharding.kernels.packer is not None
        self._exact = native and self.group.size > 1 and self.all2all.replicates
        self.router = ExpertRouter(f"{prefix}.gate", moe, spec.hidden_size, sharding)
        self.experts = FusedExperts(prefix, moe, spec.hidden_size, sharding)
        self.shared: SharedExpert | None = None
        if moe.shared_intermediate_size:
            name = f"{prefix}.{moe.family.shared_expert}"
            self.shared = SharedExpert(name, spec, moe, sharding)
        self.loads = torch.zeros(moe.num_experts, dtype=torch.int64, device=sharding.device)
        """int64 `[num_experts]`: tokens of the last step per expert, padding of CUDA graphs
        included. Its memory stays the same, because graphs write to it."""

    def __call__(self, x: Tensor) -> Tensor:
        own = self.all2all.share(len(x))
        dispatched = self.all2all.dispatch(self.router(x[own]), len(x))
        self.loads.copy_(dispatched.loads)
        if self._exact:
            return self._sum_slots(x, dispatched.tokens)
        total = torch.zeros_like(x) if self.shared is None else self.shared.addend(x)
        total[own] += self.all2all.combine(self.experts(dispatched.tokens), dispatched)
        return self.group.all_reduce(total)

    def _sum_slots(self, x: Tensor, tokens: RoutedTokens) -> Tensor:
        """Sums the ranks' parts of each expert's output before the experts are weighted, so that
        values are rounded at the same points as on one rank."""
        slots = self.experts.slots(tokens, partial=True)
        if self.shared is not None:
            slots = torch.cat((slots, self.shared.partial(x)[:, None]), dim=1)
        totals = self.group.all_reduce(slots)
        k = tokens.experts.shape[1]
        y = weighted(totals[:, :k].to(x.dtype).contiguous(), tokens.weights)
        return y if self.shared is None else self.shared.finish(x, totals[:, k]).add_(y)

    @property
    def why_host_waits(self) -> str:
        """Returns which number the host waits for in each step, "" if none."""
        if self.all2all.host_waits:
            return "how many tokens each rank gets"
        return "" if self.experts.has_kernel else "how many tokens each expert gets"

    def shards(self) -> Iterator[Shard]:
        yield from shards_of(self.router, self.experts)
        if self.shared is not None:
            yield from self.shared.shards()


class ExpertRouter:
    """Scores the experts for each token and chooses the best `top_k`. Replicated on all ranks."""

    def __init__(self, name: str, spec: MoESpec, hidden: int, sharding: Sharding) -> None:
        self.name, self.spec = name, spec
        dtype = torch.float32 if spec.family.precise_router else None
        weight = sharding.zeros(spec.num_experts, hidden, dtype=dtype)
        self.weight = WeightMatrix(weight, sharding.kernels)
        self.bias: Tensor | None = None
        if spec.family.correction_bias:
            self.bias = sharding.zeros(spec.num_experts, dtype=torch.float32)

    def __call__(self, x: Tensor) -> RoutedTokens:
        """Routes `[T, H]`. The product is in the weight's dtype, the rest in float32."""
        logits = self.weight.linear(x.to(self.weight.tensor.dtype)).float()
        scores = sigmoid(logits) if self.spec.family.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if self.bias is None else scores + self.bias
        if self.spec.groups is not None:
            choice = within_groups(choice, self.spec.groups)
        experts = choice.topk(self.spec.top_k).indices
        weights = scores.gather(1, experts)
        if self.spec.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return RoutedTokens(x, experts, weights * self.spec.weight_scale, self.spec.num_experts)

    def shards(self) -> Iterator[Shard]:
        yield _whole(f"{self.name}.weight", self.weight)
        if self.bias is not None:
            name = f"{self.name}.e_score_correction_bias"
            yield Shard(name, tuple(self.bias.shape), (slice(None),), self.bias)


def within_groups(scores: Tensor, groups: ExpertGroups) -> Tensor:
    """Returns float32 `[T, experts]` with -inf for the experts outside a token's best groups."""
    grouped = scores.view(len(scores), groups.count, -1)
    best = grouped.topk(groups.best).values.sum(-1)
    chosen = torch.zeros_like(best).scatter_(1, best.topk(groups.top).indices, 1).bool()
    return grouped.masked_fill(~chosen[:, :, None], -torch.inf).flatten(1)


def sigmoid(x: Tensor) -> Tensor:
    """Computes the sigmoid with softmax, which computes each row independently: torch's sigmoid
    rounds the last elements of a tensor differently, so results would depend on the batch."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]


def _whole(name: str, matrix: WeightMatrix) -> Shard:
    target = matrix.tensor
    everything = (slice(None), slice(None))
    return Shard(name, tuple(target.shape), everything, target, finish=matrix.pack)


def weighted(slots: Tensor, weights: Tensor) -> Tensor:
    """Returns the sums `[T, H]` of contiguous `[T, k, H]` with weights `[T, k]`; overwrites
    `slots`."""
    return slots.mul_(weights[:, :, None]).sum(1)


class SharedExpert:
    """An MLP for every token, scaled by its own gate if it has one. Ranks split it like a dense
    MLP."""

    def __init__(self, name: str, spec: ModelSpec, moe: MoESpec, sharding: Sharding) -> None:
        self.name = f"{name}_gate.weight"
        self.gate: WeightMatrix | None = None
        if moe.family.shared_gate:
            self.gate = WeightMatrix(sharding.zeros(1, spec.hidden_size), sharding.kernels)
        inner = moe.shared_intermediate_size
        self.mlp = MLP(name, spec, inner, sharding)

    def addend(self, x: Tensor) -> Tensor:
        """Returns this rank's addend of the sum over ranks, `[T, H]`."""
        return self._scaled(x, self.mlp.down_proj.addend(self.mlp.inner(x)))

    def partial(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum over ranks, the input of `finish`."""
        return self.mlp.down_proj.partial(self.mlp.inner(x))

    def finish(self, x: Tensor, total: Tensor) -> Tensor:
        return self._scaled(x, self.mlp.down_proj.finish(total, x.dtype))

    def _scaled(self, x: Tensor, y: Tensor) -> Tensor:
        return y if self.gate is None else sigmoid(self.gate.linear(x)) * y

    def shards(self) -> Iterator[Shard]:
        if self.gate is not None:
            yield _whole(self.name, self.gate)
        yield from self.mlp.shards()


class FusedExperts:
    """SwiGLU experts (arXiv:2002.05202). Expert-parallel ranks have different experts; neighbouring
    ranks with the same experts split each by its inner features, and their outputs add up."""

    def __init__(self, prefix: str, spec: MoESpec, hidden: int, sharding: Sharding) -> None:
        owners, group = sharding.all2all.group, sharding.group
        split = group.size // owners.size
        inner, part = spec.intermediate_size // split, group.rank % split
        self.kernels = sharding.kernels
        self.count = spec.num_experts // owners.size
        self.first = owners.rank * self.count
        names, size = spec.family, spec.intermediate_size
        rows, all_hidden = slice(part * inner, (part + 1) * inner), slice(0, hidden)
        gate_up, down = [], []
        for expert in range(self.first, self.first + self.count):
            of = f"{prefix}.experts.{expert}"
            gate_up.append(
                [
                    MatrixPart(f"{of}.{name}", (size, hidden), rows, all_hidden)
                    for name in (names.gate_proj, names.up_proj)
                ]
            )
            shape, name = (hidden, size), f"{of}.{names.down_proj}"
            down.append([MatrixPart(name, shape, all_hidden, rows, sharding.blocks)])
        self.gate_up_proj = make_experts(gate_up, sharding)
        self.down_proj = make_experts(down, sharding)

    @property
    def has_kernel(self) -> bool:
        """Whether one kernel computes all experts and reads the row counts on the device."""
        return self.gate_up_proj.has_kernel and self.down_proj.has_kernel

    def __call__(self, tokens: RoutedTokens) -> Tensor:
        """Returns `[T, H]`: per token the weighted sum of its experts on this rank, zeros without
        any. The order of summation does not depend on other tokens in the step."""
        return weighted(self.slots(tokens), tokens.weights)

    def slots(self, tokens: RoutedTokens, partial: bool = False) -> Tensor:
        """Returns `[T, k, H]`: for each of a token's experts on this rank its output, or with
        `partial` this rank's part of it; zeros for experts of other ranks."""
        count, k = tokens.experts.shape
        order, counts = self._by_expert(tokens.experts)
        outputs = self.down_proj.linear(
            self._inner(tokens.hidden, order // k, counts), counts, partial
        )
        if self.has_kernel:  # the kernel skips rows of other ranks' experts, which come last
            beyond = torch.arange(len(order), device=order.device) >= counts.sum()
            outputs.masked_fill_(beyond[:, None], 0)
        slots = outputs.new_zeros(count, k, outputs.shape[1])
        slots.flatten(0, 1)[order] = outputs
        return slots

    def _inner(self, hidden: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        gate_up = self.gate_up_proj.linear(hidden[rows], counts)
        return self.kernels.silu_and_mul(gate_up)

    def _by_expert(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the indices into flat `experts` `[T * k]` of this rank's experts, sorted by
        expert, and int64 `[count]`, how many per expert. With a kernel those of others follow, so
        that the host of a GPU need not wait for their number."""
        own = experts.flatten() - self.first
        own = own.masked_fill((own < 0) | (own >= self.count), self.count)
        counts = occurrences(own, self.count + 1)[: self.count]
        order = own.argsort(stable=True)
        return order if self.has_kernel else order[: int(counts.sum())], counts

    def shards(self) -> Iterator[Shard]:
        return shards_of(self.gate_up_proj, self.down_proj)
