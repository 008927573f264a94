"""One request on its way: its choices' tokens and text so far, its times, its failures."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from common.core.errors import Blame, NodeError
from common.core.request import Choice, FinishReason, GenerateJob, Timeline, TokenEvent
from common.text.stream import TextStream
from common.text.tokenizer import Tokenizer
from router.dispatch import Dispatch
from router.generation import GenerationRequest, GenerationStats, TextDelta
from router.recovery import Recovery


class Run:
    """What one request has become so far: its choices' tokens and text, its times."""

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, recovery: Recovery
    ) -> None:
        self.recovery = recovery
        # Fingerprint of the nodes that have made the tokens so far: an answer is never made of
        # two versions of a model.
        self.version: str | None = None
        self.finish_reasons: list[FinishReason] = []
        self.token_gaps: list[float] = []
        self._request = request
        self._start = monotonic()
        self._moments: dict[str, float] = {}
        self._num_tokens = 0
        self._last_token: dict[int, float] = {}
        self._cached_tokens = self._transfer_bytes = 0
        self._transfer_seconds = 0.0
        self._outputs: dict[int, list[int]] = {choice: [] for choice in range(request.n)}
        self._open = {
            choice: TextStream(
                tokenizer,
                stop=request.stop,
                include_stop_str_in_output=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                min_tokens=request.sampling.min_tokens,
            )
            for choice in range(request.n)
        }

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def job(self) -> GenerateJob:
        """What is left to do: the choices that are open, from where they are."""
        request = self._request
        return GenerateJob(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            tuple(Choice(index, tuple(self._outputs[index])) for index in self._open),
        )

    @property
    def finished(self) -> bool:
        return not self._open

    def check_finished(self) -> None:
        """Raises NodeError when the decode node ended its stream and a choice is open."""
        if self._open:
            raise NodeError(
                f"the decode node's stream ended before choice {min(self._open)} did",
                code="PROTOCOL_ERROR",
                blame=Blame.DECODE,
            )

    def mark(self, moment: str) -> None:
        """Notes that a moment of the timeline (one of its fields) is now, the first time."""
        self._moments.setdefault(moment, monotonic() - self._start)

    def add(self, dispatch: Dispatch) -> None:
        """Counts what an attempt has moved."""
        self._cached_tokens = self._cached_tokens or dispatch.cached_tokens
        self._transfer_bytes += dispatch.transfer_bytes
        self._transfer_seconds += dispatch.transfer_seconds

    def deltas(self, event: TokenEvent) -> Sequence[TextDelta]:
        """The text an event brings; nothing for a choice that a stop string has ended."""
        stream = self._open.get(event.choice)
        if stream is None:
            return ()
        output = stream.push(
            [token.token_id for token in event.tokens],
            final=event.finish_reason is not None,
            stop_token=event.finish_reason is FinishReason.STOP,
        )
        self._outputs[event.choice] += [token.token_id for token in event.tokens]
        self._count(event.choice, output.num_tokens)
        reason = FinishReason.STOP if output.stopped_by is not None else event.finish_reason
        if reason is not None:
            self.finish_reasons.append(reason)
            del self._open[event.choice]
        stop_reason = output.stopped_by if output.stopped_by is not None else event.stop_token_id
        tokens = event.tokens[: output.num_tokens]
        return (TextDelta(event.choice, output.text, tokens, reason, stop_reason),)

    def stats(self) -> GenerationStats:
        timeline = Timeline(
            **self._moments,  # type: ignore[arg-type]
            cached_tokens=self._cached_tokens,
            transfer_bytes=self._transfer_bytes,
            transfer_seconds=self._transfer_seconds,
            migrations=self.recovery.failures,
        )
        return GenerationStats(
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=self._cached_tokens,
            timeline=timeline,
        )

    def _count(self, choice: int, num_tokens: int) -> None:
        now = monotonic()
        self.recovery.progress()
        self.mark("first_token")
        if choice in self._last_token and num_tokens:
            self.token_gaps += [(now - self._last_token[choice]) / num_tokens] * num_tokens
        self._last_token[choice] = now
        self._num_tokens += num_tokens
