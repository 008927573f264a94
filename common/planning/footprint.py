"""Computes the bytes of a model's weights, KV, activations and communication on one rank.

Plain arithmetic over a `ModelSpec`, without torch. It mirrors what `common/model/layers.py`,
`weights.py`, `moe.py` and `decoder.py` allocate; `tests/common/planning/test_plan.py` compares the
two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from pdserve.common.core.kv_groups import KV_AUTO
from pdserve.common.core.latent_spec import LatentSpec
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.moe_spec import MoESpec
from pdserve.common.model.rank_weights import RankWeights, WeightsOf
from pdserve.common.model.stages import Stage

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

# GPU memory that torch does not allocate. These two are estimates, as they depend on GPU, driver
# and libraries; a node measures them at start.
CONTEXT_BYTES = 640 * 2**20  # CUDA context and kernels, cuBLAS' and FlashInfer's workspaces
COMMUNICATOR_BYTES = 512 * 2**20  # NCCL's buffers, where there is more than one rank

LOGIT_BYTES = 9  # per logit of a step: float32, and the token's counts for penalties
SAMPLER_BYTES = 38  # per logit sampled at once: its float64 copies while sorting
SAMPLED_AT_ONCE = 2**23  # logits sampled at once

ROUNDING_BYTES = 5  # per element quantized to int8: float32 and int8 copies


@dataclass(frozen=True, slots=True)
class Matrix:
    """A rank's part of a linear layer's weight: `parts` matrices of the checkpoint, fused."""

    name: str  # module of the first of them
    rows: int  # outputs
    columns: int  # inputs of this rank
    inputs: int  # inputs of the whole matrix
    parts: int = 1
    plain: bool = False  # never quantized, without adapters


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of `spec` in `dtype` on rank 0 of `tp` ranks per stage; rank 0 holds most.

    For the whole model use `Footprint(spec, dtype)` with `Stage.whole(spec.num_layers)`.
    """

    spec: ModelSpec
    dtype: str
    tp: int = 1
    ep: int = 1  # ranks of `tp` over which experts are spread
    kv_cache_dtype: str = KV_AUTO
    weights_of: WeightsOf | None = None  # with transformers; None: assumes the whole model

    @property
    def item(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def _heads(self) -> int:
        return self.spec.num_heads // self.tp

    @property
    def _kv_heads(self) -> int:
        start, end = self.spec.kv_head_range(0, self.tp)
        return end - start

    # ---- weights ----

    def weights(self, stage: Stage) -> int:
        spec, rows = self.spec, self._vocab_rows()
        if spec.impl != "native":
            return self._held_weights(stage)
        total = sum(map(self._layer_weights, range(stage.start, stage.end)))
        if stage.first:
            in_dtype = rows * spec.hidden_size * self.item
            total += self.head_bytes() if spec.tie_word_embeddings else in_dtype
        if stage.last:
            total += spec.hidden_size * self.item
            total += 0 if spec.tie_word_embeddings and stage.first else self.head_bytes()
        return total

    def _held(self, stage: Stage) -> RankWeights:
        if self.weights_of is None:
            return RankWeights(self.spec.num_parameters * self.item, (), (), ())
        return self.weights_of(self.dtype, self.tp, self.ep, stage)

    def _held_weights(self, stage: Stage) -> int:
        held = self._held(stage)
        if (kind := self.spec.quantization) is None or not kind.rounds:
            return held.nbytes
        matrices = [*chain.from_iterable(held.linears), *held.tables]
        stacks = [*((1, *sizes) for sizes in matrices), *held.experts]
        saved = sum(count * rows * columns * (self.item - 1) for count, rows, columns in stacks)
        return held.nbytes - saved + sum(count * rows for count, rows, _ in stacks) * self.item

    def loading(self, stage: Stage) -> int:
        """Estimates the most bytes beside `weights` while they are rounded to int8. A native model
        rounds a tensor as it is read; a class of transformers is rounded once all of it is loaded.
        """
        if (kind := self.spec.quantization) is None or kind.method != "int8":
            return 0
        if self.spec.impl == "native":
            return self._largest_read(stage) * (DTYPE_BYTES[self.spec.dtype] + ROUNDING_BYTES)
        held = self._held(stage)
        matrices = [sum(rows * columns for rows, columns in each) for each in held.linears]
        matrices += [rows * columns for rows, columns in held.tables]
        experts = max((count * rows * columns for count, rows, columns in held.experts), default=0)
        one = max(max(matrices, default=0) * (self.item + ROUNDING_BYTES), experts)
        return held.nbytes - self._held_weights(stage) + one

    def _largest_read(self, stage: Stage) -> int:
        """Returns the elements of the largest checkpoint matrix that a rank reads by rows, with all
        of their inputs."""
        layers = chain.from_iterable(map(self.matrices, range(stage.start, stage.end)))
        experts = () if self.spec.moe is None else self._expert(self.spec.moe)
        sizes = [each.rows * each.inputs // each.parts for each in chain(layers, experts)]
        ends = stage.first or stage.last
        return max(*sizes, ends * self._vocab_rows() * self.spec.hidden_size)

    def _vocab_rows(self) -> int:
        return -(-self.spec.vocab_size // self.tp)

    def head_bytes(self) -> int:
        """Bytes of the LM head (also a tied embedding). Of all quantizations only int8 covers
        it."""
        numbers, kind = self._vocab_rows() * self.spec.hidden_size, self.spec.quantization
        if kind is None or not kind.rounds:
            return numbers * self.item
        return numbers + self._vocab_rows() * self.item

    def idle_weights(self) -> int:
        """Bytes of the experts that a token does not use, in the whole model."""
        if (moe := self.spec.moe) is None:
            return 0
        idle = moe.num_experts - moe.top_k
        return idle * sum(self.expert_weights(moe, layer) for layer in moe.sparse_layers)

    def _layer_weights(self, layer: int) -> int:
        spec, hidden = self.spec, self.spec.hidden_size
        matrices = list(self._attention(layer))
        vectors = 2 * hidden + spec.qkv_bias * matrices[0].rows + spec.o_bias * hidden
        vectors += spec.qk_norm * 2 * spec.head_dim
        if spec.latent is not None:
            vectors += spec.latent.kv_rank + (spec.latent.query_rank or 0)
        attention = self._stored(matrices) + vectors * self.item
        if spec.moe is not None and spec.is_sparse(layer):
            return attention + self._moe_weights(spec.moe, layer)
        return attention + self._mlp_weights(f"model.layers.{layer}.mlp", spec.intermediate_size)

    def _mlp_weights(self, name: str, inner: int) -> int:
        vectors = self.spec.mlp_bias * (2 * inner // self.tp + self.spec.hidden_size)
        return self._stored(self._mlp(name, inner, self.tp)) + vectors * self.item

    def _moe_weights(self, moe: MoESpec, layer: int) -> int:
        """Bytes of an MoE layer. Each rank has the whole router (and shared expert's gate)."""
        hidden, family = self.spec.hidden_size, moe.family
        total = moe.num_experts // self.ep * self.expert_weights(moe, layer)
        router = DTYPE_BYTES["float32"] if family.precise_router else self.item
        total += moe.num_experts * (hidden * router + 4 * family.correction_bias)
        if inner := moe.shared_intermediate_size:
            name = f"model.layers.{layer}.{family.block}.{family.shared_expert}"
            total += self._mlp_weights(name, inner)
            total += family.shared_gate * hidden * self.item
        return total

    def expert_weights(self, moe: MoESpec, layer: int | None = None) -> int:
        """Bytes of this rank's part of one expert of a layer, the first sparse one by default."""
        return self._stored(self._expert(moe, layer))

    def _expert(self, moe: MoESpec, layer: int | None = None) -> Iterator[Matrix]:
        number = moe.sparse_layers[0] if layer is None else layer
        of = f"model.layers.{number}.{moe.family.block}.experts.0"
        names = moe.family.gate_proj, moe.family.down_proj
        matrices = self._mlp(of, moe.intermediate_size, self.tp // self.ep)
        for matrix, name in zip(matrices, names, strict=True):
            yield replace(matrix, name=f"{of}.{name}")

    def _expert_inner(self, moe: MoESpec) -> int:
        return moe.intermediate_size // (self.tp // self.ep)

    def matrices(self, layer: int) -> Iterator[Matrix]:
        """Yields the matrices of the layer's linear layers, without experts."""
        yield from self._attention(layer)
        if not self.spec.is_sparse(layer):
            inner = self.spec.intermediate_size
            yield from self._mlp(f"model.layers.{layer}.mlp", inner, self.tp)

    def _attention(self, layer: int) -> Iterator[Matrix]:
        spec, hidden = self.spec, self.spec.hidden_size
        name, queries = f"model.layers.{layer}.self_attn", spec.num_heads * spec.head_dim
        if spec.latent is not None:
            yield from self._latent_attention(name, spec.latent)
            return
        qkv = self._heads * spec.head_dim + 2 * self._kv_heads * spec.head_dim
        yield Matrix(f"{name}.q_proj", qkv, hidden, hidden, parts=3)
        yield Matrix(f"{name}.o_proj", hidden, queries // self.tp, queries)

    def _latent_attention(self, name: str, latent: LatentSpec) -> Iterator[Matrix]:
        hidden, rank, values = self.spec.hidden_size, latent.query_rank, latent.value_dim
        if rank is None:
            yield Matrix(f"{name}.kv_a_proj_with_mqa", latent.size, hidden, hidden)
            yield Matrix(f"{name}.q_proj", self._heads * latent.key_dim, hidden, hidden)
        else:
            yield Matrix(f"{name}.q_a_proj", rank + latent.size, hidden, hidden, parts=2)
            yield Matrix(f"{name}.q_b_proj", self._heads * latent.key_dim, rank, rank)
        rows, inputs = self._heads * (latent.nope_dim + values), latent.kv_rank
        yield Matrix(f"{name}.kv_b_proj", rows, inputs, inputs, plain=True)
        outputs = self.spec.num_heads * values
        yield Matrix(f"{name}.o_proj", hidden, outputs // self.tp, outputs)

    def _mlp(self, name: str, inner: int, split: int) -> Iterator[Matrix]:
        hidden = self.spec.hidden_size
        yield Matrix(f"{name}.gate_proj", 2 * inner // split, hidden, hidden, parts=2)
        yield Matrix(f"{name}.down_proj", hidden, inner // split, inner)

    def _stored(self, matrices: Iterable[Matrix]) -> int:
        return sum(map(self.matrix_bytes, matrices))

    def matrix_bytes(self, matrix: Matrix) -> int:
        numbers, kind = matrix.rows * matrix.columns, self.spec.quantization
        if matrix.plain or kind is None or not kind.covers(matrix.name):
            return numbers * self.item
        return kind.nbytes(matrix.rows, matrix.columns, matrix.inputs, self.item, matrix.parts)

    # ---- LoRA adapters ----

    def adapters(self, stage: Stage, count: int, rank: int, tokens: int) -> int:
        """Bytes of `count` LoRA adapters of `rank`, which have a pair of matrices per linear layer
        (`common/model/lora.py`), plus the activations they add to a step of `tokens`: a copy of a
        layer's input and the products with it."""
        step = tokens * (self.spec.hidden_size + 3 * rank)
        return (count * rank * self._adapted(stage) + step) * self.item

    def _adapted(self, stage: Stage) -> int:
        """Returns the elements of an adapter of rank 1."""
        if self.spec.impl != "native":
            return sum(
                (sum(rows for rows, _ in group) + group[0][1]) * len(group)
                for group in self._held(stage).linears
            )
        return sum(
            (each.rows + each.columns) * each.parts
            for layer in range(stage.start, stage.end)
            for each in self.matrices(layer)
            if not each.plain
        )

    # ---- KV ----

    def kv_per_token(self, stage: Stage) -> int:
        """Bytes in all KV groups but states, which do not grow."""
        together = zip(self.spec.kv_groups, self.kv_of_blocks(stage, 1), strict=True)
        return sum(0 if group.state else nbytes for group, nbytes in together)

    def kv_of_blocks(self, stage: Stage, block_size: int) -> tuple[int, ...]:
        """Bytes of a block in each KV group: planes (key, value; or one of latents) × layers × KV
        heads of the rank × slots × bytes of a row. With more ranks than KV heads each rank still
        holds one."""
        return tuple(
            group.planes * (end - start) * (last - first) * slots * numbers * DTYPE_BYTES[dtype]
            for group in self.spec.kv_groups
            for start, end in [group.layers_between(stage.start, stage.end)]
            for first, last in [group.head_range(0, self.tp)]
            for slots, _ in [group.page(block_size)]
            for numbers, dtype in [group.row(self.dtype, self.kv_cache_dtype)]
        )

    # ---- activations ----

    def activations(self, stage: Stage, tokens: int, sequences: int) -> int:
        """Estimates the peak bytes of a step of `tokens` tokens that samples for each of its
        `sequences`: the larger of the layers' and the sampler's peak. Counts live tensors, without
        allocator rounding and kernel workspaces."""
        angles, ids = self.spec.head_dim * self.item, 4 * 8  # token, position, block and slot
        if self.spec.moe is not None:  # which experts, with what weight, and their order
            ids += self.spec.moe.top_k * (3 * 8 + 4)
        layers = tokens * (self._layer_activations() * self.item + angles + ids) + self._dense()
        return max(layers, self._sampling(sequences)) if stage.last else layers

    def _layer_activations(self) -> int:
        """Elements per token at the largest of three peaks. All have the residual, its normed copy
        and the last product. Attention adds projected heads, and rotated queries and keys or its
        output; the MLP adds gate, up, their product and one more; a norm adds the next residual and
        its copy. For experts the worst case: all that a token uses are on this rank."""
        spec = self.spec
        h, k = self._heads * spec.head_dim, self._kv_heads * spec.head_dim
        if spec.latent is not None:  # absorbed queries are the largest
            h, k = self._heads * spec.latent.size, spec.latent.size
        attention = h + 2 * k + max((2 + spec.qk_norm) * (h + k), h + spec.hidden_size)
        return 3 * spec.hidden_size + max(*self._mlp_peaks(), attention, 2 * spec.hidden_size)

    def _mlp_peaks(self) -> Iterator[int]:
        """Yields the elements per token at the peaks within the MLP or the experts."""
        spec, hidden = self.spec, self.spec.hidden_size
        if spec.has_dense_layers:
            inner = spec.intermediate_size // self.tp
            yield 3 * inner + max(inner, hidden)
        if (moe := spec.moe) is None:
            return
        if inner := moe.shared_intermediate_size // self.tp:
            yield 3 * inner + max(inner, hidden)
        # The layer's output, copies of tokens from other ranks, and `top_k` times a token's part
        # of the grouped products.
        inner, came = self._expert_inner(moe), self.ep > 1
        peaks = (hidden + 2 * inner, 4 * inner, inner + hidden, 2 * hidden)
        yield (1 + came) * hidden + moe.top_k * max(peaks)

    def _dense(self) -> int:
        """Bytes of the largest quantized matrix while it is dequantized for its product; with
        `desc_act` also of one part's scales, expanded to all inputs."""
        if (kind := self.spec.quantization) is None:
            return 0
        mlp = self._mlp("model.layers.0.mlp", self.spec.intermediate_size, self.tp)
        expert = () if self.spec.moe is None else self._expert(self.spec.moe)
        sizes = (
            each.rows * each.columns * (1 + kind.desc_act / each.parts)
            for each in chain(self._attention(0), mlp, expert)
            if not each.plain
        )
        return int(max(sizes)) * self.item

    def _sampling(self, sequences: int) -> int:
        """Bytes of the sampler, or of the int8 head while it is dequantized, whichever is more."""
        kind, head = self.spec.quantization, self._vocab_rows() * self.spec.hidden_size * self.item
        rounded = kind is not None and kind.rounds
        logits = sequences * self.spec.vocab_size
        sampled = LOGIT_BYTES * logits + SAMPLER_BYTES * min(logits, SAMPLED_AT_ONCE)
        return max(sampled, rounded * head)

    # ---- communication ----

    def all_reduces(self, num_layers: int, tokens: int) -> int:
        """Bytes a rank contributes to the all-reduces of a step: two per layer, after attention and
        after the MLP, of `[tokens, hidden_size]` (Megatron-LM, arXiv:1909.08053). Not counted:
        those of the embedding and the logits, which are once per step."""
        if self.tp == 1:
            return 0
        return 2 * num_layers * tokens * self.spec.hidden_size * self.item


def overhead(world_size: int) -> int:
    """Estimates the bytes of a GPU that torch does not allocate, in a node of `world_size`
    ranks."""
    return CONTEXT_BYTES + (COMMUNICATOR_BYTES if world_size > 1 else 0)
