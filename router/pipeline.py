"""The request path: admit → place → dispatch → detokenize → stream.

client ─▶ Pipeline.generate ─▶ Dispatch ─ Decode.Run ──▶ D   reserves blocks
                                   ◀──── ticket ───────
                                   ──── Prefill.Run ──▶ P ══ KV blocks ══▶ D
                                   ◀──── first token ──          goes to the client at once
                                   ◀──── tokens ─────── D        after P's commit

When P fails, another takes over D's blocks (`dispatch.py`). When D fails, the request goes on
on another pair: prompt and tokens so far are prefilled, and the next token is the one that D
would have drawn, because draws are keyed by (seed, position). The client notices a pause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from itertools import product
from time import monotonic
from typing import Any, TypeVar

from common.config.schema import RoutingConfig
from common.core.errors import Blame, NodeError, PdserveError, Unavailable
from common.core.request import Choice, FinishReason, GenerateJob, Timeline, TokenEvent
from common.obs.metrics import RouterMetrics
from common.rpc.pb import cluster_pb2 as pb
from common.rpc.server import Channels
from common.text.stream import TextStream
from common.text.tokenizer import Tokenizer
from router.admission import Admission
from router.dispatch import Dispatch
from router.generation import GenerationRequest, GenerationStats, TextDelta
from router.placement import Placement, can_pair, make_policy, place, why_not
from router.recovery import Recovery
from router.registry import Node, Registry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Pipeline:
    """Implements `router.generation.Generator` on the registered nodes."""

    def __init__(
        self,
        config: RoutingConfig,
        registry: Registry,
        tokenizer: Tokenizer,
        channels: Channels,
        metrics: RouterMetrics,
    ) -> None:
        self._config = config
        self._registry = registry
        self._tokenizer = tokenizer
        self._channels = channels
        self._metrics = metrics
        self._policies = make_policy(config.prefill_policy), make_policy(config.decode_policy)
        self.admission = Admission(
            config.max_concurrent_requests, config.max_queued_requests, config.queue_timeout
        )

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[TextDelta | GenerationStats, None]:
        """As `router.generation.Generator.generate`."""
        run = _Run(request, self._tokenizer, Recovery(self._config.migration_limit))
        try:
            async with self.admission.place():
                while not run.finished:
                    async with aclosing(self._attempt(run)) as deltas:
                        async for delta in deltas:
                            yield delta
            run.mark("finished")
        except PdserveError as error:
            self._metrics.observe_error(error.code)
            logger.warning("%s failed: %s", request.request_id, error)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._metrics.observe_error("CANCELLED")
            logger.info("%s cancelled by the client", request.request_id)
            raise
        stats = run.stats()
        self._observe(run, stats)
        yield stats

    async def _attempt(self, run: _Run) -> AsyncGenerator[TextDelta, None]:
        """What one decode node makes of the request: all that is left of it, unless a node
        fails; then the caller tries again from there."""
        placement = await self._place(run)
        run.mark("queued")
        dispatch = Dispatch(
            run.job,
            placement.decode,
            placement.prefill,
            lambda error, failed: self._next_prefill(run, placement.decode, error, failed),
            self._registry,
            self._channels,
            run.mark,
        )
        try:
            with self._registry.using(placement.decode):
                async with aclosing(dispatch.events()) as events:
                    async for event in events:
                        run.version = placement.decode.info.fingerprint
                        for delta in run.deltas(event):
                            yield delta
                        if run.finished:
                            break
                run.check_finished()
        except PdserveError as error:
            self._failed(run, error, placement.decode, dispatch.begun)
        finally:
            run.add(dispatch)

    def ready(self) -> tuple[bool, str]:
        prefills, decodes = self._usable()
        if place(prefills, decodes, *self._policies) is not None:
            return True, "ok"
        if not prefills or not decodes:
            return False, self._why_missing(prefills, decodes)
        reasons = [why_not(prefill, decode) for prefill, decode in product(prefills, decodes)]
        return False, f"no prefill node pairs with a decode node ({'; '.join(reasons[:4])})"

    def cluster(self) -> dict[str, Any]:
        ready, reason = self.ready()
        return {
            "ready": ready,
            "reason": reason,
            "running": self.admission.running,
            "waiting": self.admission.waiting,
            "nodes": self._registry.describe(),
            "pairings": [
                {"prefill": prefill.info.node_id, "decode": decode.info.node_id}
                for prefill, decode in product(*self._usable())
                if can_pair(prefill, decode)
            ],
        }

    # ---- inside -----------------------------------------------------------------------------

    def _why_missing(self, prefills: Sequence[Node], decodes: Sequence[Node]) -> str:
        roles = (("prefill", pb.ROLE_PREFILL, prefills), ("decode", pb.ROLE_DECODE, decodes))
        missing = [(name, role) for name, role, nodes in roles if not nodes]
        what = " and ".join(f"no usable {name} node" for name, _ in missing)
        why = [text for _, role in missing for text in self._registry.unusable_reasons(role)]
        return f"{what} ({'; '.join(why[:4])})" if why else what

    def _usable(self) -> tuple[list[Node], list[Node]]:
        return self._registry.usable(pb.ROLE_PREFILL), self._registry.usable(pb.ROLE_DECODE)

    async def _place(self, run: _Run) -> Placement:
        """A pair of nodes; waits for one as long as the queue's time-out allows.

        Raises:
            Unavailable: none came.
        """
        return await self._wait_for(lambda: self._find_placement(run))

    def _find_placement(self, run: _Run) -> Placement | None:
        """A pair of nodes that may take the request now. One that has begun stays with its
        version, and does not wait for a prefill node: a decode node can compute it, too."""
        local = run.recovery.local_prefill
        local = local or len(run.job.token_ids) < self._config.local_prefill_threshold
        begun = run.version is not None
        prefills, decodes = self._usable()
        decodes = [node for node in decodes if run.version in (None, node.info.fingerprint)]
        avoids: tuple[Collection[str], ...] = (run.recovery.avoid, ())
        for local_prefill, avoid in product((local, local or begun), avoids):
            pair = _without(prefills, avoid), _without(decodes, avoid)
            placement = place(*pair, *self._policies, local_prefill)
            if placement is not None:
                return placement
        return None

    async def _next_prefill(
        self, run: _Run, decode: Node, error: PdserveError | None, prefill: Node
    ) -> Node:
        """As `router.dispatch.NextPrefill`: begins anew when the KV should not travel, or when
        only other decode nodes have a prefill node left."""
        if error is not None:
            self._failed(run, error, prefill)
            if run.recovery.local_prefill:
                raise error
        elif prefill in self._usable()[0]:
            return prefill

        def find() -> Node | None:
            fitting = [node for node in self._usable()[0] if can_pair(node, decode)]
            nodes = _without(fitting, run.recovery.avoid) or fitting
            if not nodes and self._find_placement(run) is not None:
                raise error or _left(prefill)
            return self._policies[0](nodes) if nodes else None

        return await self._wait_for(find)

    async def _wait_for(self, find: Callable[[], T | None]) -> T:
        deadline = monotonic() + self._config.queue_timeout
        while (found := find()) is None:
            # Wake up now and then: a breaker that may be tried again announces nothing.
            patience = min(0.5, deadline - monotonic())
            if patience <= 0:
                ready, reason = self.ready()
                reason = "no usable node is of the version that began this" if ready else reason
                raise Unavailable(reason, code="NO_NODE", retry_after=2.0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._registry.wait_for_change(), patience)
        return found

    def _failed(self, run: _Run, error: PdserveError, node: Node, begun: bool = True) -> None:
        """Raises `error` when the request cannot go on."""
        run.recovery.failed(error, node, begun)
        self._metrics.migrations.labels(node.role, error.code).inc()
        logger.warning("%s goes on elsewhere: %s", run.request_id, error)

    def _observe(self, run: _Run, stats: GenerationStats) -> None:
        self._metrics.observe_request(
            stats.timeline,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            finish_reasons=run.finish_reasons,
        )
        for seconds in run.token_gaps:
            self._metrics.itl.observe(seconds)
        logger.info(
            "%s finished: %d prompt tokens (%d cached), %d generated, TTFT %.0f ms, %.0f ms in all",
            run.request_id, stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens,
            1e3 * (stats.timeline.first_token or 0), 1e3 * (stats.timeline.finished or 0),
        )  # fmt: skip


def _left(node: Node) -> NodeError:
    message = f"{node.info.node_id} left before its turn, and none of its kind is there"
    return NodeError(message, code="PEER_LOST", blame=Blame(node.role))


def _without(nodes: Sequence[Node], avoid: Collection[str]) -> list[Node]:
    return [node for node in nodes if node.info.node_id not in avoid]


class _Run:
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
