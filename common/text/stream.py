"""Turns one choice's tokens into the client's text: detokenizer, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.common.text.detokenizer import Detokenizer
from pdserve.common.text.tokenizer import Tokenizer

# ---- stop strings in text that arrives in pieces ----


class StopMatcher:
    """Holds back the longest suffix of the text that could begin a stop string.

    The stop string that is complete first wins; of two complete at once, the longer. So the result
    does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`stops`: non-empty strings. `include_stop`: whether to return the stop string too."""
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._begins: dict[str, list[str]] = {}  # by first character, longest first
        for stop in self._stops:
            self._begins.setdefault(stop[0], []).append(stop)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stop: str | None = None  # the one that ended the text

    def push(self, text: str, armed: bool = True) -> str:
        """Takes the next piece and returns the text that can be sent. While not `armed`, complete
        stop strings are ordinary text."""
        text = self._held + text
        if armed and (match := self._first_match(text)) is not None:
            start, self.stop = match
            self._held = ""
            return text[: start + len(self.stop) * self._include_stop]
        held = self._held_back(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns the text held back, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _held_back(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            for stop in self._begins.get(text[-length], ()):
                if len(stop) <= length:
                    break
                if text.endswith(stop[:length]):
                    return length
        return 0


class StreamOutput(msgspec.Struct, frozen=True):
    """The result of one push."""

    text: str
    stopped_by: str | None  # the stop string that ended the choice; push nothing more
    num_tokens: int  # pushed tokens up to the stop


class TextStream:
    """The text of one choice. The pieces, concatenated, are the whole text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        """`before`: as `Detokenizer` takes it."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, before)
        self._matcher = StopMatcher(stop, include_stop_str_in_output) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(
        self, token_ids: Sequence[int], *, final: bool = False, stop_token: bool = False
    ) -> StreamOutput:
        """Takes the next tokens.

        Args:
            final: no token follows, so text held back is returned.
            stop_token: the last id is the token that ended the choice (EOS or one of
                stop_token_ids); it has no text unless stop strings are included in the output.
        """
        sent, count, matcher = "", len(token_ids), self._matcher
        silent = count if stop_token and not self._include_stop else 0
        for number, token_id in enumerate(token_ids, start=1):
            text = "" if number == silent else self._detokenizer.push(token_id)
            if matcher is not None:
                text = matcher.push(text, self._num_tokens + number > self._min_tokens)
                if matcher.stop is not None:
                    return StreamOutput(sent + text, matcher.stop, number)
            sent += text
        self._num_tokens += count
        if not final:
            return StreamOutput(sent, None, count)
        text = self._detokenizer.flush()
        if matcher is None:
            return StreamOutput(sent + text, None, count)
        sent += matcher.push(text, self._num_tokens > self._min_tokens)
        return StreamOutput(sent + matcher.flush(), matcher.stop, count)
