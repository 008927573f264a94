"""Reads a model's `tokenizer.json` without transformers, which takes seconds to import."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdserve.common.core.apart import Bounds, try_files
from pdserve.common.core.errors import ConfigError
from pdserve.common.text.tokenizer_formats import TokenizerSource, converted_json, find_source

_BOUNDS = Bounds(cpu_seconds=60.0, memory=2 * 2**30, wall_seconds=300)
_PADDING = re.compile(r'"(?:padding|truncation)"\s*:\s*\{')


def read_tokenizer_json(
    model: str, tokenizer: str | None, dummy_vocab_size: int | None, mode: str = "auto"
) -> str:
    """Returns the `tokenizer.json` of the `tokenizer` folder or else of the checkpoint, or what
    another file is converted to. Dummy weights of the given vocabulary size may have none. `mode`
    is that of --tokenizer-mode.

    Raises:
        ConfigError: there is no tokenizer, or it cannot be converted.
    """
    folder = Path(tokenizer or model)
    if dummy_vocab_size is not None and tokenizer is None and not has_tokenizer(folder):
        return str(byte_tokenizer(dummy_vocab_size).to_str())
    source = find_source(folder, mode)
    if source is not TokenizerSource.JSON:
        return converted_json(folder, source)
    return _unpadded((folder / source.value).read_text(encoding="utf-8"))


def try_tokenizer(folder: str | Path, mode: str = "auto") -> None:
    """Reads a `tokenizer.json` in a child with bounds, and encodes a letter: what panics or takes
    gigabytes does so there. Errors that the readers name by themselves are theirs.

    Raises:
        ConfigError: it panics, or takes more than the bounds.
    """

    def work() -> bytes:
        with suppress(Exception):
            if find_source(folder, mode) is TokenizerSource.JSON:
                text = read_tokenizer_json(str(folder), None, None, mode)
                tokenizers.Tokenizer.from_str(text).encode("a")
        return b""

    if has_tokenizer(folder):
        try_files(f"reading the tokenizer of {folder}", work, _BOUNDS)


def _unpadded(text: str) -> str:
    """Returns a `tokenizer.json` that neither pads nor truncates: libraries do it at once."""
    if not _PADDING.search(text):
        return text
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def has_tokenizer(folder: str | Path) -> bool:
    return any((Path(folder) / source.value).is_file() for source in TokenizerSource)


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
