"""Computes the least FLOPs and memory traffic that steps need on one rank.

The bytes are: each weight once, the KV of earlier tokens once, the new KV once. A device that
reads B bytes and computes F FLOPs per second needs at least max(bytes / B, FLOPs / F) seconds (the
roofline, Williams et al., CACM 52(4), 2009).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pdserve.common.core.kv_groups import STATE_WINDOW
from pdserve.common.core.step_shape import StepShape
from pdserve.common.model.stages import Stage
from pdserve.common.planning.footprint import DTYPE_BYTES, Footprint, Matrix

STATE_FLOPS = 7
"""FLOPs per token and state element of a gated delta net: the decay, two products with the key and
one with the query."""
_NAMES = {  # first matrix → part of a step
    "q_proj": "qkv_proj",
    "q_a_proj": "qkv_proj",
    "q_b_proj": "qkv_proj",
    "kv_a_proj_with_mqa": "qkv_proj",
    "kv_b_proj": "attention",
    "gate_proj": "gate_up_proj",
}


@dataclass(frozen=True, slots=True)
class Cost:
    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(slots=True)
class _Part:
    """The cost of one linear layer type: bytes per step, FLOPs per token."""

    bytes: float = 0.0
    token_flops: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of steps of `stage` on rank 0 of `footprint`. Linear in the shape (except for
    experts), so it can be applied to a sum of shapes."""

    footprint: Footprint
    stage: Stage
    _linear: dict[str, _Part] = field(default_factory=lambda: defaultdict(_Part))

    def __post_init__(self) -> None:
        for layer in range(self.stage.start, self.stage.end):
            for matrix in self.footprint.matrices(layer):
                self._add(matrix)

    @classmethod
    def whole(cls, footprint: Footprint) -> StepCost:
        """Returns the cost of a model with one stage."""
        return cls(footprint, Stage.whole(footprint.spec.num_layers))

    def parts(self, shape: StepShape) -> dict[str, Cost]:
        """Returns the cost by part: linear layers by name, `experts`, `attention`, `KV write`,
        `embedding`, `logits`. Norms, rope, activation functions and sampling are left out: they
        work on cached activations and need few FLOPs."""
        found = {
            name: Cost(part.token_flops * shape.tokens, part.bytes * shape.steps)
            for name, part in self._linear.items()
        }
        if self._num_sparse:
            found["experts"] = self._experts(shape)
        found["attention"] = found.get("attention", Cost()) + self._attention(shape)
        written = shape.tokens * self.footprint.kv_per_token(self.stage)
        found["KV write"] = Cost(bytes=written + self._states_written(shape))
        if self.stage.first:
            found["embedding"] = Cost(bytes=shape.tokens * self._hidden * self.footprint.item)
        if self.stage.last and shape.sampled:
            found["logits"] = self._logits(shape)
        return found

    def total(self, shape: StepShape) -> Cost:
        """Returns the cost of all parts; `bytes` are read and written."""
        return sum(self.parts(shape).values(), Cost())

    def written(self, shape: StepShape) -> float:
        """Returns the bytes written, a part of `total`."""
        return self.parts(shape)["KV write"].bytes

    # ---- the parts ----

    @property
    def _hidden(self) -> int:
        return self.footprint.spec.hidden_size

    @property
    def _num_sparse(self) -> int:
        return sum(map(self.footprint.spec.is_sparse, range(self.stage.start, self.stage.end)))

    def _add(self, matrix: Matrix) -> None:
        name = matrix.name.rpartition(".")[2]
        part = self._linear[_NAMES.get(name, name)]
        part.bytes += self.footprint.matrix_bytes(matrix)
        part.token_flops += 2 * matrix.rows * matrix.columns

    def _attention(self, shape: StepShape) -> Cost:
        """Returns the cost of two products (scores, weighted sum) per query-key pair and query
        head. Latents take the cheaper way: queries are absorbed, or the keys and values of earlier
        tokens are computed."""
        spec, footprint = self.footprint.spec, self.footprint
        latent, heads = spec.latent, spec.num_heads // footprint.tp
        total = Cost()
        if latent is not None:
            up = latent.kv_rank * (latent.nope_dim + latent.value_dim)
            absorbed = shape.pairs * (latent.size + latent.kv_rank)
            computed = shape.pairs * (latent.key_dim + latent.value_dim) + shape.cached * up
            layers = self.stage.end - self.stage.start
            total = Cost(2.0 * heads * layers * min(absorbed, computed))
        sizes = 2 * spec.head_dim if latent is None else 0
        for group, kv in zip(spec.kv_groups, footprint.kv_of_blocks(self.stage, 1), strict=True):
            start, end = group.layers_between(self.stage.start, self.stage.end)
            cached, pairs = shape.cached, shape.pairs
            if group.state:
                numbers = kv / DTYPE_BYTES["float32"]
                read = shape.windows[STATE_WINDOW][0] * kv  # what came before, once a sequence
                total += Cost(STATE_FLOPS * numbers * shape.tokens, read)
                continue
            if group.window is not None:
                cached, pairs = shape.windows[group.window]
            total += Cost(2.0 * pairs * heads * sizes * (end - start), cached * kv)
        return total

    def _states_written(self, shape: StepShape) -> float:
        """Bytes: one state per sequence and step. A chunk of n tokens counts 2n pairs, one less
        where nothing came before it."""
        states = [group.state for group in self.footprint.spec.kv_groups]
        if not any(states):
            return 0
        cached, pairs = shape.windows[STATE_WINDOW]
        sizes = zip(states, self.footprint.kv_of_blocks(self.stage, 1), strict=True)
        return (cached + 2 * shape.tokens - pairs) * sum(
            size for is_state, size in sizes if is_state
        )

    def _logits(self, shape: StepShape) -> Cost:
        numbers = -(-self.footprint.spec.vocab_size // self.footprint.tp) * self._hidden
        read = self.footprint.head_bytes() * shape.sampling_steps
        return Cost(2.0 * shape.sampled * numbers, read)

    def _experts(self, shape: StepShape) -> Cost:
        """Returns the cost of the router, the shared expert if any, and the routed experts. Assumes
        that tokens choose experts uniformly: T tokens with k of E experts each use E · (1 - (1 - k
        / E)^T) different ones. For several steps T is the mean."""
        moe, footprint = self.footprint.spec.moe, self.footprint
        assert moe is not None
        mean = shape.tokens / max(1, shape.steps)
        met = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** mean)
        bytes = met / footprint.ep * footprint.expert_weights(moe)
        router = moe.num_experts * self._hidden
        shared = 3 * self._hidden * moe.shared_intermediate_size / footprint.tp
        visited = 3 * self._hidden * moe.intermediate_size * moe.top_k / footprint.tp
        return Cost(
            2.0 * shape.tokens * (router + shared + visited) * self._num_sparse,
            (bytes + (router + shared) * footprint.item) * self._num_sparse * shape.steps,
        )
