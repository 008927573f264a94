"""Small models with sliding windows, latents, indexers or recurrent states, and random weights, so
that every token depends on all tokens it attends to; in trained models errors would hardly show."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    Mamba2Config,
    MambaConfig,
    MinistralConfig,
    MistralConfig,
    NemotronHConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from paths import MODELS

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 1024,
    "eos_token_id": 0,
}
# Of models without attention.
NO_HEADS = {
    key: SIZES[key] for key in ("hidden_size", "vocab_size", "initializer_range", "eos_token_id")
}
CONFIGS: dict[str, Any] = {
    "mistral": MistralConfig(**SIZES, sliding_window=40),
    "ministral": MinistralConfig(
        **SIZES,
        head_dim=16,
        sliding_window=33,
        layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
    ),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": Qwen3Config(
        **SIZES,
        head_dim=32,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
"""Models with a window in all layers, in two of four, in three, and in every other one."""
LATENTS = {
    "deepseek": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
}
INDEXED = {
    "deepseek-v3.2": DeepseekV32Config(
        **{**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 3},
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        index_topk=24,
        index_n_heads=16,
        index_head_dim=16,
    ),
}
"""Models in which an indexer chooses 24 tokens per query."""
STATES = {
    "qwen3-next": Qwen3NextConfig(
        **SIZES,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3.5": Qwen3_5TextConfig(
        **SIZES,
        head_dim=16,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
    ),
    "falcon-h1": FalconH1Config(
        **{**SIZES, "initializer_range": 0.17},
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=16,
    ),
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "conv", "full_attention", "conv"]),
    "falcon-mamba": FalconMambaConfig(**NO_HEADS, num_hidden_layers=4, tie_word_embeddings=False),
    "mamba": MambaConfig(**NO_HEADS, num_hidden_layers=3, tie_word_embeddings=False),
    "mamba2": Mamba2Config(
        **NO_HEADS,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        state_size=16,
        chunk_size=16,
    ),
    "nemotron-h": NemotronHConfig(
        **{**SIZES, "initializer_range": 0.1},
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
    ),
}
"""Models with a gated delta net in three of four layers; Mamba-2 beside attention in all layers;
short convolutions in three layers; Mamba or Mamba-2 in all layers, without attention; and Mamba-2
in one layer, with two layers that see only one token."""

THROUGH_TRANSFORMERS = {
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=24),
    "gpt-oss": GptOssConfig(
        **SIZES, head_dim=16, sliding_window=24, num_local_experts=4, num_experts_per_tok=2
    ),
    "gemma4": Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 6, "global_head_dim": 32},
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=512,
    ),
    "llama4": Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=96,
        head_dim=16,
        attention_chunk_size=48,
        floor_scale=32,
        num_local_experts=4,
        moe_layers=[1, 3],
    ),
    "bart": BartConfig(
        vocab_size=512,
        d_model=64,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        is_decoder=True,
        is_encoder_decoder=False,
        init_std=0.2,
        eos_token_id=0,
        forced_eos_token_id=None,
    ),
    "bloom": BloomConfig(
        vocab_size=512,
        hidden_size=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=0,
    ),
    "gpt2": GPT2Config(vocab_size=512, n_embd=64, n_layer=3, n_head=4, eos_token_id=0),
}


FAMILIES = CONFIGS | LATENTS | INDEXED | STATES | THROUGH_TRANSFORMERS


def make_windowed(name: str, folder: Path) -> Path:
    """Writes a model of one of the tables above in float32, with the tokenizer of the tiny ones."""
    torch.manual_seed(1)
    with torch.inference_mode(False), torch.no_grad():
        model = AutoModelForCausalLM.from_config(FAMILIES[name], dtype=torch.float32)
        model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "qwen3" / file, folder)
    return folder
