"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434) over a paged cache of latents.

The cache is `[layers, 1, num_blocks, 1, block_size, size]`; every tensor-parallel rank has all of
it, and its own heads. Keys and values of head h are `c Wᵏₕᵀ` and `c Wᵛₕᵀ` of a latent c, so

    scores  = q · (c Wᵏᵀ) = (q Wᵏ) · c           "absorbed": no key is ever computed
    outputs = Σ p (c Wᵛᵀ) = (Σ p c) Wᵛᵀ

Few queries are absorbed, which reads each latent once for all heads. For many it costs more FLOPs
than to compute the keys and values of the context, which are then attended to as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.latent_spec import LatentSpec
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionShape,
)
from pdserve.common.model.attention_native import NativeAttention, NativeContext, can_attend
from pdserve.common.model.attention_torch import Chunk, TorchAttention, TorchContext
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.layers import (
    ColumnParallelLinear,
    Linear,
    LoRA,
    RMSNorm,
    RowParallelLinear,
)
from pdserve.common.model.rotary import Angles, apply_rotary
from pdserve.common.model.sharding import MatrixPart, Shard, Sharding, shards_of

NORM_EPS = 1e-6  # of the latents' norms, independent of the config's `rms_norm_eps`


class LatentAttention:
    """A layer's attention: this rank's heads over the latents that all heads share."""

    def __init__(
        self, prefix: str, spec: ModelSpec, latent: LatentSpec, sharding: Sharding
    ) -> None:
        self.spec, self.group = latent, sharding.group
        self.num_heads = spec.num_heads // sharding.group.size
        hidden, rank = spec.hidden_size, latent.query_rank
        down = [_whole(f"{prefix}.kv_a_proj_with_mqa", latent.size, hidden)]
        self.query_norm: RMSNorm | None = None
        if rank is not None:
            down.insert(0, _whole(f"{prefix}.q_a_proj", rank, hidden))
            self.query_norm = RMSNorm(f"{prefix}.q_a_layernorm", rank, NORM_EPS, sharding)
        self.down_proj = ColumnParallelLinear(down, spec.qkv_bias, sharding)
        name, inputs = ("q_proj", hidden) if rank is None else ("q_b_proj", rank)
        outputs = spec.num_heads * latent.key_dim
        rows, columns = sharding.split(outputs), slice(0, inputs)
        query = MatrixPart(f"{prefix}.{name}", (outputs, inputs), rows, columns)
        self.query_proj = ColumnParallelLinear([query], False, sharding)
        self.norm = RMSNorm(f"{prefix}.kv_a_layernorm", latent.kv_rank, NORM_EPS, sharding)
        self.up_proj = LatentUpProjection(f"{prefix}.kv_b_proj", spec.num_heads, latent, sharding)
        self.o_proj = RowParallelLinear(
            f"{prefix}.o_proj", spec.num_heads * latent.value_dim, hidden, spec.o_bias, sharding
        )

    def __call__(
        self,
        layer: int,
        x: Tensor,
        angles: Angles,
        backend: AttentionBackend,
        kv_cache: Tensor,
        context: AttentionContext,
        lora: LoRA | None = None,
    ) -> Tensor:
        """Attends from normed `[T, hidden]`, writes the latents, and returns `[T, hidden]`."""
        assert isinstance(backend, LatentBackend)
        spec, down = self.spec, self.down_proj(x, lora)
        query, latent, shared = down.split(
            (down.shape[1] - spec.size, spec.kv_rank, spec.rope_dim), dim=1
        )
        query = self.query_proj(x if self.query_norm is None else self.query_norm(query), lora)
        query = query.view(len(x), self.num_heads, spec.key_dim)
        own, turned = query.split((spec.nope_dim, spec.rope_dim), dim=2)
        latents = torch.cat((self.norm(latent)[:, None], self._turn(shared[:, None], angles)), -1)
        attended = backend.attend_latents(
            layer, own, self._turn(turned, angles), latents, self.up_proj.matrix, kv_cache, context
        )
        return self.o_proj(attended.flatten(1), lora)

    def _turn(self, x: Tensor, angles: Angles) -> Tensor:
        if self.spec.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return apply_rotary(x, angles)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layers that adapters may change."""
        return self.down_proj, self.query_proj, self.o_proj

    def shards(self) -> Iterator[Shard]:
        norms = () if self.query_norm is None else (self.query_norm,)
        return shards_of(*self.linears, *norms, self.norm, self.up_proj)


def _whole(name: str, rows: int, columns: int) -> MatrixPart:
    return MatrixPart(name, (rows, columns), slice(0, rows), slice(0, columns))


@dataclass(frozen=True, slots=True)
class UpProjection:
    """Computes the keys and values of this rank's heads from latents."""

    spec: LatentSpec
    weight: Tensor  # [heads, nope_dim + value_dim, kv_rank]

    @property
    def keys(self) -> Tensor:
        """`[heads, nope_dim, kv_rank]`."""
        return self.weight[:, : self.spec.nope_dim]

    @property
    def values(self) -> Tensor:
        """`[heads, value_dim, kv_rank]`."""
        return self.weight[:, self.spec.nope_dim :]


class LatentUpProjection:
    """The weights of an `UpProjection`."""

    def __init__(self, name: str, heads: int, spec: LatentSpec, sharding: Sharding) -> None:
        self.name = name
        rows = spec.nope_dim + spec.value_dim
        self._rows = sharding.split(heads * rows)
        self.shape = (heads * rows, spec.kv_rank)
        weight = sharding.zeros(heads // sharding.group.size, rows, spec.kv_rank)
        self.matrix = UpProjection(spec, weight)

    def shards(self) -> Iterator[Shard]:
        index = (self._rows, slice(None))
        yield Shard(f"{self.name}.weight", self.shape, index, self.matrix.weight.flatten(0, 1))


@dataclass(frozen=True, slots=True)
class InPlace:
    """B sequences with one query each, for the native kernel."""

    rows: Tensor  # [B] row of the token in the step
    context: NativeContext  # of a step of these tokens alone


@dataclass(frozen=True, slots=True)
class LatentContext(TorchContext):
    in_place: InPlace | None  # the decodes; None: there are none, or no native kernel


class LatentBackend(TorchAttention):
    """Attends to latents, in plain torch on CPUs and GPUs. The native kernels of a CPU read the
    latents of decodes in place: absorbed heads share one KV head, whose values are its keys."""

    def __init__(
        self, shape: AttentionShape, device: torch.device, dtype: torch.dtype, kernels: Kernels
    ) -> None:
        super().__init__(shape, device, dtype)
        self._native: NativeAttention | None = None
        if isinstance(kernels, NativeKernels) and can_attend(shape):
            self._native = NativeAttention(shape, device, dtype, kernels)

    def prepare(self, batch: AttentionBatch) -> LatentContext:
        found, in_place = super().prepare(batch), None
        if self._native is not None and found.decodes:
            alone = [i for i, length in enumerate(batch.query_lens) if length == 1]
            rows = torch.tensor([batch.offsets[i] for i in alone])
            in_place = InPlace(rows, self._native.prepare(batch.only(alone)))
        return LatentContext(found.slots, found.decodes, found.chunks, in_place)

    def attend_latents(
        self,
        layer: int,
        own: Tensor,
        turned: Tensor,
        latents: Tensor,
        up: UpProjection,
        kv_cache: Tensor,
        context: LatentContext,
        chosen: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Writes `latents` `[T, 1, size]` and attends with queries `own` `[T, heads, nope_dim]` and
        `turned` `[T, heads, rope_dim]`; returns `[T, heads, value_dim]`. `chosen`: positions of the
        tokens that each query attends to, int64 `[T, n]`, padded with -1; None: all. `sinks`
        `[heads]`: a score in the softmax that has no value."""
        cache = kv_cache[layer]
        context.slots.write(cache, latents)
        out = own.new_empty(len(own), own.shape[1], up.spec.value_dim)
        decodes = context.decodes
        known = own.shape[1] == self.shape.num_heads  # Dots 3 has layers with other numbers
        if context.in_place is not None and known and chosen is None and sinks is None:
            place, decodes = context.in_place, ()
            out[place.rows] = self._attend_in_place(own, turned, up, cache[0], place)
        for group in decodes:
            past = self.read(cache[0], group.gather, group.length)  # [B, 1, length, size]
            mask = group.mask
            if chosen is not None:
                bias = _others(chosen[group.rows], group.length, self.dtype)[:, None, None]
                mask = bias if mask is None else mask + bias
            if sinks is not None:
                mask = past.new_zeros(len(past), 1, 1, group.length) if mask is None else mask
                past, mask = _with_sinks(past, mask, sinks[:, None])
            absorbed = self._absorb(own[group.rows], turned[group.rows], up)
            out[group.rows] = self._decode(absorbed, up, past, mask)
        for chunk in context.chunks:
            rows = slice(chunk.start, chunk.end)
            past = latents[rows, 0] if chunk.gather is None else self._context(cache, chunk)
            mask = chunk.mask
            if mask is None and (chosen is not None or sinks is not None):
                mask = self._mask(torch.arange(chunk.length), chunk.length)
            if mask is not None and chosen is not None:
                mask = mask + _others(chosen[rows], chunk.length, self.dtype)
            if mask is not None and sinks is not None:
                past, mask = _with_sinks(past, mask, sinks[:, None, None])
            out[rows] = self._attend(own[rows], turned[rows], past, up, mask)
        return out

    def _context(self, cache: Tensor, chunk: Chunk) -> Tensor:
        """Returns a chunk's latents, `[length, size]`."""
        assert chunk.gather is not None
        return self.read(cache[0], chunk.gather, chunk.length)[0, 0]

    def _absorb(self, own: Tensor, turned: Tensor, up: UpProjection) -> Tensor:
        """Returns queries that apply to latents, `[T, heads, size]`."""
        products = torch.bmm(own.transpose(0, 1), up.keys).transpose(0, 1)
        return torch.cat((products, turned), dim=-1)

    def _attend_in_place(
        self, own: Tensor, turned: Tensor, up: UpProjection, latents: Tensor, decodes: InPlace
    ) -> Tensor:
        """Attends with the decodes' queries to a layer's `latents` `[N, 1, S, size]`."""
        assert self._native is not None
        absorbed = self._absorb(own[decodes.rows], turned[decodes.rows], up)
        sums = self._native.attend_cached(
            absorbed, latents, latents, up.spec.scale, decodes.context
        )
        return _outputs(sums[..., : up.spec.kv_rank], up)

    def _decode(
        self, absorbed: Tensor, up: UpProjection, past: Tensor, mask: Tensor | None
    ) -> Tensor:
        sums = F.scaled_dot_product_attention(
            absorbed[:, None],
            past,
            past[..., : up.spec.kv_rank],
            attn_mask=mask,
            scale=up.spec.scale,
        )
        return _outputs(sums[:, 0], up)

    def _attend(
        self, own: Tensor, turned: Tensor, past: Tensor, up: UpProjection, mask: Tensor | None
    ) -> Tensor:
        """`mask` `[queries, length]` or `[heads, queries, length]`; None: plain causal."""
        spec = up.spec
        if self._absorbs(len(own), spec):
            absorbed = self._absorb(own, turned, up).transpose(0, 1)
            keys, values = past[None], past[None, :, : spec.kv_rank]
            sums = _masked(absorbed, keys, values, mask, spec.scale)
            return _outputs(sums.transpose(0, 1), up)
        latents, shared = past.split((spec.kv_rank, spec.rope_dim), dim=1)
        heads = own.shape[1]
        keys = torch.cat((latents @ _transposed(up.keys), shared.expand(heads, -1, -1)), dim=-1)
        values = latents @ _transposed(up.values)
        # CPU kernels that do not keep all scores need values of the keys' size.
        values = F.pad(values, (0, keys.shape[2] - values.shape[2]))
        queries = torch.cat((own, turned), dim=-1).transpose(0, 1)
        found = _masked(queries, keys, values, mask, spec.scale)
        return found.transpose(0, 1)[..., : spec.value_dim]

    def _absorbs(self, queries: int, spec: LatentSpec) -> bool:
        """Returns whether absorbing costs fewer FLOPs: its scores and sums are longer, but it
        computes no keys and values."""
        longer = spec.size + spec.kv_rank - spec.key_dim - spec.value_dim
        return queries * longer < spec.kv_rank * (spec.nope_dim + spec.value_dim)


def _masked(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    return F.scaled_dot_product_attention(
        queries[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=len(keys) != len(queries),
    )[0]


def _with_sinks(past: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Appends a latent of zeros to `past` `[…, length, size]`, whose value is zero too, and its
    scores `sinks` `[…, 1]` to the mask."""
    shape = torch.broadcast_shapes(mask[..., :1].shape, sinks.shape)
    scores = mask.expand(*shape[:-1], -1), sinks.to(mask.dtype).expand(shape)
    return F.pad(past, (0, 0, 0, 1)), torch.cat(scores, dim=-1)


def _others(chosen: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Returns a bias `[Q, length]` for the scores of queries: 0 for the tokens that they have
    chosen, -inf for others."""
    added = torch.full((len(chosen), length + 1), float("-inf"), dtype=dtype, device=chosen.device)
    places = torch.where((chosen < 0) | (chosen >= length), length, chosen)
    return added.scatter_(1, places, 0.0)[:, :length]


def _outputs(sums: Tensor, up: UpProjection) -> Tensor:
    """Returns values `[T, heads, value_dim]` of summed latents `[T, heads, kv_rank]`."""
    return torch.bmm(sums.transpose(0, 1), _transposed(up.values)).transpose(0, 1)


def _transposed(part: Tensor) -> Tensor:
    """Transposes a slice of the up-projection for a product. On CPUs it is copied first: torch
    multiplies by a transposed slice in bfloat16 ten times as slowly."""
    return (part.contiguous() if part.device.type == "cpu" else part).transpose(1, 2)
