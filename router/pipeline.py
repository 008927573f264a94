"""The request path: admit → place → dispatch → detokenize → stream.

client ─▶ Pipeline.generate ─▶ Dispatch ─ Decode.Run ──▶ D   reserves blocks
                                   ◀──── ticket ───────
                                   ──── Prefill.Run ──▶ P ══ KV blocks ══▶ D
                                   ◀──── first token ──          goes to the client at once
                                   ◀──── tokens ─────── D        after P's commit
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import product
from time import monotonic
from typing import Any

from common.config.schema import RoutingConfig
from common.core.errors import Blame, NodeError, PdserveError, Unavailable
from common.core.request import FinishReason, GenerateJob, Timeline, TokenEvent
from common.obs.metrics import RouterMetrics
from common.rpc.pb import cluster_pb2 as pb
from common.rpc.server import Channels
from common.text.stream import TextStream
from common.text.tokenizer import Tokenizer
from router.admission import Admission
from router.dispatch import Dispatch
from router.generation import GenerationRequest, GenerationStats, TextDelta
from router.placement import Placement, can_pair, make_policy, place, why_not
from router.registry import Node, Registry

logger = logging.getLogger(__name__)


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
        run = _Run(request, self._tokenizer)
        try:
            async with self.admission.place():
                placement = await self._place(request)
                run.mark("queued")
                with _InFlight(placement, self._registry):
                    dispatch = Dispatch(run.job, placement, self._channels, run.mark)
                    async with aclosing(dispatch.events()) as events:
                        async for event in events:
                            for delta in run.deltas(event):
                                yield delta
                            if run.finished:
                                break
                    run.check_finished()
            run.mark("finished")
        except PdserveError as error:
            self._metrics.observe_error(error.code)
            logger.warning("%s failed: %s", request.request_id, error)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._metrics.observe_error("CANCELLED")
            logger.info("%s cancelled by the client", request.request_id)
            raise
        stats = run.stats(dispatch)
        self._observe(run, stats)
        yield stats

    def ready(self) -> tuple[bool, str]:
        prefills, decodes = self._usable()
        if place(prefills, decodes, *self._policies) is not None:
            return True, "ok"
        if not prefills or not decodes:
            missing = [
                name for name, nodes in (("prefill", prefills), ("decode", decodes)) if not nodes
            ]
            return False, f"no usable {' and no usable '.join(missing)} node"
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

    def _usable(self) -> tuple[list[Node], list[Node]]:
        return self._registry.usable(pb.ROLE_PREFILL), self._registry.usable(pb.ROLE_DECODE)

    async def _place(self, request: GenerationRequest) -> Placement:
        """A pair of nodes; waits for one as long as the queue's time-out allows."""
        local = len(request.prompt_token_ids) < self._config.local_prefill_threshold
        deadline = monotonic() + self._config.queue_timeout
        while True:
            placement = place(*self._usable(), *self._policies, local_prefill=local)
            if placement is not None:
                return placement
            # Wake up now and then: a breaker that may be tried again announces nothing.
            patience = min(0.5, deadline - monotonic())
            if patience <= 0:
                _, reason = self.ready()
                raise Unavailable(reason, code="NO_NODE", retry_after=2.0)
            try:
                await asyncio.wait_for(self._registry.wait_for_change(), patience)
            except TimeoutError:
                continue

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
            run.job.request_id, stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens,
            1e3 * (stats.timeline.first_token or 0), 1e3 * (stats.timeline.finished or 0),
        )  # fmt: skip


class _Run:
    """What one request has become so far: its choices' text, its times."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.job = GenerateJob(
            request.request_id, request.prompt_token_ids, request.sampling, request.n
        )
        self.finish_reasons: list[FinishReason] = []
        self.token_gaps: list[float] = []
        self._start = monotonic()
        self._moments: dict[str, float] = {}
        self._num_tokens = 0
        self._last_token: dict[int, float] = {}
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
        """Notes that a moment of the timeline (one of its fields) is now."""
        self._moments[moment] = monotonic() - self._start

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
        self._count(event.choice, output.num_tokens)
        reason = FinishReason.STOP if output.stopped_by is not None else event.finish_reason
        if reason is not None:
            self.finish_reasons.append(reason)
            del self._open[event.choice]
        stop_reason = output.stopped_by if output.stopped_by is not None else event.stop_token_id
        tokens = event.tokens[: output.num_tokens]
        return (TextDelta(event.choice, output.text, tokens, reason, stop_reason),)

    def stats(self, dispatch: Dispatch) -> GenerationStats:
        timeline = Timeline(
            **self._moments,  # type: ignore[arg-type]
            cached_tokens=dispatch.cached_tokens,
            transfer_bytes=dispatch.transfer_bytes,
            transfer_seconds=dispatch.transfer_seconds,
        )
        return GenerationStats(
            prompt_tokens=len(self.job.prompt_token_ids),
            completion_tokens=self._num_tokens,
            cached_tokens=dispatch.cached_tokens,
            timeline=timeline,
        )

    def _count(self, choice: int, num_tokens: int) -> None:
        now = monotonic()
        if self._num_tokens == 0:
            self.mark("first_token")
        if choice in self._last_token and num_tokens:
            self.token_gaps += [(now - self._last_token[choice]) / num_tokens] * num_tokens
        self._last_token[choice] = now
        self._num_tokens += num_tokens


class _InFlight:
    """Counts a request on its nodes and tells breakers and registry how it ended."""

    def __init__(self, placement: Placement, registry: Registry) -> None:
        self._registry = registry
        self._nodes = {
            Blame.PREFILL: placement.prefill,
            Blame.DECODE: placement.decode,
        }

    def __enter__(self) -> None:
        for node in filter(None, self._nodes.values()):
            node.in_flight += 1
            node.breaker.placed()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for blame, node in self._nodes.items():
            if node is None:
                continue
            node.in_flight -= 1
            if error is None:
                node.breaker.succeeded()
            elif isinstance(error, PdserveError) and error.blame is blame:
                node.breaker.failed()
                if error.code == "PEER_LOST":
                    self._registry.lost(node)
            else:
                node.breaker.undecided()
