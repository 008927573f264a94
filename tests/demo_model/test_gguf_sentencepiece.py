"""Sentencepiece vocabularies of GGUF files: the ids are llama.cpp's, also around special tokens."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers.convert_slow_tokenizer import SpmConverter

import sentencepiece_vocab
from pdserve.common.core.errors import ConfigError
from pdserve.demo_model.gguf_file import GGUFFile
from pdserve.demo_model.gguf_tokenizer import write_tokenizer
from sentencepiece_vocab import BYTE, NORMAL, metadata, texts

RECORDED = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())
SPECIAL = ("[INST]", "[/INST]", "</s>", "<|user|>")


def file_of(**changes: Any) -> GGUFFile:
    given = {key: value for key, value in metadata(**changes).items() if value is not None}
    context = {"general.architecture": "llama", "llama.context_length": 64}
    return GGUFFile(Path("tiny.gguf"), context | given, {})


def tokenizer_of(folder: Path, **changes: Any) -> Tokenizer:
    write_tokenizer(file_of(**changes), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("default", {}),
        ("without add_space_prefix", {"add_space_prefix": False}),
        ("with add_eos_token", {"add_eos_token": True, "add_bos_token": False}),
    ],
)
def test_ids_are_those_of_llama_cpp(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ours = tokenizer_of(tmp_path, **changes)
    assert [ours.encode(text).ids for text in RECORDED["texts"]] == RECORDED[name]


def theirs(legacy: bool) -> Callable[[str], list[int]]:
    """Returns transformers' conversion of the same vocabulary as a sentencepiece model."""
    given = metadata()
    tokens, scores, kinds = (
        given[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")
    )
    proto = SimpleNamespace(
        trainer_spec=SimpleNamespace(byte_fallback=True, unk_piece="<unk>"),
        normalizer_spec=SimpleNamespace(
            precompiled_charsmap=b"",
            remove_extra_whitespaces=False,
            escape_whitespaces=True,
            add_dummy_prefix=True,
        ),
        pieces=[
            SimpleNamespace(type=kind if kind == NORMAL else BYTE, score=score)
            for kind, score in zip(kinds, scores, strict=True)
        ],
    )
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = SpmConverter.build_tokenizer_from_spm_proto(proto, vocab, legacy=legacy)
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    return lambda text: list(backend.encode(text).ids)


def mixed(number: int, seed: int) -> list[list[str]]:
    """Returns texts as alternating plain parts and special tokens."""
    rng = random.Random(seed)
    # Without user-defined tokens, which transformers matches in other places.
    plain = [re.sub(" +", " ", re.sub(r"[<>\[\]]", "", text)) for text in texts(number, seed)]
    return [
        [each for part in rng.sample(plain, k=3) for each in (part, rng.choice(SPECIAL))]
        for _ in range(number)
    ]


@pytest.mark.parametrize("number", [50, pytest.param(5000, marks=pytest.mark.slow)])
def test_ids_are_those_of_transformers_with_legacy(number: int, tmp_path: Path) -> None:
    ours, expected = tokenizer_of(tmp_path, add_bos_token=False), theirs(legacy=True)
    for parts in mixed(number, seed=1):
        assert ours.encode("".join(parts)).ids == expected("".join(parts)), parts


@pytest.mark.parametrize("number", [50, pytest.param(5000, marks=pytest.mark.slow)])
def test_each_part_after_a_special_token_is_a_first_part_without_legacy(
    number: int, tmp_path: Path
) -> None:
    """Without `legacy` transformers puts the space before a text's first part only."""
    ours, expected = tokenizer_of(tmp_path, add_bos_token=False), theirs(legacy=False)
    differ = 0
    for parts in mixed(number, seed=2):
        parts = [part.lstrip(" ▁") for part in parts]  # before a space it puts none
        apart = [token for part in parts for token in expected(part)]
        assert ours.encode("".join(parts)).ids == apart, parts
        differ += apart != expected("".join(parts))
    assert differ > number / 2


def test_text_comes_back(tmp_path: Path) -> None:
    ours = tokenizer_of(tmp_path)
    for text in RECORDED["texts"]:
        if not any(each in text for each in ("<", "[", "▁", "  ")):
            assert ours.decode(ours.encode(text).ids) == text


def test_vocabularies_without_an_order_are_refused(tmp_path: Path) -> None:
    number = len(metadata()["tokenizer.ggml.tokens"])
    with pytest.raises(ConfigError, match=r"same score .*--tokenizer"):
        tokenizer_of(tmp_path, scores=[-1000.0] * number)
    with pytest.raises(ConfigError, match=r"lacks tokenizer\.ggml\.scores"):
        tokenizer_of(tmp_path, scores=None)
    with pytest.raises(ConfigError, match="its tokenizer cannot be read"):
        tokenizer_of(tmp_path, scores=[0.0])
    with pytest.raises(ConfigError, match="its tokenizer cannot be read"):
        tokenizer_of(tmp_path, token_type=[NORMAL])


def test_recorded_texts_have_every_part() -> None:
    joined = "".join(RECORDED["texts"])
    assert all(each in joined for each in sentencepiece_vocab.PARTS)
    assert any(two.isalpha() for one, two in pairwise(joined) if one in ">]")
