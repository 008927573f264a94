"""Turns one choice's tokens into the client's text: detokenizer, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.common.text.detokenizer import Detokenizer
from pdserve.common.text.tokenizer import Tokenizer

# ---- stop strings in text that arrives in pieces ----


class StopResult(msgspec.Struct, frozen=True):
    """Text that can be sent, and the stop string that ended it, if any."""

    text: str
    stop: str | None = None


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

    def push(self, text: str, armed: bool = True) -> StopResult:
        """Takes the next piece. While not `armed`, complete stop strings are ordinary text."""
        if not self._stops:
            return StopResult(text)
        text = self._held + text
        if armed and (match := self._first_match(text)) is not None:
            start, stop = match
            self._held = ""
            return StopResult(text[: start + len(stop) * self._include_stop], stop)
        held = self._held_back(text)
        self._held = text[len(text) - held :]
        return StopResult(text[: len(text) - held])

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
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop_str_in_output)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stop: str | None = None

    def push(
        self, token_ids: Sequence[int], *, final: bool = False, stop_token: bool = False
    ) -> StreamOutput:
        """Takes the next tokens.

        Args:
            final: no token follows, so text held back is returned.
            stop_token: the last id is the token that ended the choice (EOS or one of
                stop_token_ids); it has no text unless stop strings are included in the output.
        """
        parts: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            silent = stop_token and not self._include_stop and count == len(token_ids)
            text = "" if silent else self._detokenizer.push(token_id)
            if self._match(text, parts) is not None:
                return StreamOutput("".join(parts), self._stop, count)
        if final and self._match(self._detokenizer.flush(), parts) is None:
            parts.append(self._matcher.flush())
        return StreamOutput("".join(parts), self._stop, len(token_ids))

    def _match(self, text: str, parts: list[str]) -> str | None:
        """Passes text through the stop matcher into `parts`."""
        result = self._matcher.push(text, armed=self._num_tokens > self._min_tokens)
        parts.append(result.text)
        self._stop = result.stop
        return result.stop
