"""Makes a `tokenizers` backend of a GGUF file's sentencepiece vocabulary, with llama.cpp's ids.

llama.cpp first cuts a text at its special and user-defined tokens, then puts a space before each
part between them if the file says so (`tokenizer.ggml.add_space_prefix`), and merges the pair of
pieces whose whole has the best score until none is left. transformers puts the space before the
first part only, and not before a part that begins with one.
"""

from __future__ import annotations

from typing import Any

from pdserve.common.core.errors import ConfigError
from pdserve.demo_model.gguf_config import ENDS
from pdserve.demo_model.gguf_file import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "▁"


def sentencepiece_backend(file: GGUFFile) -> Any:
    """Returns a `tokenizers.Tokenizer`. Raises ConfigError if equal scores leave its merges without
    an order; damaged metadata raises errors of any type."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_values(file, "tokens"))]
    kinds = _kinds(file, tokens)
    vocab = {text: number for number, text in enumerate(tokens)}
    merges = _merges(file, tokens, kinds, vocab)
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    _add_tokens(backend, tokens, kinds)
    return backend


def _values(file: GGUFFile, key: str) -> list[Any]:
    return list(file.require(f"tokenizer.ggml.{key}"))


def _kinds(file: GGUFFile, tokens: list[str]) -> list[int]:
    """Returns each token's type; one that ends answers is a control token in any case."""
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    pairs = zip(tokens, kinds, strict=True)
    return [_CONTROL if text in ENDS else kind for text, kind in pairs]


def _merges(
    file: GGUFFile, tokens: list[str], kinds: list[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that make up a token, those of the best score first."""
    scores = _values(file, "scores")
    by_score = sorted(vocab.items(), key=lambda item: (-scores[item[1]], item[1]))
    splits = {text: _splits(text, vocab) for text, _ in by_score}
    merged = [number for text, number in by_score if splits[text] and kinds[number] == _NORMAL]
    if len({scores[number] for number in merged}) < len(merged) / 2:
        raise ConfigError(
            f"{file.path}: most of its tokens have the same score (tokenizer.ggml.scores), so it "
            "does not say which pieces to merge first: name the folder of the model's tokenizer by "
            "--tokenizer"
        )
    return [pair for pairs in splits.values() for pair in pairs]


def _splits(text: str, vocab: dict[str, int]) -> list[tuple[str, str]]:
    cuts = ((text[:end], text[end:]) for end in range(1, len(text)))
    return [(left, right) for left, right in cuts if left in vocab and right in vocab]


def _add_tokens(backend: Any, tokens: list[str], kinds: list[int]) -> None:
    """Makes the backend cut raw texts at these tokens."""
    from tokenizers import AddedToken

    special = (_CONTROL, _UNKNOWN)
    # Without duplicates: of equal texts the last has the id.
    added = {
        text: AddedToken(text, normalized=False, special=kind in special)
        for text, kind in zip(tokens, kinds, strict=True)
        if kind in (*special, _USER_DEFINED)
    }
    backend.add_tokens(list(added.values()))
