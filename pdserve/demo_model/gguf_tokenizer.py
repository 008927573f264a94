"""Writes a GGUF file's tokenizer as a checkpoint's files. transformers converts byte-level
vocabularies; this module adds what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import printable
from pdserve.demo_model.gguf_file import GGUFFile
from pdserve.demo_model.gguf_sentencepiece import sentencepiece_backend

_KEYS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "token_type": "token_type",
    "merges": "merges",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF's, ours
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_GPT2, _SMOLLM = "gpt-2", "smollm"
# In these vocabularies, whole words are tokens even if no merges lead to them.
_IGNORE_MERGES = ("llama3", "llama-v3", "llama-bpe", "tekken")
_BEGINS = ("llama3", "llama-v3", "llama-bpe")  # begin with BOS unless the file says otherwise


def write_tokenizer(file: GGUFFile, folder: Path) -> dict[str, Any]:
    """Writes `tokenizer.json` into the folder and returns `tokenizer_config.json`.

    Raises:
        ConfigError: the file has no tokenizer, or one that cannot be converted exactly.
    """
    kind, pre = _kind_of(file)
    try:
        backend = sentencepiece_backend(file) if kind == _SENTENCEPIECE else _byte_level(file, pre)
    except ConfigError:
        raise
    except Exception as error:  # damaged vocabularies and merges raise errors of any type
        reason = printable(str(error) or type(error).__name__, 200)
        raise ConfigError(f"{file.path}: its tokenizer cannot be read: {reason}") from error
    special = _special_tokens(file)
    begins = kind == _SENTENCEPIECE or pre in _BEGINS
    _surround(
        backend,
        special.get("bos_token") if _flag(file, "add_bos_token", begins) else None,
        special.get("eos_token") if _flag(file, "add_eos_token", False) else None,
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.require(f"{file.architecture}.context_length"),
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if template := file.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _kind_of(file: GGUFFile) -> tuple[str, str]:
    """Returns the kinds of tokenizer and of pre-tokenizer; raises ConfigError unless both are
    known."""
    other = "name the folder of the model's tokenizer by --tokenizer"
    kind = file.metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind == "no_vocab" or not file.metadata.get("tokenizer.ggml.tokens"):
        raise ConfigError(f"{file.path} has no tokenizer: {other}")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise ConfigError(f"{file.path}: its tokenizer {kind!r} is not supported: {other}")
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind == _BYTE_LEVEL and pre not in (_GPT2, _SMOLLM, *_splits()):
        raise ConfigError(
            f"{file.path}: its pre-tokenizer (tokenizer.ggml.pre) {pre!r} is not supported: {other}"
        )
    return kind, pre


def _splits() -> dict[str, str]:
    """Returns the pre-tokenizers that transformers knows, by llama.cpp's names."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        raise ConfigError(
            "GGUF files need transformers 5.24: pip install 'pdserve[gguf]'"
        ) from error
    return GGUF_PRE_TOKENIZER_SPLITS


def _byte_level(file: GGUFFile, pre: str) -> Any:
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf import convert_gguf_tokenizer

    prefix = "tokenizer.ggml."
    given = {
        name: file.metadata[prefix + key]
        for key, name in _KEYS.items()
        if prefix + key in file.metadata
    }
    backend, _ = convert_gguf_tokenizer(file.architecture, given)
    if pre in _IGNORE_MERGES:
        backend.model.ignore_merges = True
    if pre == _SMOLLM:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return backend


def _special_tokens(file: GGUFFile) -> dict[str, str]:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    ids = {
        f"{ours}_token": file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for theirs, ours in _SPECIAL.items()
    }
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    return bool(file.metadata.get(f"tokenizer.ggml.{name}", default))


def _surround(backend: Any, first: str | None, last: str | None) -> None:
    """Makes texts begin and end with these tokens."""
    from tokenizers import processors

    given = [token for token in (first, last) if token is not None]
    if not given:
        return

    def around(text: str) -> list[str]:
        return [token for token in (first, text, last) if token is not None]

    backend.post_processor = processors.TemplateProcessing(
        single=around("$A"),
        pair=[*around("$A"), *around("$B")],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(given)],
    )
