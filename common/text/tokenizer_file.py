"""Reads a model's `tokenizer.json` without transformers, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdserve.common.core.errors import ConfigError


def has_tokenizer(folder: str | Path) -> bool:
    return (Path(folder) / "tokenizer.json").is_file()


def no_tokenizer(folder: str | Path) -> ConfigError:
    return ConfigError(
        f"{folder} has no tokenizer.json; name a folder that has one with --tokenizer (save a slow "
        "tokenizer once with `PreTrainedTokenizerFast.save_pretrained`)"
    )


def read_tokenizer_json(model: str, tokenizer: str | None, dummy_vocab_size: int | None) -> str:
    """Returns the `tokenizer.json` of the `tokenizer` folder or else of the checkpoint. Dummy
    weights of the given vocabulary size may have none.

    Raises:
        ConfigError: the file is missing.
    """
    folder = Path(tokenizer or model)
    if dummy_vocab_size is not None and tokenizer is None and not has_tokenizer(folder):
        return str(byte_tokenizer(dummy_vocab_size).to_str())
    if not has_tokenizer(folder):
        raise no_tokenizer(folder)
    return (folder / "tokenizer.json").read_text(encoding="utf-8")


def byte_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Returns a tokenizer with one token per byte, for dummy weights without a tokenizer: token b
    is byte b, and tokens from 256 on have the text `<256>`.

    Raises:
        ConfigError: the vocabulary has fewer than 256 tokens.
    """
    if vocab_size < 256:
        raise ConfigError(
            f"a vocabulary of {vocab_size} tokens cannot hold every byte: give a --tokenizer"
        )
    vocab = {char: byte[0] for char, byte in byte_level_alphabet().items()}
    vocab |= {f"<{token_id}>": token_id for token_id in range(256, vocab_size)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_level_alphabet() -> dict[str, bytes]:
    """Returns GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the others for
    characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}
