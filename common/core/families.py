"""The architectures that have native code, and how they differ. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve.common.core.moe_spec import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    MoEFamily,
)


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from the common decoder. A bias of `None` follows the config's
    `attention_bias`."""

    name: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool = False  # whether the config's `mlp_bias` applies
    qk_norm: bool = False
    windowed: bool = False  # whether `sliding_window` applies
    window_in_use: bool = False  # the default of `use_sliding_window`
    default_window: int | None = None  # the default of `sliding_window`
    # (layer, `max_window_layers`) → whether the layer has the window, without `layer_types`.
    windowed_layer: Callable[[int, int], bool] = lambda layer, most: True
    moe: MoEFamily | None = None
    latent: bool = False  # whether attention is over latents (MLA)


def _after_the_first(layer: int, most: int) -> bool:
    return layer >= most


MISTRAL = Family(
    "mistral",
    qkv_bias=False,
    o_bias=False,
    windowed=True,
    window_in_use=True,
    default_window=4096,
)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", mlp_bias=True),
    "MistralForCausalLM": MISTRAL,
    "MinistralForCausalLM": replace(MISTRAL, name="ministral"),
    "Qwen2ForCausalLM": Family(
        "qwen2", qkv_bias=True, o_bias=False, windowed=True, windowed_layer=_after_the_first
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", qk_norm=True, windowed=True, windowed_layer=_after_the_first
    ),
    "MixtralForCausalLM": Family(
        "mixtral", qkv_bias=False, o_bias=False, windowed=True, window_in_use=True, moe=MIXTRAL
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias=True,
        o_bias=False,
        windowed=True,
        windowed_layer=lambda layer, most: layer % 2 == 0 and layer < most,
        moe=QWEN2_MOE,
    ),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, windowed=True, moe=QWEN3_MOE),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", mlp_bias=True, moe=DEEPSEEK_V2, latent=True),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", moe=DEEPSEEK_V3, latent=True),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", moe=GLM4_MOE, latent=True),
    "YoutuForCausalLM": Family("youtu", latent=True),
}
