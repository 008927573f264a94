"""common/text: whatever the pieces, the text a client gets is the text the tokenizer decodes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_pipeline import byte_fallback_folder, byte_level_folder
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.text.detokenizer import Detokenizer, TextOffsets
from pdserve.common.text.stream import StopMatcher, TextStream
from pdserve.common.text.tokenizer import Tokenizer

settings.register_profile("patient", deadline=None)  # however busy the machine is
settings.load_profile("patient")

TEXT = "hello  world 叫 🙂 é <|x|>"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("bl")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(byte_fallback_folder(tmp_path_factory.mktemp("bf")))


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def detokenize(tokenizer: Tokenizer, token_ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [*(detokenizer.push(i) for i in token_ids), detokenizer.flush()]


# ---- tokenizer ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "a", TEXT, "<|x|>" * 3, "hello\n\n 🙂" * 50, "\x00"])
def test_texts_are_encoded_as_transformers_encodes_them(tokenizer: Tokenizer, text: str) -> None:
    for special in (True, False):
        expected = tokenizer._hf(text, add_special_tokens=special)["input_ids"]
        assert tokenizer.encode(text, special) == tuple(expected)


def test_bos_comes_from_the_post_processor(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert byte_level.encode("") == ()
    (bos,) = byte_fallback.encode("")
    assert byte_fallback.token_text(bos) == "<s>"
    assert bos in byte_fallback.special
    assert byte_fallback.encode("", add_special_tokens=False) == ()


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == TEXT


def test_part_of_a_character_has_exact_bytes_and_replacement_text(tokenizer: Tokenizer) -> None:
    last = tokenizer.encode("🙂")[-1]
    assert tokenizer.token_bytes(last) == "🙂".encode()[-1:]
    assert tokenizer.token_text(last) == "\ufffd"


def test_eos_is_the_generation_configs_else_the_tokenizers(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    plain = Tokenizer.from_folder(folder)
    assert list(map(plain.token_text, plain.eos_token_ids)) == ["<|im_end|>"]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (7,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert Tokenizer.from_folder(folder).eos_token_ids == (8, 9)


def test_missing_or_broken_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        Tokenizer.from_folder(tmp_path)
    folder = byte_level_folder(tmp_path / "whole")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "x"}])


def test_chat_template_file(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    ids = byte_level.apply_chat_template(messages)
    text = byte_level.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    own = byte_level.apply_chat_template(
        messages, chat_template="{{ messages[0].content }}{{ x }}", template_kwargs={"x": "!"}
    )
    assert byte_level.decode(own) == "hello!"


@pytest.mark.parametrize(
    ("template", "kwargs", "param"),
    [
        ("{{ raise_exception('no') }}", {}, "chat_template"),
        ("{% if %}", {}, "chat_template"),
        ("{{ 1 / messages[7].x }}", {}, "chat_template"),
        ("{{ 1 // 0 }}", {}, "chat_template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}, "chat_template"),
        (None, {"tokenize": True}, "chat_template_kwargs"),
        (None, {"tokenizer_kwargs": {}}, "chat_template_kwargs"),
    ],
)
def test_template_failures_are_the_clients(
    byte_level: Tokenizer, template: str | None, kwargs: dict[str, object], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        byte_level.apply_chat_template(
            [{"role": "user", "content": "x"}], chat_template=template, template_kwargs=kwargs
        )
    assert caught.value.param == param


# ---- detokenizer --------------------------------------------------------------------------


def test_a_character_is_never_cut(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    pieces = [piece for piece in detokenize(tokenizer, list(ids)) if piece]
    assert pieces == ["a", "🙂", "b"]


def test_leading_space_only_inside_the_text(byte_fallback: Tokenizer) -> None:
    word = byte_fallback.encode("w", add_special_tokens=False)
    assert detokenize(byte_fallback, [*word, *word, *word]) == ["w", " w", " w", ""]


@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_give_the_decoded_text(byte_level: Tokenizer, skip: bool) -> None:
    """Random bytes are mostly invalid UTF-8, with special tokens in between."""
    rng = random.Random(0)
    for _ in range(1000):
        ids = [rng.randrange(byte_level.vocab_size) for _ in range(rng.randrange(40))]
        assert "".join(detokenize(byte_level, ids, skip)) == byte_level.decode(ids, skip)


def test_whole_characters_are_not_decoded_again(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte-level token of whole characters is its text alone; halves of one need each other."""
    (a,), smile = byte_level.encode("a"), list(byte_level.encode("🙂"))
    byte_level.text_alone(a)
    detokenizer = Detokenizer(byte_level)
    with monkeypatch.context() as patch:
        patch.setattr(byte_level, "decode", None)
        assert [detokenizer.push(a) for _ in range(4)] == ["a"] * 4
    assert "".join(detokenizer.push(each) for each in [*smile, a]) == "🙂a"


@pytest.mark.parametrize("wrong", range(12))
def test_a_character_behind_bytes_that_are_none_is_whole(byte_level: Tokenizer, wrong: int) -> None:
    """However many of its bytes are there when what precedes them is given up."""
    smile = byte_level.encode("🙂", add_special_tokens=False)
    ids = [smile[-1]] * wrong + list(smile)
    assert "".join(detokenize(byte_level, ids)) == "\ufffd" * wrong + "🙂"


@given(st.text(max_size=30))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = list(tokenizer.encode(text))
    assert "".join(detokenize(tokenizer, ids)) == tokenizer.decode(ids)


# ---- stop strings -------------------------------------------------------------------------


def run_stop(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.stop is not None:
            return out, matcher.stop
    return out + matcher.flush(), None


def test_held_back_until_it_cannot_be_a_stop_string() -> None:
    matcher = StopMatcher(["END", "ENTER"])
    said = [matcher.push(piece) for piece in ("the E", "N", "JOY", "E")]
    assert said == ["the ", "", "ENJOY", ""] and matcher.flush() == "E"


def test_a_stop_string_across_pieces_is_not_leaked_and_of_two_the_longer_wins() -> None:
    pieces = ["a", "b<", "st", "op>c"]
    assert run_stop(pieces, ["<stop>"]) == ("ab", "<stop>")
    assert run_stop(pieces, ["<stop>"], include=True) == ("ab<stop>", "<stop>")
    assert run_stop(["xabc"], ["c", "abc"]) == ("x", "abc")
    assert run_stop(["a", "b", "b"], ["aa", "abb"]) == ("", "abb")


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.randoms(use_true_random=False),
)
def test_the_cut_into_pieces_does_not_matter(
    text: str, stops: list[str], rng: random.Random
) -> None:
    pieces, rest = [], text
    while rest:
        size = rng.randint(1, len(rest))
        pieces.append(rest[:size])
        rest = rest[size:]
    assert run_stop(pieces, stops) == run_stop(list(text), stops)
    if not any(stop in text for stop in stops):
        assert run_stop(pieces, stops) == (text, None)


# ---- stream -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("abcdef", {"stop": ["cd"]}, ("ab", "cd", 4)),  # tokens after it do not count
        ("abcabc", {"stop": ["bc"], "min_tokens": 3}, ("abca", "bc", 6)),
    ],
)
def test_where_a_stop_string_ends_a_text(
    byte_level: Tokenizer, text: str, options: dict[str, Any], said: tuple[str, str, int]
) -> None:
    output = TextStream(byte_level, **options).push(byte_level.encode(text))
    assert (output.text, output.stopped_by, output.num_tokens) == said


def test_a_stop_token_has_no_text_unless_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab")
    for include, text in ((False, "a"), (True, "ab")):
        stream = TextStream(byte_level, include_stop_str_in_output=include)
        assert stream.push(ids, final=True, stop_token=True).text == text


def test_the_end_hands_out_what_was_held_back(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, stop=["zzz"])
    assert stream.push(byte_level.encode("azz")).text == "a"
    half = byte_level.encode("é")[:1]
    assert stream.push(half, final=True).text == "zz\ufffd"


def test_a_tokenizer_of_bytes() -> None:
    tokenizer = Tokenizer.of_bytes(300, (2,))
    text = "naïve 🐶\n  <256>"
    assert tokenizer.encode(text) == tuple(text.encode())
    assert tokenizer.decode(text.encode()) == text
    assert tokenizer.decode([104, 105, 299]) == "hi<299>"
    assert tokenizer.token_bytes(0xF0) == b"\xf0"
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (300, (2,))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "hi\n"
    with pytest.raises(ConfigError, match="255 tokens"):
        Tokenizer.of_bytes(255, ())


# ---- where tokens begin in the text -----------------------------------------------------------


def offsets_of(tokenizer: Tokenizer, token_ids: list[int], skip: bool = True) -> list[int]:
    offsets = TextOffsets(tokenizer, skip)
    return [offsets.push(each) for each in token_ids]


@given(st.text(st.sampled_from("hello wé叫🙂\ufffd\n"), max_size=12))
def test_a_token_begins_at_the_character_that_has_its_first_byte(
    byte_level: Tokenizer, text: str
) -> None:
    ids = list(byte_level.encode(text))
    whose = [at for at, character in enumerate(text) for _ in character.encode()]
    begins = [sum(len(byte_level.token_bytes(each)) for each in ids[:at]) for at in range(len(ids))]
    assert offsets_of(byte_level, ids) == [whose[begin] for begin in begins]


@given(data=st.data())
def test_whatever_the_tokens_are_their_text_is_at_their_offsets(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Bytes that are no text included: each becomes U+FFFD, and later tokens come after it."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    skip = data.draw(st.booleans())
    pieces = detokenize(tokenizer, ids, skip)
    text, offsets = "".join(pieces), offsets_of(tokenizer, ids, skip)
    assert offsets == sorted(offsets) and all(each <= len(text) for each in offsets)
    for at in range(len(ids)):
        before = detokenizer_pending(tokenizer, ids[:at], skip)
        if not before:
            assert offsets[at] == len("".join(pieces[:at])), (ids, at)


def detokenizer_pending(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    detokenizer = Detokenizer(tokenizer, skip)
    for each in ids:
        detokenizer.push(each)
    return bool(detokenizer.pending)


def test_special_tokens_and_bytes_that_are_no_text(byte_level: Tokenizer) -> None:
    encode = byte_level.encode
    (end,), (half, rest) = encode("<|end|>"), encode("é")
    a, b = encode("ab")
    assert offsets_of(byte_level, [a, end, b]) == [0, 1, 1]
    assert offsets_of(byte_level, [a, end, b], skip=False) == [0, 1, 8]
    assert offsets_of(byte_level, [a, half, rest, b]) == [0, 1, 1, 2]
    assert offsets_of(byte_level, [a, half, b, b]) == [0, 1, 2, 3]
    assert offsets_of(byte_level, [half, half, rest, b]) == [0, 1, 1, 2]
