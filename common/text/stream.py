"""One choice's tokens to the text its client sees: detokenizer, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.text.detokenizer import Detokenizer
from common.text.stop import StopMatcher
from common.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """What one push gave."""

    text: str
    stopped_by: str | None  # the stop string that ended the choice: push nothing more
    num_tokens: int  # how many of the pushed tokens belong to the choice; the rest came after


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
            final: no token follows; whatever is held back is handed out.
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
