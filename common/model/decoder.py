"""The decoder: one class for all supported families, which differ in biases, norms, rope, experts.

    hidden = embed(tokens)
    each layer:  hidden += attention(norm(hidden));  hidden += mlp(norm(hidden))
    logits = head(norm(hidden))

Inference only: callers run it under `torch.inference_mode()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionShape,
    StepBackend,
)
from pdserve.common.model.decoder_layer import DecoderLayer
from pdserve.common.model.device import make_backend
from pdserve.common.model.kernels.ops import Kernels, TorchKernels
from pdserve.common.model.kernels.packed import MAX_BLOCKS
from pdserve.common.model.latent import LatentBackend
from pdserve.common.model.layers import (
    MLP,
    LoRA,
    ParallelLMHead,
    RMSNorm,
    VocabParallelEmbedding,
)
from pdserve.common.model.moe import MoE
from pdserve.common.model.native_layers import NativeLayers
from pdserve.common.model.rotary import RotaryEmbedding
from pdserve.common.model.sharding import MatrixPart, Shard, Sharding, shards_of
from pdserve.common.model.stages import Stage

EMBEDDING = "model.embed_tokens"


class Decoder(ABC):
    """Computes steps on a rank. Each KV group has its own attention: `prepare` returns the
    contexts for `forward`."""

    spec: ModelSpec
    stage: Stage
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    expert_parallel_size: int
    attentions: Sequence[StepBackend]  # one per KV group

    def prepare(self, batches: Sequence[AttentionBatch]) -> list[AttentionContext]:
        """Returns what `forward` needs of a step. `batches`: one per KV group."""
        together = zip(self.attentions, batches, strict=True)
        return [attention.prepare(batch) for attention, batch in together]

    @abstractmethod
    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        contexts: Sequence[AttentionContext],
        kv_caches: Sequence[Tensor],
        lora: LoRA | None = None,
    ) -> Tensor:
        """Computes a step's tokens and writes their KV; see `CausalLM.forward`."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 logits `[B, vocab]` of `[B, hidden]`."""

    @abstractmethod
    def adapted(self) -> Iterator[tuple[MatrixPart, ...]]:
        """Yields this rank's parts of the linear layers that may have LoRA adapters; those with one
        product together."""

    @abstractmethod
    def expert_loads(self) -> Tensor | None:
        """Returns int64 `[sparse layers, experts]`: tokens of the last `forward` per expert; None
        if that is not counted."""

    @property
    @abstractmethod
    def weights_bytes(self) -> int:
        """The bytes of this rank's weights."""


class CausalLM(Decoder):
    """A rank's part of a decoder-only language model: its share of its stage's layers. Weights are
    zero until `load_model` fills them and calls `loaded`."""

    attentions: Sequence[AttentionBackend]

    def __init__(self, spec: ModelSpec, sharding: Sharding, stage: Stage | None = None) -> None:
        """Raises ConfigError if the model cannot be split over the group's ranks."""
        group, device, dtype = sharding.group, sharding.device, sharding.dtype
        spec.validate_tensor_parallel(group.size)
        spec.validate_expert_parallel(group.size, sharding.all2all.group.size)
        sharding = replace(sharding, quantization=spec.quantization, blocks=sum_blocks(spec))
        self.spec = spec
        self.stage = stage or Stage.whole(spec.num_layers)
        self.device = device
        self.dtype = dtype
        self.kernels = sharding.kernels
        self.expert_parallel_size = sharding.all2all.group.size
        rotated = spec.head_dim if spec.latent is None else spec.latent.rope_dim
        self.rope = RotaryEmbedding(spec.rope, rotated, device)
        self.layers = [
            DecoderLayer(index, spec, sharding) for index in range(self.stage.start, self.stage.end)
        ]
        self.embedding = _embedding(spec, sharding, self.stage) if self.stage.first else None
        self.head = _Head(spec, sharding, self.embedding) if self.stage.last else None
        self.attentions = [_attention_backend(spec, group, sharding) for group in spec.kv_groups]
        found = places(spec.kv_groups, self.stage)
        self._places = [found[layer] for layer in range(self.stage.start, self.stage.end)]
        self.native_layers: NativeLayers | None = None  # if one call can compute the layers

    def loaded(self) -> None:
        """Notes that the weights are filled and packed, and will not change."""
        self.native_layers = NativeLayers.of(
            self.layers, self._places, self.attentions, self.kernels, self.dtype
        )

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        contexts: Sequence[AttentionContext],
        kv_caches: Sequence[Tensor],
        lora: LoRA | None = None,
    ) -> Tensor:
        """Computes a step's tokens and writes their KV.

        Args:
            inputs: first stage: token ids, int64 `[T]`, the sequences' tokens end to end; other
                stages: output of the stage before.
            positions: int64 `[T]`.
            contexts: from `prepare`.
            kv_caches: per KV group, `[layers, planes, num_blocks, kv_heads, block_size, head_dim]`
                of its layers in this stage, in `dtype`; or rows as `kv_row` says.
            lora: the adapters of the rows, if any.

        Returns:
            `[T, hidden]`: input of the next stage; on the last stage, pass the rows to sample to
            `compute_logits`.
        """
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        angles = self.rope.angles(positions, self.dtype)
        if self.native_layers is not None and lora is None:
            return self.native_layers(hidden, angles, contexts, kv_caches)
        residual = None  # kept apart from `hidden`, because add and norm are one kernel
        for (group, index), layer in zip(self._places, self.layers, strict=True):
            residual, normed = layer.input_norm.add(residual, hidden)
            attention, cache, context = self.attentions[group], kv_caches[group], contexts[group]
            hidden = layer.attention(index, normed, angles, attention, cache, context, lora)
            residual, normed = layer.mlp_norm.add(residual, hidden)
            hidden = layer.feed_forward(normed, lora)
        return hidden if residual is None else residual + hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 logits `[B, vocab]` of `[B, hidden]`, equal on all ranks of the last
        stage."""
        assert self.head is not None, "only the last stage has a head"
        return self.head(hidden)

    def expert_loads(self) -> Tensor | None:
        """Returns int64 `[sparse layers, experts]` of this stage: tokens of the last `forward` per
        expert, on any rank; None if the stage has no MoE layer."""
        loads = [layer.mlp.loads for layer in self.layers if isinstance(layer.mlp, MoE)]
        return torch.stack(loads) if loads else None

    def adapted(self) -> Iterator[tuple[MatrixPart, ...]]:
        for layer in self.layers:
            yield from (linear.parts for linear in layer.attention.linears)
            if isinstance(layer.mlp, MLP):
                yield layer.mlp.gate_up_proj.parts
                yield layer.mlp.down_proj.parts

    def shards(self) -> Iterator[Shard]:
        """Yields the parts of the checkpoint that this rank keeps."""
        ends = [part for part in (self.embedding, self.head) if part is not None]
        return shards_of(*self.layers, *ends)

    @property
    def weights_bytes(self) -> int:
        """The bytes of this rank's weights."""
        return sum(shard.target.nbytes for shard in self.shards())


class _Head:
    """The final norm and the LM head. A tied head shares the embedding's weight if both are on the
    same stage; else it loads the same tensor again."""

    def __init__(
        self, spec: ModelSpec, sharding: Sharding, embedding: VocabParallelEmbedding | None
    ) -> None:
        tied = spec.tie_word_embeddings
        name = EMBEDDING if tied else "lm_head"
        shared = embedding.weight if tied and embedding is not None else None
        self.norm = RMSNorm("model.norm", spec.hidden_size, spec.rms_norm_eps, sharding)
        self.lm_head = ParallelLMHead(name, spec.vocab_size, spec.hidden_size, sharding, shared)
        self._owned = (self.norm,) if shared is not None else (self.norm, self.lm_head)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def shards(self) -> Iterator[Shard]:
        return shards_of(*self._owned)


def _embedding(spec: ModelSpec, sharding: Sharding, stage: Stage) -> VocabParallelEmbedding:
    """Builds the embedding: quantized like a head if tied, packed only if it is also the head
    here."""
    if not spec.tie_word_embeddings:
        sharding = replace(sharding, quantization=None)
    if not (spec.tie_word_embeddings and stage.last):
        sharding = replace(sharding, kernels=TorchKernels())
    return VocabParallelEmbedding(EMBEDDING, spec.vocab_size, spec.hidden_size, sharding)


def _attention_backend(spec: ModelSpec, kv: KVGroup, sharding: Sharding) -> AttentionBackend:
    group, device, dtype = sharding.group, sharding.device, sharding.dtype
    heads = spec.num_heads // group.size
    if spec.latent is not None:
        shape = AttentionShape(heads, 1, spec.latent.size)
        return LatentBackend(shape, device, dtype, sharding.kernels)
    start, end = spec.kv_head_range(group.rank, group.size)
    shape = AttentionShape(heads, end - start, kv.head_dim, kv.window)
    return make_backend(shape, device, dtype, sharding.kernels, sharding.kv_cache_dtype)


def sum_blocks(spec: ModelSpec) -> int:
    """Returns the number of blocks in which the inputs of row-parallel layers are summed: the
    largest number of ranks (a power of two) for which sums are bit-identical."""
    return gcd(spec.num_heads, MAX_BLOCKS)


def places(groups: Sequence[KVGroup], stage: Stage) -> dict[int, tuple[int, int]]:
    """Returns (KV group, index in the group's cache) of each layer of the stage that keeps KV."""
    return {
        layer: (number, index)
        for number, group in enumerate(groups)
        for index, layer in enumerate(
            group.layers[slice(*group.layers_between(stage.start, stage.end))]
        )
    }
