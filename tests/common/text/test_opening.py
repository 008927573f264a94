"""The text that may come before one that is held to a grammar, or instead of it."""

from __future__ import annotations

import pytest

from paths import MODELS
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import MAX_OPENING, ConstraintKind, Opening, StructuredOutput
from pdserve.common.text.grammar import GrammarError, GrammarTokens, to_grammar
from pdserve.common.text.opening import AnswerMatcher, opened
from pdserve.common.text.tokenizer_file import read_tokenizer_json

VOCAB = 512
EOS = (0, 2)
CALL, THINK, END_OF_THINK = 508, 510, 511
THOUGHT = (THINK, END_OF_THINK)
MAY_THINK, THINKING = Opening(THOUGHT), Opening(THOUGHT, thinking=True)
MAY_CALL = Opening(call=CALL)
ANY = Opening(THOUGHT, call=CALL)


@pytest.fixture(scope="module")
def tokens() -> GrammarTokens:
    return GrammarTokens(read_tokenizer_json(str(MODELS / "tool-caller"), None, None), VOCAB, EOS)


def matcher(tokens: GrammarTokens, opening: Opening, pattern: str = "ab?") -> AnswerMatcher:
    grammar = to_grammar(StructuredOutput(ConstraintKind.REGEX, pattern))
    return AnswerMatcher.compile(tokens, opened(grammar, opening))


def ids(tokens: GrammarTokens, parts: list[str | int]) -> list[int]:
    return [
        i for p in parts for i in ([p] if isinstance(p, int) else tokens.library.tokenize_str(p))
    ]


def allowed(of: AnswerMatcher) -> set[int]:
    bits = int.from_bytes(of.mask(), "little")
    return {token for token in range(8 * len(of.mask())) if bits >> token & 1}


@pytest.mark.parametrize(
    ("opening", "before", "begins"),
    [
        (Opening(), [], set()),
        (MAY_THINK, [], {THINK}),
        (MAY_CALL, [], {CALL}),
        (ANY, [], {THINK, CALL}),
        (THINKING, ["hm <tool_call> {", THINK, CALL, END_OF_THINK], set()),
        (MAY_THINK, [THINK, "é", END_OF_THINK], set()),
        (ANY, [THINK, END_OF_THINK], {CALL}),
    ],
)
def test_a_text_begins_after_its_opening(
    tokens: GrammarTokens, opening: Opening, before: list[str | int], begins: set[int]
) -> None:
    a, b = ids(tokens, ["a", "b"])
    newline, two = ids(tokens, ["\n"]) + ids(tokens, ["\n\n"])
    of = matcher(tokens, opening)
    of.advance(ids(tokens, before))
    if not before:
        assert newline not in allowed(of)
    else:
        for _ in range(2):
            assert allowed(of) == {a, newline, two} | begins
            of.advance([newline])
    assert allowed(of) == {a} | begins and not of.complete
    of.advance([a])
    assert allowed(of) == {b, *EOS} and not of.complete
    of.advance([b])
    assert allowed(of) == set(EOS) and of.complete
    of.advance([EOS[0], THINK])  # which an engine ignores
    assert allowed(of) == set(EOS) and of.complete


def test_in_a_thought_all_but_the_end_may_come_and_in_a_call_all(tokens: GrammarTokens) -> None:
    everything = set(range(VOCAB))
    for opening, before in ((THINKING, []), (MAY_THINK, [THINK, "x"])):
        of = matcher(tokens, opening)
        of.advance(ids(tokens, before))  # type: ignore[arg-type]
        assert allowed(of) == everything - set(EOS) and not of.complete
    of = matcher(tokens, ANY)
    of.advance(ids(tokens, [THINK, "so", END_OF_THINK, CALL, "anything", THINK, END_OF_THINK]))
    assert allowed(of) == everything and not of.complete
    of.advance(EOS[:1])
    assert of.copy().complete is of.complete


def test_a_matcher_made_anew_goes_on_alike(tokens: GrammarTokens) -> None:
    """So is that of another node, or after preemption."""
    answer = ids(tokens, [THINK, "a naïve", END_OF_THINK, "\nab", EOS[0]])
    first = matcher(tokens, ANY)
    for count in range(len(answer) + 1):
        other = matcher(tokens, ANY)
        other.advance(answer[:count])
        for each in (other, other.copy(), first.copy()):
            assert (each.mask(), each.complete) == (first.mask(), first.complete)
        first.advance(answer[count : count + 1])


def test_a_text_that_may_be_empty_is_not_all_there_is(tokens: GrammarTokens) -> None:
    """`min_tokens` yields where nothing but the end is left."""
    of = matcher(tokens, MAY_CALL, "()")
    assert allowed(of) == {CALL, *EOS} and not of.complete


@pytest.mark.parametrize("opening", [Opening((VOCAB, 1)), Opening((1, -1)), Opening(call=VOCAB)])
def test_tokens_that_are_none(tokens: GrammarTokens, opening: Opening) -> None:
    with pytest.raises(GrammarError, match="outside the vocabulary"):
        matcher(tokens, opening)


def test_openings_are_not_for_clients(tokens: GrammarTokens) -> None:
    text = opened("start: /a/", ANY)
    assert len(text) < MAX_OPENING
    with pytest.raises(InvalidRequest, match="is reserved"):
        to_grammar(StructuredOutput(ConstraintKind.GRAMMAR, text))
    for wrong in ("%opening ", "%opening {}x\nstart: /a/", '%opening {"call": "x"}\nstart: /a/'):
        with pytest.raises(GrammarError, match="opening"):
            AnswerMatcher.compile(tokens, wrong)


def test_a_heading_says_which_message_is_the_text(tokens: GrammarTokens) -> None:
    """Harmony: the same token ends every header; only that of the last message counts."""
    channel, final, message, other = 40, 41, 42, 43
    opening = Opening((channel, message), heading=(channel, final), thinking=True)
    answer = matcher(tokens, opening)
    for token in (channel, other, message, other, final, message, channel, channel, final, other):
        answer.advance([token])
        assert answer.mask() == tokens.all_but_ends
    copied = answer.copy()
    copied.advance([channel, other, message])  # another header after all
    assert copied.mask() == tokens.all_but_ends
    answer.advance([message])
    assert answer.mask() != tokens.all_but_ends
    with pytest.raises(GrammarError):
        answer.advance([other])
