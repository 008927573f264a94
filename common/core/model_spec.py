"""Reads a checkpoint's `config.json` into `ModelSpec`. Standard library only.

The format is Hugging Face transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdserve.common.core.checkpoint_config import check_folder, overridden, read_json
from pdserve.common.core.config_values import CONFIG, MAX_SHOWN, NATIVE, TOKENS, check_values
from pdserve.common.core.errors import ConfigError, InvalidCheckpoint
from pdserve.common.core.families import FAMILIES, Family
from pdserve.common.core.kv_groups import KV_AUTO, KVGroup, LayerKV, grouped, head_range, kv_groups
from pdserve.common.core.latent_spec import LatentSpec
from pdserve.common.core.moe_spec import MoESpec, required_int
from pdserve.common.core.printable import printable
from pdserve.common.core.quantization import QUANTIZATIONS, Quantization
from pdserve.common.core.rope_spec import LENGTH_DEPENDENT, RopeSpec, rope_settings
from pdserve.common.core.stored_weights import (
    STORED_NAMES,
    StoredWeights,
    check_name,
    format_name,
    weight_formats,
)
from pdserve.common.core.towers import has_towers, native_text

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model. Sizes are of the whole model, not of a rank."""

    architecture: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]  # tokens each layer attends to; None: all
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"
    eos_token_ids: tuple[int, ...]
    moe: MoESpec | None = None
    quantization: Quantization | None = None  # of weights in memory
    stored: StoredWeights | None = None  # format of weights that the loader dequantizes
    latent: LatentSpec | None = None
    num_extra_layers: int = 0  # after the others, for multi-token prediction; not used
    towers: bool = False  # whether the checkpoint also has image or audio towers
    impl: str = "native"  # or "transformers": its classes compute it (`common/model/hf`)
    num_parameters: int = 0  # only with "transformers"; native: from the sizes
    num_experts: int = 0  # per layer, only with "transformers"
    linears: tuple[tuple[str, int, int], ...] = ()
    """(name, outputs, inputs) of each linear layer, only with "transformers"."""
    own_states: bool = False  # whether transformers' own code computes recurrent layers
    layer_kv: tuple[LayerKV | int, ...] = ()
    """The KV of each layer, only with "transformers"; an integer: the layer attends to that layer's
    KV. Layers of native models differ only in their windows."""

    @classmethod
    def from_folder(
        cls, folder: str | Path, overrides: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        """Reads `config.json`, with `overrides` merged into it (see `overridden`), and, for the end
        tokens, `generation_config.json` if present.

        Raises:
            ConfigError: a file or key is missing, or the model is not supported.
        """
        folder = Path(folder)
        check_folder(folder)
        generation = folder / "generation_config.json"
        return cls.from_config(
            overridden(read_json(folder / "config.json"), overrides or {}),
            read_json(generation) if generation.is_file() else {},
        )

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
        """Like `from_folder`, from a single `config.json` file of any name."""
        return cls.from_config(overridden(read_json(Path(path)), overrides or {}))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelSpec:
        """Like `from_folder`, from the parsed files."""
        check_values(config, CONFIG)
        towers, config = has_towers(config), native_text(config)
        check_values(config, NATIVE)
        architecture, family = _family_of(config)
        _check_supported(config)
        heads, hidden = (
            required_int(config, "num_attention_heads"),
            required_int(config, "hidden_size"),
        )
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        attention_bias = bool(config.get("attention_bias", False))
        quantization, stored = weight_formats(config.get("quantization_config"))
        latent = LatentSpec.from_config(config, rope_settings(config)) if family.latent else None
        if latent is None:
            _check_heads(heads, kv_heads, head_dim)
        rope = RopeSpec.from_config(config, latent.rope_dim if latent else head_dim)
        return cls(
            architecture=architecture,
            family=family.name,
            hidden_size=hidden,
            num_layers=required_int(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=1 if latent else kv_heads,
            head_dim=latent.size if latent else head_dim,
            intermediate_size=required_int(config, "intermediate_size"),
            vocab_size=required_int(config, "vocab_size"),
            max_position_embeddings=rope.context(required_int(config, "max_position_embeddings")),
            rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            rope=rope,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=(
                attention_bias
                if family.qkv_bias is None
                else bool(config.get("qkv_bias", family.qkv_bias))  # Qwen2-MoE has this key
            ),
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            layer_windows=_windows_of(config, family),
            dtype=dtype_of(config),
            eos_token_ids=eos_of({**config, **(generation or {})}),
            moe=None if family.moe is None else MoESpec.from_config(config, family.moe),
            quantization=quantization,
            stored=stored,
            latent=latent,
            towers=towers,
            num_extra_layers=config.get("num_nextn_predict_layers") or 0,
        )

    def quantized(self, name: str | None) -> ModelSpec:
        """Returns the spec with --quantization applied; None and the name of the checkpoint's own
        format leave it as it is.

        Raises:
            ConfigError: the checkpoint is already quantized, or in another format than named.
        """
        if name in STORED_NAMES:
            check_name(name, format_name(self.quantization, self.stored))
        if name is None or name in STORED_NAMES:
            return self
        if self.impl != "native":
            self._check_rounded(name)
        if self.quantization is not None and not self.quantization.scaled:
            raise ConfigError(
                f"--quantization {name} needs an unquantized checkpoint, and this one is quantized "
                f"({self.quantization.method}): leave the option out"
            )
        return replace(self, quantization=QUANTIZATIONS[name])

    def on_gpus(self) -> ModelSpec:
        """Returns the spec of GPUs, where linear layers of FP8 and INT8 checkpoints keep 8 bits."""
        if self.quantization is not None or self.stored is None or self.impl != "native":
            return self
        return replace(self, quantization=self.stored.kept)

    def _check_rounded(self, name: str) -> None:
        """Raises ConfigError if transformers' class cannot run with quantized weights."""
        if name != "int8":
            raise ConfigError(
                f"--quantization {name}: {self.architecture} runs through transformers, for which "
                "only int8 is supported"
            )
        if not self.linears:
            raise ConfigError(
                f"--quantization {name}: found no linear layers of {self.architecture}, which runs "
                "through transformers: leave the option out"
            )
        if self.own_states:
            raise ConfigError(
                f"--quantization {name}: {self.architecture} has recurrent layers, which "
                "transformers' own code computes from unquantized weights: leave the option out"
            )

    def check_max_model_len(self, max_model_len: int) -> None:
        """Raises ConfigError if the model cannot serve that many tokens exactly."""
        if max_model_len <= self.max_position_embeddings:
            return
        exceeds = f"--max-model-len {max_model_len} exceeds the model's "
        if self.rope.kind in LENGTH_DEPENDENT:
            raise ConfigError(
                f"{exceeds}original context of {self.max_position_embeddings} tokens: beyond it "
                f"rope type {self.rope.kind!r} rotates all keys again, cached ones too, which "
                "pdserve does not do"
            )
        raise ConfigError(f"{exceeds}{self.max_position_embeddings} positions")

    def validate_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError if the model cannot be split over `size` ranks. KV heads are
        replicated when there are fewer than ranks; the vocabulary is padded and always fits."""
        flag = f"--tensor-parallel-size {size}"
        if self.num_heads % size:
            raise ConfigError(f"{flag} does not divide the model's {self.num_heads} heads")
        for group in self.kv_groups:
            heads = group.num_kv_heads
            if group.state and heads > 1 and heads % size:
                raise ConfigError(
                    f"{flag} does not divide the {heads} key heads of the model's linear attention"
                )
            if heads % size and size % heads:
                raise ConfigError(
                    f"{flag} neither divides the model's {heads} KV heads nor is a multiple of them"
                )
        native = self.impl == "native"  # others check each layer when they split it
        if native and self.has_dense_layers and self.intermediate_size % size:
            raise ConfigError(f"{flag} does not divide intermediate_size {self.intermediate_size}")

    def validate_expert_parallel(self, tp: int, ep: int) -> None:
        """Raises ConfigError if the model's experts cannot be spread over `ep` of the `tp` ranks of
        a stage, or if `ep` > 1 and it has no experts."""
        if self.moe is not None:
            self.moe.validate(tp, ep)
        elif ep > 1 and self.num_experts:
            if ep != tp or self.num_experts % ep:
                raise ConfigError(
                    f"--expert-parallel-size {ep}: {self.architecture} runs through transformers, "
                    f"where it must be --tensor-parallel-size {tp} and divide the model's "
                    f"{self.num_experts} experts"
                )
        elif ep > 1:
            raise ConfigError(f"--expert-parallel-size {ep}: {self.architecture} has no experts")

    def check_kv_cache_dtype(self, kv_cache_dtype: str) -> None:
        """Raises ConfigError if the model does not support the --kv-cache-dtype."""
        if kv_cache_dtype == KV_AUTO:
            return
        self._check_native(f"--kv-cache-dtype {kv_cache_dtype}")
        if self.latent is not None:
            raise ConfigError(
                f"--kv-cache-dtype {kv_cache_dtype}: {self.architecture} caches latents (MLA), "
                "which have no 8-bit format: leave the option out"
            )

    def _check_native(self, flag: str) -> None:
        if self.impl != "native":
            raise ConfigError(
                f"{flag}: {self.architecture} runs through transformers, where this is not "
                "supported; `pdserve models` lists what is native"
            )

    def is_sparse(self, layer: int) -> bool:
        """Returns whether the layer has experts."""
        return self.moe is not None and layer in self.moe.sparse_layers

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        if self.layer_kv:
            return grouped(self.layer_kv)
        planes = 2 if self.latent is None else 1
        return kv_groups(self.layer_windows, self.num_kv_heads, self.head_dim, planes)

    @property
    def has_dense_layers(self) -> bool:
        return self.moe is None or len(self.moe.sparse_layers) < self.num_layers

    def kv_head_range(self, rank: int, size: int) -> tuple[int, int]:
        """Returns the KV heads `start, end` of a rank of a native model: see `head_range`."""
        return head_range(self.num_kv_heads, rank, size)


def _family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise ConfigError(
        f"architecture {', '.join(architectures) or 'unnamed'} is not supported; "
        f"supported: {', '.join(FAMILIES)}"
    )


def _check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise InvalidCheckpoint(
            f"config.json: num_key_value_heads {kv_heads} do not divide num_attention_heads {heads}"
        )
    if head_dim < 1 or head_dim % 2:
        raise InvalidCheckpoint(
            f"config.json: heads of {head_dim} numbers cannot be rotated in pairs"
        )


def _check_supported(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings that transformers supports and this decoder does not."""
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"hidden_act {act!r} is not supported; supported: silu")


def _windows_of(config: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    layers = required_int(config, "num_hidden_layers")
    # Qwen has `sliding_window` even if `use_sliding_window` (default: false) turns it off.
    used = config.get("use_sliding_window", family.window_in_use)
    window: int | None = config.get("sliding_window", family.default_window)
    kinds = config.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    if kinds is not None and (len(kinds) != layers or not known.issuperset(kinds)):
        shown = printable(repr(kinds), MAX_SHOWN)
        raise InvalidCheckpoint(f"config.json: layer_types {shown} do not fit {layers} layers")
    if not (family.windowed and used and window):
        return (None,) * layers
    if kinds is None:
        most = config.get("max_window_layers", 28)
        return tuple(window if family.windowed_layer(i, most) else None for i in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def dtype_of(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype.removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(
            f"checkpoint dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}"
        )
    return dtype


def eos_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    check_values(config, {"eos_token_id": TOKENS})
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
