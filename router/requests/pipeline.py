"""The request path: admit → place → prefill ∥ decode → detokenize → stream.

client ─▶ generate ─▶ _serve ─▶ Attempt ─ Decode.Run ──▶ D   reserves blocks
                                    ◀════ ticket ═══════
                                    ──── Prefill.Run ──▶ P ══ KV blocks ══▶ D
                                    ◀──── first token ──          goes to the client at once
                                    ◀════ tokens ═══════ D        after P's commit

All that D says comes in order on one stream, ═══, for all requests (`cluster/node_streams.py`).

When P fails, another takes over D's blocks: D issues a ticket of the next epoch (`Retarget`).
When D fails, the request begins another attempt: prompt and tokens so far are prefilled, and the
next token is the one that D would have drawn, because draws are keyed by (seed, position). The
client notices a pause.

A node of both roles computes the prompt itself, as a decode node does when no prefill node can:
`Decode.Run` alone, without a ticket.

Every part of a request runs in one task (`_serve`) or in that task's group, under the request's
one deadline. However it ends, that task's end is the request's, its slot is free and its calls
are cancelled; the client gets the answer's rest or a typed error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from time import monotonic
from typing import Any

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Cancelled, InvalidRequest, Overloaded, PdserveError
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.obs.tracing import Tracer
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.trace import traceparent_var
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.cluster.adapters import ServedAdapters
from pdserve.router.cluster.claims import Claim, Claims
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.node_caches import NodeCaches
from pdserve.router.cluster.node_streams import NodeStreams
from pdserve.router.cluster.placement import NodeSelector, load_policies
from pdserve.router.cluster.registry import Registry
from pdserve.router.requests.admission import Admission, Ask
from pdserve.router.requests.attempt import Attempt, AttemptFailed, KeptAt
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    Outlet,
    Put,
    Updates,
    generate,
)
from pdserve.router.requests.history import History
from pdserve.router.requests.request_state import RequestState
from pdserve.router.requests.slo import NO_SLO, SLO
from pdserve.router.requests.spacing import spaced
from pdserve.router.requests.timelines import Timelines
from pdserve.router.requests.trace import RequestTraces
from pdserve.router.requests.unread import Unread

logger = logging.getLogger(__name__)

LONG_PROMPT = 4096  # tokens, which take about a millisecond to write


class Pipeline:
    """Serves generation requests on the registered nodes."""

    def __init__(
        self,
        config: RoutingConfig,
        registry: Registry,
        tokenizer: Tokenizer,
        channels: Channels,
        metrics: RouterMetrics,
        vocab_size: int = 2**32,
        traces: RequestTraces | None = None,
        adapters: ServedAdapters | None = None,
        weights: Mapping[str, float] | None = None,
        stream_interval: int = 1,
    ) -> None:
        """`vocab_size`: rows of the model's embedding. `weights`: as `APIKeys.weights`.
        `stream_interval`: tokens."""
        self._stream_interval = stream_interval
        self._adapters = adapters or ServedAdapters()
        self._traces = traces or RequestTraces(Tracer())
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.registry = registry
        self.channels = channels
        self.metrics = metrics
        self._started = monotonic()
        self.view = ClusterView(registry)
        self.unread = Unread()
        self._long_prompts = _LongPrompts()
        self.timelines = Timelines(config.kept_timelines, self.view.glance, self._traces.model_name)
        self.streams = NodeStreams(channels)
        self.claims = Claims(registry, channels)
        policies = load_policies(config)
        roles = [role for role, policy in policies.items() if policy.uses_prefixes]
        self.caches = NodeCaches(registry, channels, roles, metrics)
        self.placement = NodeSelector(config, self.view, policies, self.caches.match, metrics)
        self._attempt = partial(Attempt, registry, channels, self.streams, self.placement, metrics)
        self.admission = Admission(
            config.max_concurrent_requests,
            config.max_queued_requests,
            config.queue_timeout,
            config.max_client_share,
            weights,
            SLO(config.slo_ttft or None, config.slo_itl or None),
            config.prefill_work,
        )
        self.history = History(metrics, self.view, self.admission)

    def check_room(self, client: str, tokens: int = 1) -> None:
        """Raises Overloaded as `Admission.check_room` does: before a body is parsed, and when its
        tokens are known."""
        self.admission.check_room(client, tokens)

    def generate(
        self, requests: Sequence[GenerationRequest], outlet: Outlet | None = None
    ) -> AsyncGenerator[Updates, None]:
        """Yields the requested prompt log-probabilities, deltas of all choices, interleaved, and at
        last one GenerationStats for each prompt. Deltas may go through the outlet instead, in
        order.

        `aclose()`, or cancelling the task that iterates, aborts the work on every node.

        Raises:
            PdserveError: a request cannot be served or failed for good. Other exceptions are
                defects.
        """
        serve = self._serve if self._stream_interval == 1 else self._serve_spaced
        return generate(requests, serve, outlet, self.unread)

    async def _serve_spaced(self, request: GenerationRequest, put: Put) -> GenerationStats:
        with spaced(put, self._stream_interval) as held:
            return await self._serve(request, held)

    async def _serve(self, request: GenerationRequest, put: Put) -> GenerationStats:
        """Serves a prompt: puts its deltas into its client's queue; counts and logs its outcome
        once."""
        state = RequestState(request, put, self._tokenizer, self._config, self._vocab_size)
        self.timelines.begun(state)
        try:
            self._trace(state)
            await state.replay()
            with self._adapters.using(request.adapter):
                await self._make(state)
        except PdserveError as error:
            if request.constraint and isinstance(error, InvalidRequest) and error.param is None:
                error.param = request.constraint  # nodes know only what became of it
            self._failed(state, error)
            if not isinstance(error, Overloaded):  # a door logs it
                logger.warning("%s failed: %s", state.request_id, error)
            raise
        except asyncio.CancelledError:
            if state.finished:
                self._finished(state)  # the client has all of it, and did not wait for its end
            else:
                self._failed(state, Cancelled("the client left"))
                logger.info("%s cancelled by the client", state.request_id)
            raise
        except Exception:
            logger.exception("%s failed: unexpected error", state.request_id)
            defect = PdserveError(
                f"internal error; its log entry is under request id {state.request_id}"
            )
            self._failed(state, defect)
            raise defect from None
        return self._finished(state)

    async def _make(self, state: RequestState) -> None:
        """Waits for a request with the same Idempotency-Key, if there is one; then serves."""
        request = state.request
        ask = Ask(
            amount=request.n,
            tokens=self.placement.least_missing(state.placement),
            priority=request.priority,
            batch=request.batch,
            prompt_tokens=len(request.prompt_token_ids),
            slo=NO_SLO if state.arrival is None else state.arrival.slo,
        )
        async with self.claims.of(state.key, request.batch.alias) as claim:
            if claim is not None:  # while another request waits, this one takes no slot
                state.deadline.queued("the request that has its Idempotency-Key")
                await claim.settled(monotonic() + self._config.queue_timeout)
            await self._serve_in_slot(state, ask, claim)

    async def _serve_in_slot(self, state: RequestState, ask: Ask, claim: Claim | None) -> None:
        """Takes a slot, and serves the prompt in as many attempts as it takes."""
        state.deadline.queued("a slot: --max-concurrent-requests and --prefill-backlog bound them")
        async with self.admission.slot(ask), state.deadline.running():
            state.on_first_token = partial(self._first_token, ask)
            try:
                with self._adapters.running(state.request.adapter):
                    await self._attempts(state, claim)
            finally:
                ask.generated = sum(state.generated)
                if state.finished and state.token_gaps:
                    ask.itl = fmean(state.token_gaps)
                self._judge(state, ask)

    def _judge(self, state: RequestState, ask: Ask) -> None:
        """Counts whether the request, which may have failed, kept its limits."""
        self.metrics.observe_prediction(ask.predicted, ask.ttft)
        first, waited = state.first_token, state.age
        self.metrics.observe_slo(ask.slo.outcomes(ask.promise, first, waited, ask.itl))

    def _first_token(self, ask: Ask, state: RequestState) -> None:
        self.admission.first_token(ask, learn=not state.retries.failures)

    async def _attempts(self, state: RequestState, claim: Claim | None) -> None:
        while not state.finished:
            await state.retries.backoff(state.deadline)
            with suppress(AttemptFailed):  # the next attempt continues
                if claim is not None and state.key is not None:
                    await self._keyed(state, claim)
                else:
                    await self._next_attempt(state)

    async def _keyed(self, state: RequestState, claim: Claim) -> None:
        """Joins the job of another request for the same answer, or starts one."""
        what = "the request that makes the same answer"
        with state.deadline.waiting(what) as until:
            elsewhere = await claim.elsewhere(until)
        if elsewhere is None:
            await self._next_attempt(state, claim.kept_at)
            return
        node, path = elsewhere
        state.mark("queued")
        logger.info("%s is made by another request: %s keeps it", state.request_id, node.id)
        await self._attempt(state, node, path, join=True).run()

    async def _next_attempt(self, state: RequestState, kept_at: KeptAt | None = None) -> None:
        await self._long_prompts.wait(state.num_tokens)
        decode, path = await self.placement.decode(state.placement)
        state.mark("queued")
        await self._attempt(state, decode, path, kept_at=kept_at).run()

    def _trace(self, state: RequestState) -> None:
        """Begins the request's span, under which its calls to nodes are."""
        state.trace = self._traces.begin(state.request, state.arrival, state.stages)
        if state.trace is not None:
            state.stages.timed |= state.trace.recording
            traceparent_var.set(state.trace.parent)
        elif state.arrival is not None:
            traceparent_var.set(state.arrival.traceparent)

    def _failed(self, state: RequestState, error: PdserveError) -> None:
        self.metrics.observe_error(error)
        self.timelines.ended(state, error)
        if state.trace is not None:
            state.trace.failed(error)

    def _finished(self, state: RequestState) -> GenerationStats:
        state.mark("finished")
        stats = state.stats()
        self.timelines.ended(state)
        self.metrics.observe_request(
            stats.timeline,
            prompt_tokens=stats.prompt_tokens,
            generated=state.generated,
            max_tokens=state.request.sampling.max_tokens,
            finish_reasons=state.finish_reasons,
        )
        self.metrics.itl.observe_all(state.token_gaps)
        if state.trace is not None:
            state.trace.finished(stats, state.finish_reasons)
        logger.info(
            "%s finished: %d prompt tokens (%d cached), %d generated, TTFT %.0f ms, %.0f ms in all",
            state.request_id, stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens,
            1e3 * (stats.timeline.first_token or 0), 1e3 * (stats.timeline.finished or 0),
        )  # fmt: skip
        return stats

    def look_around(self) -> None:
        """Updates admission by the nodes' number and by what other routers have placed on them."""
        self.admission.placed_by_others(*self.view.placed_by_others())
        self.admission.cluster(*self.view.replicas())

    def ready(self) -> tuple[bool, str]:
        """Returns whether a request could be served now, and the reason if not, or the current
        fault."""
        return self.view.ready()

    def load(self) -> int:
        """Returns the running prompts, and the prompts that wait for a slot."""
        return self.admission.running + self.admission.waiting

    def cluster(self) -> dict[str, Any]:
        """Returns the nodes and their state, as JSON for people."""
        ready, reason = self.ready()
        admission = self.admission
        load: dict[str, Any] = {"running": admission.running, "waiting": admission.waiting}
        load["places"] = admission.places
        load["first_token_seconds"] = predicted = admission.newcomer_ttft()
        measured = None if predicted is None else round(admission.measured_ago(), 3)
        load["first_token_measured_ago"] = measured
        load["routers"] = self.view.placed_by_others()[1]
        uptime = {"uptime_seconds": round(monotonic() - self._started, 3)}
        return {"ready": ready, "reason": reason, **load, **uptime, **self.view.describe()}


class _LongPrompts:
    """Spreads attempts with long prompts over turns of the event loop. One takes milliseconds to
    write, and all prompts of a body become ready in the same turn."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self, num_tokens: int) -> None:
        """Returns at once for a short prompt; else in a turn in which no other long one returns."""
        if num_tokens < LONG_PROMPT:
            return
        async with self._lock:
            await asyncio.sleep(0)
