"""The state of one request: its choices' tokens and text, its times, its failures."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import Any

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import NodeError
from pdserve.common.core.request import (
    Choice,
    FinishReason,
    GenerateJob,
    PromptPath,
    Timeline,
    TokenEvent,
)
from pdserve.common.core.sampling import SampledToken
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.text.stream import TextStream
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.cluster.claims import AnswerKey
from pdserve.router.cluster.node_client import protocol_error
from pdserve.router.cluster.prefix_index import PromptBlocks
from pdserve.router.cluster.role_policy import Chosen, PlacementRequest
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    Put,
    Replayed,
    TextDelta,
)
from pdserve.router.requests.retry import Deadline, Retries
from pdserve.router.requests.stages import Phase, Stages, arrival_var
from pdserve.router.requests.trace import RequestTrace

MAX_CHOSEN = 8  # of a request's nodes whose reasons are kept: the last ones


class RequestState:
    """Takes the nodes' events and puts the client's updates into its queue."""

    def __init__(
        self,
        request: GenerationRequest,
        put: Put,
        tokenizer: Tokenizer,
        config: RoutingConfig,
        vocab_size: int = 2**32,
    ) -> None:
        self.request = request
        self._put = put
        self.retries = Retries(config.migration_limit)
        self.deadline = Deadline(config.queue_timeout, config.request_timeout)
        # Choices that a stop string has ended, each once: nodes do not know.
        self.stopped: deque[int] = deque()
        # Fingerprint of the nodes that have made the tokens so far: an answer is never made of
        # two versions of a model.
        self.version: str | None = None
        self._sampling = request.sampling  # without what the client has of it
        # The client has the prompt's log-probabilities, or wants none.
        self._prompt_scored = request.sampling.prompt_logprobs is None
        self.finish_reasons: list[FinishReason] = []
        self.token_gaps: list[float] = []
        self._vocab_size = vocab_size
        self._start = monotonic()
        self.arrival = arrival = arrival_var.get()
        self.on_first_token: Callable[[RequestState], None] = lambda _: None
        self.stages = Stages(arrival)
        self.trace: RequestTrace | None = None
        self._timeline: dict[str, Any] = {}  # its fields
        self._chosen: deque[Chosen] = deque(maxlen=MAX_CHOSEN)
        self._prompt_computed = False
        self._prompt_blocks: dict[int, PromptBlocks] = {}  # by block size
        self.generated = [0] * request.n  # tokens of each choice
        self._last_token: dict[int, float] = {}
        self._outputs: dict[int, list[int]] = {choice: [] for choice in range(request.n)}
        self._open = {
            choice: TextStream(
                tokenizer,
                stop=request.stop,
                include_stop_str_in_output=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
                min_tokens=request.sampling.min_tokens,
                before=request.before,
            )
            for choice in range(request.n)
        }

    async def replay(self) -> None:
        """Takes the tokens that the client has, from another router. There may be hundreds of
        thousands, so other work runs after each `Past`."""
        for each in self.request.past:
            if each.choice not in self._open:
                continue
            self.version = each.version
            tokens = tuple(map(SampledToken, each.token_ids))
            event = TokenEvent(each.choice, tokens, each.finish_reason)
            stream, token_ids = self._open[each.choice], list(each.token_ids)
            self._put(Replayed(self._delta(stream, event, token_ids, monotonic())))
            await asyncio.sleep(0)
        # They were not drawn now.
        self._timeline.clear()
        self._last_token.clear()
        self.token_gaps.clear()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def job(self) -> GenerateJob:
        """The remaining work: the open choices, with their tokens so far."""
        request = self.request
        return GenerateJob(
            request.request_id,
            tuple(request.prompt_token_ids),
            self._sampling,
            tuple(Choice(index, tuple(self._outputs[index])) for index in self._open),
            request.cache_salt,
            self.stages.timed,
            self._adapter,
            request.priority,
            request.batch.alias,
            orphan_key=self.key.job if self.key is not None else b"",
        )

    @property
    def key(self) -> AnswerKey | None:
        """The key under which the answer is kept; None from the first token on, since a request
        that joins the job takes all tokens from it."""
        return None if any(self._outputs.values()) else self.request.key

    @property
    def placement(self) -> PlacementRequest:
        """The request as placement sees it now."""
        return PlacementRequest(
            request_id=self.request_id,
            num_tokens=self.num_tokens,
            longest=len(self.request.prompt_token_ids) + self.request.sampling.max_tokens,
            adapter=self._adapter,
            version=self.version,
            avoid=self.retries.avoid,
            local_prefill=self.retries.local_prefill,
            last_chance=self.retries.last_chance,
            may_share=self.retries.may_share,
            waiting=self.deadline.waiting,
            blocks=self._blocks,
            session=self._session,
            chosen=self._chosen,
        )

    def _blocks(self, block_size: int) -> PromptBlocks:
        """Returns the prompt's blocks, as nodes of this block size cache them."""
        if (blocks := self._prompt_blocks.get(block_size)) is None:
            request = self.request
            blocks = PromptBlocks(
                request.prompt_token_ids, block_size, request.cache_salt, self._adapter
            )
            self._prompt_blocks[block_size] = blocks
        return blocks

    @property
    def _session(self) -> str:
        """Returns a short name of the request's session that no other client's session has."""
        if self.arrival is None or not self.arrival.session:
            return ""
        name = f"{self.request.batch.alias} {self.arrival.session}"
        return blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()

    @property
    def _adapter(self) -> str:
        return self.request.adapter.digest if self.request.adapter is not None else ""

    @property
    def num_tokens(self) -> int:
        """The number of tokens to prefill now."""
        output = self._outputs[min(self._open)] if self._open else ()
        return len(self.request.prompt_token_ids) + len(output)

    @property
    def finished(self) -> bool:
        return not self._open

    @property
    def age(self) -> float:
        """Seconds since its acceptance."""
        return monotonic() - self._start

    @property
    def first_token(self) -> float | None:
        """Seconds from its acceptance to its first token."""
        return self._timeline.get("first_token")

    def mark(self, moment: str) -> None:
        """Notes that a moment of the timeline (one of its fields) is now, the first time. It is
        progress every time."""
        now = monotonic()
        self.deadline.progress()
        if moment != "queued":  # another try has done nothing yet
            self.deadline.moved = now
        self._timeline.setdefault(moment, now - self._start)

    def placed(self, path: PromptPath, decode_node: str) -> None:
        """Notes an attempt on a decode node; the KV of the previous attempt is lost."""
        self.set(path=path, decode_node=decode_node, prefill_node="")
        self.set(kv_connectors=(), verified_runs=0)

    def set(self, **fields: Any) -> None:
        """Sets fields of the timeline."""
        self._timeline.update(fields)

    def prefilled(self, event: pb.FirstToken | pb.Prefilled, role: str) -> None:
        """Notes that a node of this role has computed the prompt.

        Raises:
            NodeError: its log-probabilities are not the requested ones.
        """
        if not self._prompt_scored:
            self._take_prompt(event, role)
        line = self._timeline
        line["cached_tokens"] = line.get("cached_tokens") or event.cached_tokens
        self._computed(len(self.request.prompt_token_ids) - event.cached_tokens)
        compute, queue = event.step_s, event.queue_s + event.compute_s - event.step_s
        self._add(prefill_queue_seconds=queue, prefill_seconds=compute)
        self.stages.told(Phase.PREFILL, prefill_queue=queue, prefill_compute=compute)

    def _computed(self, num_tokens: int) -> None:
        """Counts the prompt tokens that a node computed, again if another node had before."""
        if self._prompt_computed:
            self._add(recomputed_tokens=max(0, num_tokens))
        self._prompt_computed = True

    def _take_prompt(self, event: pb.FirstToken | pb.Prefilled, role: str) -> None:
        found = convert.prompt_from_pb(event.prompt_logprobs)
        num_top = min(self.request.sampling.prompt_logprobs or 0, self._vocab_size)
        count = len(self.request.prompt_token_ids) - 1
        try:
            found.check(1, count, num_top, self._vocab_size)
        except ValueError as error:
            raise protocol_error(role, f"a prompt's log-probabilities: {error}") from None
        self._put(found)
        self._prompt_scored = True
        self._sampling = replace(self._sampling, prompt_logprobs=None)

    def landed(self, landed: pb.Landed) -> None:
        """Notes that the decode node has all KV."""
        self.mark("transferred")
        self.set(
            decode_cached_tokens=landed.cached_tokens,
            kv_connectors=tuple(landed.kv_connectors),
            verified_runs=landed.num_digests,
        )
        exposed = max(0.0, landed.data_s - landed.commit_s)
        self.stages.told(Phase.HAND_OFF, kv_transfer=exposed, verification=landed.verify_s)
        self._add(
            exposed_seconds=exposed,
            transfer_bytes=landed.bytes,
            data_seconds=landed.data_s,
            commit_seconds=landed.commit_s,
            verify_seconds=landed.verify_s,
        )

    def handed_off(self, handed_off: pb.HandedOff) -> None:
        """Notes that the prefill node has finished the request."""
        self._add(transfer_seconds=handed_off.transfer_s)

    def _add(self, **amounts: float) -> None:
        """Adds to sums in which several nodes may have their share."""
        for name, amount in amounts.items():
            self._timeline[name] = self._timeline.get(name, 0) + amount

    def take(self, event: TokenEvent, role: str, version: str, position: int | None = None) -> None:
        """Takes new tokens from a node of this role, and puts their text into the client's queue.
        Drops tokens of a choice that a stop string has ended. `position`: the first token's
        position in the choice's output, if the node tells it.

        Raises:
            NodeError: a token that cannot be, the fault of the node that made it. Once it were
                among the request's tokens, it would be the client's.
            Cancelled: the client is too far behind.
        """
        if not self._prompt_scored:
            raise bad_token(role, "the prompt's log-probabilities come first")
        choice = event.choice
        stream = self._open.get(choice)
        token_ids = self._checked(event, role, position, is_open=stream is not None)
        self.version = version
        if stream is not None:
            now = monotonic()
            if self.retries.failures:
                self.retries.progress(role)
            self.deadline.token(now)
            self._put(self._delta(stream, event, token_ids, now))
            if event.finish_reason is None and choice not in self._open:
                self.stopped.append(choice)
        if not self._open:
            self.stages.enter(Phase.STREAM)

    def _checked(
        self, event: TokenEvent, role: str, position: int | None, is_open: bool
    ) -> list[int]:
        """Returns the ids of the tokens."""
        output = self._outputs.get(event.choice)
        if output is None:
            raise bad_token(role, f"there is no choice {event.choice}")
        done, count, vocab_size = len(output), len(event.tokens), self._vocab_size
        left = self._sampling.max_tokens - done
        ended = event.finish_reason is not None or not is_open
        if count > left or not (ended or 0 < count < left):
            raise bad_token(role, f"{count} where {left} are left")
        if is_open and position is not None and position != done:
            raise bad_token(role, f"at position {position}, not {done}")
        token_ids = []
        for token in event.tokens:
            token_id, logprobs = token.token_id, token.logprobs
            known = 0 <= token_id < vocab_size
            if logprobs is not None:
                known = known and all(0 <= i < vocab_size for i, _ in logprobs.top)
            if not known:
                raise bad_token(role, "it is outside the vocabulary")
            token_ids.append(token_id)
        return token_ids

    def _delta(
        self, stream: TextStream, event: TokenEvent, token_ids: list[int], now: float
    ) -> TextDelta:
        output = stream.push(
            token_ids,
            final=event.finish_reason is not None,
            stop_token=event.finish_reason is FinishReason.STOP,
        )
        self._outputs[event.choice] += token_ids
        self._count(event.choice, output.num_tokens, now)
        reason = FinishReason.STOP if output.stopped_by is not None else event.finish_reason
        if reason is not None:
            self.finish_reasons.append(reason)
            del self._open[event.choice]
        if self.request.prompt_only:
            return TextDelta(event.choice, "", (), reason and FinishReason.LENGTH)
        stop_reason = output.stopped_by if output.stopped_by is not None else event.stop_token_id
        tokens = event.tokens[: output.num_tokens]
        version = self.version or ""
        return TextDelta(event.choice, output.text, tokens, reason, stop_reason, version)

    def stats(self) -> GenerationStats:
        line = self._timeline
        exposed = line.get("exposed_seconds", 0.0) + line.get("verify_seconds", 0.0)
        timeline = Timeline(
            **line,
            overlapped_seconds=max(0.0, line.get("transfer_seconds", 0.0) - exposed),
            migrations=self.retries.failures,
        )
        return GenerationStats(
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=0 if self.request.prompt_only else sum(self.generated),
            cached_tokens=timeline.cached_tokens,
            timeline=timeline,
            stages=self.stages,
            finish_reasons=tuple(self.finish_reasons),
            num_choices=self.request.n,
            chosen=tuple(self._chosen),
        )

    def _count(self, choice: int, num_tokens: int, now: float) -> None:
        if "first_token" not in self._timeline:
            self.mark("first_token")
            self.on_first_token(self)
        if num_tokens and (last := self._last_token.get(choice)) is not None:
            self.token_gaps += [(now - last) / num_tokens] * num_tokens
        self._last_token[choice] = now
        self.generated[choice] += num_tokens


def bad_token(role: str, fault: str) -> NodeError:
    return protocol_error(role, f"a token: {fault}")
