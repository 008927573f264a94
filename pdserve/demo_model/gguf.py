"""Converts a Llama-like GGUF file to a Hugging Face checkpoint folder (safetensors, bfloat16).

Supports what the embedded model needs: tensors that `gguf` can dequantize, and a byte-level BPE
tokenizer that splits digits. Names of fields and tensors are llama.cpp's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

Metadata = Mapping[str, Any]  # the file's fields

DTYPE = torch.bfloat16
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKEN = 3  # GGUF's token type

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def convert(
    source: Path, folder: Path, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes the checkpoint's files into `folder`. `on_progress` gets (tensors done, total)."""
    reader = GGUFReader(source)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(metadata)
    weights = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name, weight = _checkpoint_tensor(tensor, config)
        weights[name] = weight
        if on_progress is not None:
            on_progress(done, len(reader.tensors))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# ---- config ----


def _config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": metadata["llama.context_length"],
        # GGUF stores 1e-5 as float32.
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": len(tokens),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": str(DTYPE).removeprefix("torch."),
        "bos_token_id": tokens.index(IM_START),
        "eos_token_id": tokens.index(IM_END),
        "pad_token_id": tokens.index(IM_END),
    }


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    """Returns both end tokens: chat answers end with <|im_end|>, completions with the other."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {"eos_token_id": [tokens.index(IM_END), tokens.index(END_OF_TEXT)]}


# ---- weights ----


def _checkpoint_tensor(tensor: Any, config: Mapping[str, Any]) -> tuple[str, Tensor]:
    kind, name = _checkpoint_name(tensor.name)
    # Copied to a plain array: slicing gguf's memory map takes seconds.
    values = dequantize(np.asarray(tensor.data), tensor.tensor_type)
    weight = torch.tensor(values)
    if kind == "attn_q":
        weight = _half_split(weight, config["num_attention_heads"])
    if kind == "attn_k":
        weight = _half_split(weight, config["num_key_value_heads"])
    return name, weight.to(DTYPE)


def _checkpoint_name(name: str) -> tuple[str, str]:
    """Returns (kind, checkpoint name) of a GGUF tensor: "blk.3.attn_q.weight" →
    ("attn_q", "model.layers.3.self_attn.q_proj.weight")."""
    parts = name.split(".")
    if parts[0] == "blk":
        return parts[2], f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    return parts[0], f"{_OUTER_NAMES[parts[0]]}.weight"


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Reorders the rows of q or k from GGUF's rotary layout, which pairs neighbouring rows, to the
    checkpoint's, which pairs a row of a head's first half with one of its second half."""
    pairs = weight.view(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


# ---- tokenizer ----


def _tokenizer(metadata: Metadata) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    types = metadata["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # GGUF calls this pre-tokenizer "smollm": each digit becomes its own token.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "unk_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "chat_template": metadata["tokenizer.chat_template"],
    }
