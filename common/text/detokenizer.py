"""Detokenizes incrementally, without splitting characters.

    ids:   … done ] context | pending …
                    └── decoded again each time ──┘

A token's text depends on its neighbours: a character may span several tokens, and sentencepiece
decoders drop the leading space of the first token. So each new token is decoded together with the
last few that produced text (the context), and only the new text is returned. This is the
prefix-offset method of Hugging Face text-generation-inference; the window has a handful of tokens,
so the cost per token is constant. Byte-level decoders just join bytes: there, a token of whole
characters behind others has the text that it has alone, which is cached.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pdserve.common.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so a longer wait means invalid UTF-8.
_MAX_PENDING = 8
_MAX_BEFORE = 16  # tokens in front of a sequence that may matter to its text


class Detokenizer:
    """Detokenizes one sequence. The results of `push` and `flush`, concatenated, equal
    `tokenizer.decode(all ids)`.

    One exception: decoders with byte fallback turn a whole run of byte tokens into U+FFFD if its
    end is incomplete; characters of the run that were already returned stay as they are.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        before: Sequence[int] = (),
    ) -> None:
        """`before`: tokens in front of the sequence. The text goes on behind theirs, and begins
        with their last character if that is incomplete."""
        self._tokenizer = tokenizer
        self._silent = tokenizer.special if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []  # context, then pending
        self._context = 0  # tokens of the window whose text was returned
        self._context_text = ""  # their text, decoded alone
        for token_id in before[-_MAX_BEFORE:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; "" while a character is incomplete."""
        if token_id in self._silent:
            return ""
        if self._tokenizer.joins_bytes and (text := self._push_whole(token_id)):
            return text
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window, False)
        if len(text) > len(self._context_text) and not text.endswith(_REPLACEMENT):
            return self._hand_out(len(self._window), text)
        if len(self._window) - self._context >= _MAX_PENDING:
            return self._give_up(text)
        return ""

    def _push_whole(self, token_id: int) -> str:
        """Returns the text of a token of whole characters if the text before it also ends with a
        whole character; otherwise consumes nothing and returns ""."""
        if len(self._window) > self._context or self._context_text.endswith(_REPLACEMENT):
            return ""
        text = self._tokenizer.text_alone(token_id)
        if _REPLACEMENT in text:
            return ""
        if text:
            self._window, self._context, self._context_text = [token_id], 1, text
        return text

    def flush(self) -> str:
        """Returns the remaining text after the last token; an incomplete character is U+FFFD."""
        return self._hand_out(len(self._window), self._tokenizer.decode(self._window, False))

    @property
    def pending(self) -> Sequence[int]:
        """The tokens whose text was not returned yet."""
        return self._window[self._context :]

    def _hand_out(self, end: int, text: str) -> str:
        """Returns the new part of `text`, the text of the window up to `end`; these tokens become
        the context."""
        new = text[len(self._context_text) :]
        del self._window[: self._context]
        self._context = end - self._context
        context = self._window[: self._context]
        if self._context == 1:
            self._context_text = self._tokenizer.text_alone(context[0])
        else:
            self._context_text = self._tokenizer.decode(context, False)
        return new

    def _give_up(self, text: str) -> str:
        """Returns the text of pending tokens that are not UTF-8, but keeps up to three last tokens
        that may begin a character, if the split does not change the text."""
        decode = self._tokenizer.decode
        for keep in (3, 2, 1):
            end = len(self._window) - keep
            head = decode(self._window[:end], False)
            if head + decode(self._window[end:], False) == text:
                return self._hand_out(end, head)
        return self._hand_out(len(self._window), text)


def whole_characters(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    """Returns the tokens without those of an incomplete character at the end."""
    pending = Detokenizer(tokenizer, False, token_ids).pending
    return token_ids[: len(token_ids) - len(pending)]


_utf8 = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Computes the offset, in characters, of each token's text in the output of `Detokenizer`.
    Tokens that share a character, or have no text, have the same offset."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        start: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        """`start`: characters before the first token. `before`: as `Detokenizer` takes it."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, before)
        self._handed_out = start

    def push(self, token_id: int) -> int:
        pending = self._detokenizer.pending
        text = self._detokenizer.push(token_id)
        skipped = not text and self._detokenizer.pending == pending
        begun = self._begun(pending, None if skipped else token_id) if pending else 0
        offset = self._handed_out + begun
        self._handed_out += len(text)
        return offset

    def _begun(self, pending: Sequence[int], token_id: int | None) -> int:
        """Returns how many characters of the pending tokens precede the one that `token_id` belongs
        to or begins; without a token, the incomplete one."""
        decoder = _utf8(errors="replace")
        begun = len(decoder.decode(b"".join(map(self._tokenizer.token_bytes, pending))))
        if token_id is None or not decoder.getstate()[0]:
            return begun
        made = decoder.decode(self._tokenizer.token_bytes(token_id)[:1])
        goes_on = not made or (len(made) == 1 and not decoder.getstate()[0])
        return begun if goes_on else begun + 1
