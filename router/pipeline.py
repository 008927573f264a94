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
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from common.config.schema import RoutingConfig
from common.core.errors import Blame, NodeError, PdserveError
from common.obs.metrics import RouterMetrics
from common.rpc.server import Channels
from common.text.tokenizer import Tokenizer
from router.admission import Admission
from router.chooser import Chooser
from router.dispatch import Dispatch
from router.generation import GenerationRequest, GenerationStats, TextDelta
from router.recovery import Recovery
from router.registry import Node, Registry
from router.run import Run

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
        self._chooser = Chooser(config, registry)
        self.admission = Admission(
            config.max_concurrent_requests,
            config.max_queued_requests,
            config.queue_timeout,
            config.max_client_share,
        )

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[TextDelta | GenerationStats, None]:
        """As `router.generation.Generator.generate`."""
        run = Run(request, self._tokenizer, Recovery(self._config.migration_limit))
        try:
            async with self.admission.place(request.batch, len(request.prompt_token_ids)):
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

    async def _attempt(self, run: Run) -> AsyncGenerator[TextDelta, None]:
        """What one decode node makes of the request: all that is left of it, unless a node
        fails; then the caller tries again from there."""
        placement = await self._chooser.place(run)
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
            if error is not run.recovery.last:  # else a prefill node's, for which we gave up
                self._failed(run, error, placement.decode, dispatch.begun)
        finally:
            run.add(dispatch)

    def ready(self) -> tuple[bool, str]:
        return self._chooser.ready()

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
                for prefill, decode in self._chooser.pairs()
            ],
        }

    # ---- inside -----------------------------------------------------------------------------

    async def _next_prefill(
        self, run: Run, decode: Node, error: PdserveError | None, prefill: Node
    ) -> Node:
        """As `router.dispatch.NextPrefill`: begins anew when the KV should not travel, or when
        only other decode nodes have a prefill node left."""
        if error is not None:
            self._failed(run, error, prefill)
            if run.recovery.local_prefill:
                raise error
        elif prefill in self._chooser.usable()[0]:
            return prefill
        following = await self._chooser.prefill_for(run, decode)
        if following is None:
            raise error or _left(prefill)
        return following

    def _failed(self, run: Run, error: PdserveError, node: Node, begun: bool = True) -> None:
        """Raises `error` when the request cannot go on."""
        run.recovery.failed(error, node, begun)
        self._metrics.migrations.labels(node.role, error.code).inc()
        logger.warning("%s goes on elsewhere: %s", run.request_id, error)

    def _observe(self, run: Run, stats: GenerationStats) -> None:
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
