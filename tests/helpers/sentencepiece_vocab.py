"""A sentencepiece vocabulary as a GGUF file's metadata, made by rules, so that the same ids hold
everywhere: bytes, characters, and the beginnings and ends of words."""

from __future__ import annotations

import random
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = ["hello", "world", "the", "user", "in", "and", "a", "é東", "12", "...", "\n\n", "▁▁", "x"]
LETTERS = "▁ehloworldtusrinad é東12.\n\t<>[]/|_#INSTx"
CONTROLS = ["[INST]", "[/INST]", "<|im_start|>", "<|user|>"]
USER = ["<think>", "▁<PRE>", "  "]
SIZE = 512
TEXTS = ["hello", "world", " ", " the", "\n\n", "é東", "\U0001f600", "z", "\t", "▁", " <PRE>", "  "]
PARTS = [*CONTROLS, *USER, *TEXTS, "<s>", "</s>", "<unk>", "<|im_end|>", "<0x41>", "12...", "user"]


def metadata(**changes: Any) -> dict[str, Any]:
    """Returns the keys `tokenizer.ggml.…`; `changes` are without that prefix, None removes one.
    `<|im_end|>` is of type NORMAL, a mistake that llama.cpp corrects."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    merged = [each for word in WORDS for each in _parts(word)]
    tokens |= dict.fromkeys(dict.fromkeys([*merged, *LETTERS]), NORMAL)
    tokens.pop(" ")
    tokens |= dict.fromkeys(CONTROLS, CONTROL) | dict.fromkeys(USER, USER_DEFINED)
    tokens["<|im_end|>"] = NORMAL
    tokens |= {f"<unused{i}>": CONTROL for i in range(SIZE - len(tokens))}
    kinds = list(tokens.values())
    found = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": list(tokens),
        "scores": [-float(i) if kind == NORMAL else 0.0 for i, kind in enumerate(kinds)],
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": None,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _parts(word: str) -> list[str]:
    """Returns its pieces, with and without the space, the longest first: so merges compete."""
    words = [f"▁{word}", word]
    pieces = {each[i:j] for each in words for i in range(len(each)) for j in range(i + 2, 9)}
    return sorted(pieces, key=lambda piece: (-len(piece), piece))


def texts(number: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    drawn = [["".join(rng.choices(LETTERS, k=4)), *rng.choices(PARTS, k=4)] for _ in range(number)]
    for parts in drawn:
        rng.shuffle(parts)
    return ["", " ", "  ", " hello", "▁hello", *("".join(parts) for parts in drawn)]
