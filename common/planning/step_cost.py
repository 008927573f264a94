"""FLOPs and bytes of steps on one rank: the least a device has to do for them, whatever program
does it.

Bytes are those that no cache can save: each weight once, the KV of earlier tokens once, the new
KV once. A device that reads B bytes and computes F FLOPs a second needs at least
max(bytes / B, FLOPs / F) seconds (the roofline, Williams et al., CACM 52(4), 2009).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pdserve.common.core.step_shape import StepShape
from pdserve.common.model.stages import Stage
from pdserve.common.planning.footprint import Footprint, Matrix

_NAMES = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}  # of fused matrices


@dataclass(frozen=True, slots=True)
class Cost:
    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(slots=True)
class _Part:
    """What one part of the model costs: for a step, and for each of its tokens."""

    bytes: float = 0.0
    token_flops: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of steps of `stage` of the model that `footprint` describes, on its rank 0. Linear in the
    shape (but for experts), so that steps may be added up first."""

    footprint: Footprint
    stage: Stage
    _linear: dict[str, _Part] = field(default_factory=lambda: defaultdict(_Part))

    def __post_init__(self) -> None:
        for layer in range(self.stage.start, self.stage.end):
            for matrix in self.footprint.matrices(layer):
                self._add(matrix)

    @classmethod
    def whole(cls, footprint: Footprint) -> StepCost:
        """Of a model that is not cut into stages."""
        return cls(footprint, Stage.whole(footprint.spec.num_layers))

    def parts(self, shape: StepShape) -> dict[str, Cost]:
        """By part: the linear layers by their names, `experts`, `attention`, `KV write`,
        `embedding`, `logits`. What is computed on activations alone (norms, rope, activation
        functions, sampling) costs no bytes that a cache could not save, and few FLOPs."""
        found = {
            name: Cost(part.token_flops * shape.tokens, part.bytes * shape.steps)
            for name, part in self._linear.items()
        }
        if self._num_sparse:
            found["experts"] = self._experts(shape)
        found["attention"] = self._attention(shape)
        found["KV write"] = Cost(bytes=shape.tokens * self.footprint.kv_per_token(self.stage))
        if self.stage.first:
            found["embedding"] = Cost(bytes=shape.tokens * self._hidden * self.footprint.item)
        if self.stage.last and shape.sampled:
            found["logits"] = self._logits(shape)
        return found

    def total(self, shape: StepShape) -> Cost:
        """`bytes` read and written."""
        return sum(self.parts(shape).values(), Cost())

    def written(self, shape: StepShape) -> float:
        """Bytes: those of `total` that are not read."""
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
        """Scores and weighted sum: two products of each pair, in each query head."""
        spec, footprint = self.footprint.spec, self.footprint
        width = spec.num_heads // footprint.tp * spec.head_dim
        flops = 4.0 * shape.pairs * width * self.stage.num_layers
        return Cost(flops, shape.cached * footprint.kv_per_token(self.stage))

    def _logits(self, shape: StepShape) -> Cost:
        numbers = -(-self.footprint.spec.vocab_size // self.footprint.tp) * self._hidden
        read = self.footprint.head_bytes() * shape.sampling_steps
        return Cost(2.0 * shape.sampled * numbers, read)

    def _experts(self, shape: StepShape) -> Cost:
        """With the router, and the expert that all tokens visit where there is one. Which of the
        others they visit is theirs to choose: here all equally often, so that of E experts a step
        of T tokens, each visiting k, meets E · (1 - (1 - k / E)^T). Of many steps T is the mean."""
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
