"""Tokenizers that are no `tokenizer.json`: found, refused, or converted exactly."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fakes_pipeline import byte_level_folder
from pdserve.common.core.errors import ConfigError
from pdserve.common.text import tokenizer_formats
from pdserve.common.text.grammar import GrammarTokens, Matcher
from pdserve.common.text.stream import TextStream
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.common.text.tokenizer_file import read_tokenizer_json
from pdserve.common.text.tokenizer_formats import TokenizerSource, find_source

ALPHABET = "abc ABC\n\t\u00e9\u6771\U0001f44d0123.,'_(){}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather \u00e9",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def texts(number: int = 300) -> list[str]:
    rng = random.Random(0)
    drawn = ["".join(rng.choices(ALPHABET, k=rng.randrange(40))) for _ in range(number)]
    return ["", " ", "  two  spaces\n", " a", "\ufffd", *drawn]


def assert_same(tokenizer: Tokenizer, encode: Callable[[str], list[int]]) -> None:
    """Its tokens are the original's, and their text comes back, also piece by piece."""
    for text in texts():
        ids = encode(text)
        assert list(tokenizer.encode(text, add_special_tokens=False)) == ids
        stream = TextStream(tokenizer)
        pieces = [stream.push([each]).text for each in ids]
        pieces.append(stream.push([], final=True).text)
        assert "".join(pieces) == tokenizer.decode(ids)


def assert_grammars(folder: Path, tokenizer: Tokenizer) -> None:
    """Nodes read the same tokenizer for grammars."""
    text = read_tokenizer_json(str(folder), None, None)
    tokens = GrammarTokens(text, tokenizer.vocab_size, tokenizer.eos_token_ids)
    matcher = Matcher.compile(tokens, 'start: "hello 7"')
    allowed = matcher.mask()
    first = [each for each in range(tokenizer.vocab_size) if allowed[each // 8] >> each % 8 & 1]
    assert {tokenizer.token_bytes(each) for each in first} <= {
        b"hello 7"[:end] for end in range(1, 8)
    }


# ---- which one -------------------------------------------------------------------------------


def test_the_mode_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json, tekken\.json or tokenizer\.model"):
        find_source(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    assert find_source(tmp_path) is TokenizerSource.SENTENCEPIECE
    with pytest.raises(ConfigError, match=r"no tekken\.json"):
        find_source(tmp_path, "mistral")
    (tmp_path / "tekken.json").touch()
    assert find_source(tmp_path) is TokenizerSource.TEKKEN
    assert find_source(tmp_path, "hf") is TokenizerSource.SENTENCEPIECE
    (tmp_path / "tokenizer.json").touch()
    assert find_source(tmp_path) is find_source(tmp_path, "hf") is TokenizerSource.JSON
    assert find_source(tmp_path, "mistral") is TokenizerSource.TEKKEN


def test_code_is_never_run(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('run')")
    with pytest.raises(ConfigError, match="is Python code"):
        Tokenizer.from_folder(tmp_path)
    folder = byte_level_folder(tmp_path / "both")  # a tokenizer.json beside the code is enough
    given = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(given | config))
    assert Tokenizer.from_folder(folder).encode("a")


@pytest.mark.parametrize(
    ("file", "package", "extra"),
    [
        ("tekken.json", "mistral-common", "mistral"),
        ("tokenizer.model", "sentencepiece", "sentencepiece"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, package: str, extra: str
) -> None:
    monkeypatch.setattr(tokenizer_formats.importlib.util, "find_spec", lambda name: None)
    (tmp_path / file).touch()
    expected = rf"needs the package {package}: pip install 'pdserve\[{extra}\]'"
    with pytest.raises(ConfigError, match=expected):
        Tokenizer.from_folder(tmp_path)


# ---- sentencepiece ---------------------------------------------------------------------------


def sentencepiece_folder(folder: Path, kind: str, **config: Any) -> Any:
    """Trains a model there and returns sentencepiece's own reader of it."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="pdserve[sentencepiece]")
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(text.replace("\n", " ") for text in texts(2000)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), model_type=kind,
        vocab_size=400, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
    )  # fmt: skip
    config = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_is_the_same(tmp_path: Path, kind: str) -> None:
    original = sentencepiece_folder(tmp_path, kind)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert_same(tokenizer, original.encode)
    assert tokenizer.encode("a")[0] == original.bos_id()
    assert tokenizer.eos_token_ids == (original.eos_id(),)
    assert_grammars(tmp_path, tokenizer)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_space_after_special_tokens_is_transformers_with_either_legacy(
    tmp_path: Path, kind: str, legacy: bool
) -> None:
    sentencepiece_folder(tmp_path, kind, legacy=legacy)
    ours = Tokenizer.from_folder(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    rng = random.Random(1)
    for text in texts():
        text = "".join(rng.choice(("</s>", "<s>", "")) + part for part in (text, " b", "a", text))
        assert list(ours.encode(text)) == theirs(text)["input_ids"]
    ids = {prefix: ours.encode(f"a</s>{prefix}b") for prefix in ("", " ")}
    assert (ids[""] == ids[" "]) is False
    assert (ours.decode(ids[""]) == "a b") is legacy


def test_a_model_that_is_none_is_a_config_error(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="pdserve[sentencepiece]")
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="cannot read the tokenizer"):
        read_tokenizer_json(str(tmp_path), None, None)


# ---- tekken ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("mistral_common", reason="pdserve[mistral]")
    folder = tmp_path_factory.mktemp("tekken")
    data = Path(package.__file__).parent / "data" / "tekken_240911.json"
    shutil.copy(data, folder / "tekken.json")
    return folder


@pytest.fixture(scope="module")
def mistral(tekken: Path) -> Any:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    return MistralTokenizer.from_file(str(tekken / "tekken.json"))


@pytest.fixture(scope="module")
def converted(tekken: Path) -> Tokenizer:
    return Tokenizer.from_folder(tekken, "mistral")


def test_tekken_is_the_same(tekken: Path, mistral: Any, converted: Tokenizer) -> None:
    original = mistral.instruct_tokenizer.tokenizer
    assert_same(converted, lambda text: original.encode(text, bos=False, eos=False))
    assert list(converted.encode("Hi")) == original.encode("Hi", bos=True, eos=False)
    assert converted.eos_token_ids == (original.eos_id,)
    assert converted.marker("[TOOL_CALLS]") in converted.special
    assert_grammars(tekken, converted)


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "user", "content": "Hello  w\u00f6rld"}], None),
        (
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "1\n\n2"},
            ],
            None,
        ),
        ([{"role": "user", "content": "Rain?"}], TOOLS),
        (
            [
                {"role": "user", "content": "Rain?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "abcdefghi",
                            "type": "function",
                            "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "abcdefghi", "content": "snow"},
            ],
            TOOLS,
        ),
    ],
)
def test_a_chat_has_the_tokens_that_mistral_common_gives_it(
    mistral: Any, converted: Tokenizer, messages: list[Any], tools: Any
) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    given = json.loads(json.dumps(messages))
    for call in (call for message in given for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    request = ChatCompletionRequest.from_openai(given, tools=tools)
    expected = mistral.encode_chat_completion(request).tokens
    assert list(converted.apply_chat_template(messages, tools=tools)) == expected
