"""A layer of the decoder: attention, then an MLP or experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.attention import AttentionBackend, AttentionContext
from pdserve.common.model.latent import LatentAttention
from pdserve.common.model.layers import (
    MLP,
    Linear,
    LoRA,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
)
from pdserve.common.model.moe import MoE
from pdserve.common.model.rotary import Angles
from pdserve.common.model.sharding import Shard, Sharding, shards_of


class Attention:
    """Grouped-query self-attention (arXiv:2305.13245)."""

    def __init__(self, prefix: str, spec: ModelSpec, sharding: Sharding) -> None:
        self.head_dim = spec.head_dim
        self.qkv_proj = QKVParallelLinear(prefix, spec, sharding)
        self.o_proj = RowParallelLinear(
            f"{prefix}.o_proj",
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            spec.o_bias,
            sharding,
        )
        self.qk_norms: tuple[RMSNorm, RMSNorm] | None = None
        if spec.qk_norm:
            size, eps = spec.head_dim, spec.rms_norm_eps
            self.qk_norms = (
                RMSNorm(f"{prefix}.q_norm", size, eps, sharding),
                RMSNorm(f"{prefix}.k_norm", size, eps, sharding),
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
        """Attends from normed `[T, hidden]`, writes keys and values into layer `layer` of
        `kv_cache`, and returns `[T, hidden]`."""
        qkv = self.qkv_proj(x, lora).view(x.shape[0], -1, self.head_dim)
        attended = backend.attend(layer, qkv, self.qk_norms, angles, kv_cache, context)
        return self.o_proj(attended.flatten(1), lora)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layers that adapters may change."""
        return self.qkv_proj, self.o_proj

    def shards(self) -> Iterator[Shard]:
        return shards_of(*self.linears, *(self.qk_norms or ()))


class DecoderLayer:
    """Attention, then MLP or experts; each has a norm before it and a residual connection."""

    def __init__(self, index: int, spec: ModelSpec, sharding: Sharding) -> None:
        prefix = f"model.layers.{index}"
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", size, eps, sharding)
        name = f"{prefix}.self_attn"
        self.attention: Attention | LatentAttention
        if spec.latent is not None:
            self.attention = LatentAttention(name, spec, spec.latent, sharding)
        else:
            self.attention = Attention(name, spec, sharding)
        self.mlp_norm = RMSNorm(f"{prefix}.post_attention_layernorm", size, eps, sharding)
        self.mlp: MLP | MoE
        if spec.moe is not None and spec.is_sparse(index):
            self.mlp = MoE(f"{prefix}.{spec.moe.family.block}", spec, spec.moe, sharding)
        else:
            self.mlp = MLP(f"{prefix}.mlp", spec, spec.intermediate_size, sharding)

    def feed_forward(self, x: Tensor, lora: LoRA | None) -> Tensor:
        """Applies the MLP or experts to normed `[T, hidden]`; experts have no adapters."""
        return self.mlp(x, lora) if isinstance(self.mlp, MLP) else self.mlp(x)

    def shards(self) -> Iterator[Shard]:
        return shards_of(self.input_norm, self.attention, self.mlp_norm, self.mlp)
