"""Token ids to text, one token at a time, never cutting a character.

    ids:   … done ] context | pending …
                    └── decoded again each time ──┘

A token's text depends on its neighbours: a character may span several tokens, and
sentencepiece decoders drop the leading space of the first token they see. So each new token is
decoded together with the last few that produced text (the context), and only what is
new is handed out. This is the prefix-offset method of Hugging Face text-generation-inference;
the window is a handful of tokens, so the cost per token is constant.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pdserve.common.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character is at most four bytes, so a longer wait means bytes that never were UTF-8.
_MAX_PENDING = 8


class Detokenizer:
    """One sequence's text. What `push` and `flush` return, concatenated, is
    `tokenizer.decode(all ids)`.

    One exception: decoders with byte fallback spoil a whole run of byte tokens when its end is
    cut; characters of that run already handed out stay as they are.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window: list[int] = []  # context, then pending
        self._context = 0  # tokens of the window that were handed out
        self._context_text = ""  # their text, decoded alone

    def push(self, token_id: int) -> str:
        """The text this token completes; empty while a character is incomplete."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) > len(self._context_text) and not text.endswith(_REPLACEMENT):
            return self._hand_out(len(self._window), text)
        if len(self._window) - self._context >= _MAX_PENDING:
            return self._give_up(text)
        return ""

    def flush(self) -> str:
        """What is left when no token follows; an incomplete character becomes U+FFFD."""
        return self._hand_out(len(self._window), self._decode(self._window))

    @property
    def pending(self) -> Sequence[int]:
        """The tokens whose text is not handed out yet."""
        return self._window[self._context :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _hand_out(self, end: int, text: str) -> str:
        """Hands out the window up to `end`, whose text is `text`; the tokens just handed out
        become the context."""
        new = text[len(self._context_text) :]
        del self._window[: self._context]
        self._context = end - self._context
        context = self._window[: self._context]
        one = len(context) == 1
        self._context_text = (
            self._tokenizer.text_alone(context[0]) if one else self._decode(context)
        )
        return new

    def _give_up(self, text: str) -> str:
        """Hands out pending tokens that are not UTF-8, but keeps the last ones while they may
        begin a character: at most three, and only where the cut changes no text."""
        for keep in (3, 2, 1):
            end = len(self._window) - keep
            head = self._decode(self._window[:end])
            if head + self._decode(self._window[end:]) == text:
                return self._hand_out(end, head)
        return self._hand_out(len(self._window), text)


_utf8 = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Where the text of each of one sequence's tokens begins in what `Detokenizer` makes of them
    all, in characters. Tokens that share a character, or have no text, begin at one place."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, start: int = 0
    ) -> None:
        """`start`: characters before the first token."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
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
        """How many characters of the pending tokens come before the one that this token is part
        of, or begins. Without a token: before the one that is not complete."""
        decoder = _utf8(errors="replace")
        begun = len(decoder.decode(b"".join(map(self._tokenizer.token_bytes, pending))))
        if token_id is None or not decoder.getstate()[0]:
            return begun
        made = decoder.decode(self._tokenizer.token_bytes(token_id)[:1])
        goes_on = not made or (len(made) == 1 and not decoder.getstate()[0])
        return begun if goes_on else begun + 1
