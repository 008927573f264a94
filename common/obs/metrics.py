"""Prometheus metrics of the roles. Names, units and buckets are vLLM's where it has the same
metric.

Events are counted here; collectors read states (queue lengths, blocks, nodes) at a scrape. Each
object owns its registry, so that several clusters or nodes fit into one process. Label values are
bounded: node ids and request ids are only in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.common.core.errors import PdserveError, TransferError
from pdserve.common.core.request import FinishReason, PromptPath, Timeline
from pdserve.common.obs.histograms import (
    BALANCEDNESS,
    CHOICES,
    FIRST_TOKEN_SECONDS,
    RATIOS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    TRANSFER_SECONDS,
    BulkHistogram,
    one_two_five,
)

# Alerts look for increases of these, so the counters must exist from the start.
WATCHED_REQUESTS = (
    "OK", "CANCELLED", "NO_NODE", "OVERLOADED", "POISON_REQUEST", "QUEUE_TIMEOUT",
    "SLO_ITL", "SLO_TTFT",
)  # fmt: skip
WATCHED_TRANSFERS = ("OK", "CONNECT_FAILED", "LEASE_EXPIRED", "NO_COMMON_CONNECTOR", "PEER_LOST")
SLO_OUTCOMES = ("met", "missed", "unmeasured")
SLO_PROMISES = {"ttft": ("limit", "extended", "none"), "itl": ("limit",)}
WATCHED_EVENT = "stopped/DIGEST_MISMATCH"


class _Metrics:
    """A registry with short constructors of metrics, and with this process's `process_…`.
    `Exposition` exposes it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"pdserve_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"pdserve_{name}", help, registry=self.registry, buckets=buckets)


class RouterMetrics(_Metrics):
    """The metrics of requests: latencies, tokens, outcomes."""

    def __init__(self, max_model_len: int = 2**17) -> None:
        """`max_model_len`: the largest bucket of token counts."""
        super().__init__()
        tokens = one_two_five(max_model_len)
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of requests")
        self.cached_tokens = self._counter(
            "prompt_tokens_cached_total", "Prompt tokens found in a prefix cache"
        )
        self.tokens_by_source = self._counter(
            "prompt_tokens_by_source_total",
            "Prompt tokens by source: local_compute, local_cache_hit (a prefix cache)",
            "source",
        )
        self.handed_queries = self._counter(
            "external_prefix_cache_queries_total",
            "Prompt tokens that a decode node lacked and wanted from a prefill node",
        )
        self.handed_hits = self._counter(
            "external_prefix_cache_hits_total",
            "Prompt tokens of these that a prefill node handed over",
        )
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated")
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Acceptance to first token", FIRST_TOKEN_SECONDS
        )
        self.itl = BulkHistogram(
            "pdserve_inter_token_latency_seconds", "Between tokens of a choice", TOKEN_SECONDS
        )
        self.registry.register(self.itl)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean after the first token",
            TOKEN_SECONDS,
        )  # fmt: skip
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "Acceptance to last token", REQUEST_SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Waiting in the router and on the node that prefills",
            REQUEST_SECONDS,
        )  # fmt: skip
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "In steps that compute the prompt", REQUEST_SECONDS
        )
        self.hand_off_time = self._histogram(
            "request_hand_off_time_seconds",
            "KV still to come when the prompt was computed, and its verification: the time that a "
            "hand-off adds to a request",
            TRANSFER_SECONDS,
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "First token to last", REQUEST_SECONDS
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "Prefill and decode together", REQUEST_SECONDS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", tokens
        )
        self.computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request not cached", tokens
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a choice", tokens
        )
        self.max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice", tokens
        )
        self.max_tokens = self._histogram(
            "request_params_max_tokens", "A request's max_tokens", tokens
        )
        self.choices = self._histogram("request_params_n", "A request's n", CHOICES)
        self.finished = self._counter(
            "request_success_total", "Choices finished, by reason", "finished_reason"
        )
        self.requests = self._counter(
            "requests_total", "Requests ended, by code: OK or the error's (also refusals)", "code"
        )
        self.grammar_seconds = self._histogram(
            "grammar_compilation_time_seconds",
            "CPU time to compile a grammar that is not in the cache",
            TRANSFER_SECONDS,
        )
        self.predicted_ttft = self._histogram(
            "predicted_time_to_first_token_seconds",
            "Acceptance to first token, as predicted at acceptance",
            FIRST_TOKEN_SECONDS,
        )
        self.ttft_over_predicted = self._histogram(
            "time_to_first_token_over_predicted",
            "Acceptance to first token, as a multiple of what was predicted",
            RATIOS,
        )
        self.slo_requests = self._counter(
            "slo_requests_total",
            "Requests that got a slot, by SLO (ttft, itl), outcome (met, missed: by the limit of "
            "the request's header or of --slo-…; unmeasured) and promise (that limit; extended: "
            "longer, for a long prompt; none); refused ones are in requests_total",
            "slo", "outcome", "promise",
        )  # fmt: skip
        self.migrations = self._counter(
            "request_migrations_total",
            "Migrations of requests to other nodes, by role and error of the failed node",
            "role", "code",
        )  # fmt: skip
        self.prompts = self._counter(
            "prompts_total",
            "Prompts answered, by how the decode node got their KV: transferred from a prefill "
            "node, local (computed as configured), stand_in (computed for lack of a prefill node)",
            "path",
        )
        self.recomputed_tokens = self._counter(
            "recomputed_prompt_tokens_total", "Prompt tokens that more than one node computed"
        )
        self.worker_deaths = self._counter(
            "router_worker_deaths_total", "Worker processes of this router that died"
        )
        self.policy_failures = self._counter(
            "placement_policy_failures_total",
            "Placements in which the policy failed or chose an unsuitable node; load decided",
            "role",
        )
        self.prefix_index_queries = self._counter(
            "prefix_index_queries_total",
            "Prompt tokens placed by a policy that knows the caches, by role of the node",
            "role",
        )
        self.prefix_index_hits = self._counter(
            "prefix_index_hits_total",
            "Prompt tokens of these queries that the chosen node had cached, by its KV events",
            "role",
        )
        self.kv_event_resyncs = self._counter(
            "kv_event_resyncs_total",
            "Resyncs: a node's KV events were dropped and a new snapshot requested, by reason",
            "reason",
        )
        for reason in ("gap", "unknown_block"):
            self.kv_event_resyncs.labels(reason)
        for slo, promises in SLO_PROMISES.items():
            for labels in product((slo,), SLO_OUTCOMES, promises):
                self.slo_requests.labels(*labels)
        for source in ("local_compute", "local_cache_hit"):
            self.tokens_by_source.labels(source)
        for path in PromptPath:
            self.prompts.labels(path.value)
        for code in WATCHED_REQUESTS:
            self.requests.labels(code)
        for role in ("prefill", "decode", "both"):
            self.migrations.labels(role, "PROTOCOL_ERROR")
            self.policy_failures.labels(role)

    def observe_request(
        self,
        timeline: Timeline,
        *,
        prompt_tokens: int,
        generated: Sequence[int],
        max_tokens: int,
        finish_reasons: Sequence[FinishReason],
    ) -> None:
        """Records a finished request; `generated`: tokens of each choice."""
        self.requests.labels("OK").inc()
        self._observe_prompt(timeline, prompt_tokens)
        self.generation_tokens.inc(sum(generated))
        for reason in finish_reasons:
            self.finished.labels(reason.value).inc()
        for count in generated:
            self.request_generation_tokens.observe(count)
        self.request_prompt_tokens.observe(prompt_tokens)
        self.max_generation_tokens.observe(max(generated, default=0))
        self.max_tokens.observe(max_tokens)
        self.choices.observe(len(generated))
        self._observe_times(timeline, sum(generated), len(generated))

    def _observe_prompt(self, timeline: Timeline, tokens: int) -> None:
        cached = min(timeline.cached_tokens, tokens)
        self.prompt_tokens.inc(tokens)
        self.cached_tokens.inc(cached)
        self.computed_tokens.observe(tokens - cached)
        self.tokens_by_source.labels("local_cache_hit").inc(cached)
        self.tokens_by_source.labels("local_compute").inc(tokens - cached)
        self.recomputed_tokens.inc(timeline.recomputed_tokens)
        if timeline.path == PromptPath.TRANSFERRED:
            lacking = max(0, tokens - timeline.decode_cached_tokens)
            self.handed_queries.inc(lacking)
            self.handed_hits.inc(lacking)
        elif timeline.path == PromptPath.STAND_IN:
            self.handed_queries.inc(tokens - cached)
        if timeline.path:
            self.prompts.labels(timeline.path).inc()

    def observe_prediction(self, predicted: float | None, ttft: float | None) -> None:
        """Records a request's TTFT beside the one that admission predicted; both in seconds."""
        if predicted and ttft is not None:
            self.predicted_ttft.observe(predicted)
            self.ttft_over_predicted.observe(ttft / predicted)

    def observe_slo(self, outcomes: Iterable[tuple[str, str, str]]) -> None:
        """Counts a request's (limit, outcome, promise)."""
        for labels in outcomes:
            self.slo_requests.labels(*labels).inc()

    def _observe_times(self, line: Timeline, num_tokens: int, num_choices: int) -> None:
        queue = None if line.queued is None else line.queued + line.prefill_queue_seconds
        decode = None
        if line.first_token is not None and line.finished is not None:
            decode = line.finished - line.first_token
        exposed = line.exposed_seconds + line.verify_seconds
        hand_off = None if line.transferred is None else exposed
        for histogram, seconds in (
            (self.queue_time, queue),
            (self.ttft, line.first_token),
            (self.e2e, line.finished),
            (self.prefill_time, line.prefill_seconds),
            (self.hand_off_time, hand_off),
            (self.decode_time, decode),
            (self.inference_time, line.prefill_seconds + (decode or 0.0)),
            (self.tpot, time_per_output_token(line, num_tokens, num_choices)),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    def observe_error(self, error: PdserveError) -> None:
        """Counts a request that ended with a typed error, once per error."""
        if not error.counted:
            error.counted = True
            self.requests.labels(error.code).inc()


class NodeMetrics(_Metrics):
    """The metrics of a node: KV transfers, experts, health."""

    def __init__(self) -> None:
        super().__init__()
        self.transfer_bytes = self._counter("kv_transfer_bytes_total", "KV bytes moved")
        self.transfer_seconds = self._histogram(
            "kv_transfer_seconds",
            "Prefill: first run sent to commit answered. Decode: blocks reserved to KV received",
            TRANSFER_SECONDS,
        )
        self.transfers = self._counter(
            "kv_transfers_total", "KV transfers ended, by outcome: OK or error code", "outcome"
        )
        for code in WATCHED_TRANSFERS:
            self.transfers.labels(code)
        self.moe_assignments = self._counter(
            "moe_assignments_total",
            "(token, expert) pairs by the expert-parallel rank of the expert (MoE models; with "
            "pipeline stages, the layers of the last one)",
            "ep_rank",
        )
        self.moe_balancedness = self._histogram(
            "moe_balancedness",
            "Mean / max load of an expert in a step, mean over layers: 1 is even; steps with few "
            "tokens are never even (with pipeline stages, the layers of the last one)",
            BALANCEDNESS,
        )
        self.kv_events = self._counter(
            "kv_events_total",
            "KV events sent to routers and --kv-events-config, by type; Snapshot: the whole prefix "
            "cache, sent to a router that is new or was too far behind",
            "event",
        )
        for event in ("BlockStored", "BlockRemoved", "Snapshot"):
            self.kv_events.labels(event)
        self.transfer_events = TransferEvents()
        self.registry.register(self.transfer_events)
        self.healthy = Gauge(
            "pdserve_healthy", "1 while this node can produce tokens", registry=self.registry
        )
        self.engine_healthy = Gauge(
            "pdserve_engine_healthy", "1 while this replica of the node can produce tokens",
            ("engine",), registry=self.registry,
        )  # fmt: skip

    def observe_transfer(self, *, num_bytes: int, seconds: float) -> None:
        """Records a successful KV transfer."""
        self.transfers.labels("OK").inc()
        self.transfer_bytes.inc(num_bytes)
        self.transfer_seconds.observe(seconds)

    def observe_experts(self, assignments: Sequence[int], balancedness: float) -> None:
        """Records a step's (token, expert) pairs by expert-parallel rank, and their balance."""
        for rank, count in enumerate(assignments):
            self.moe_assignments.labels(str(rank)).inc(count)
        self.moe_balancedness.observe(balancedness)

    @contextmanager
    def transfer_errors(self) -> Iterator[None]:
        """Counts a TransferError that the block raises, and re-raises it."""
        try:
            yield
        except TransferError as error:
            self.transfers.labels(error.code).inc()
            raise


class TransferEvents(Collector):
    """Counters of the KV transfer's control plane, read at a scrape."""

    def __init__(self) -> None:
        self._counts: Callable[[], Mapping[str, int]] = dict

    def follow(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Sets the source: `counts()` returns event → occurrences. Event names must be bounded
        (codes and states, no ids). "bytes" is skipped: `pdserve_kv_transfer_bytes_total` has it."""
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "pdserve_kv_transfer_events", "Events of KV transfers", labels=("event",)
        )
        for event, count in sorted({WATCHED_EVENT: 0, **self._counts()}.items()):
            if event != "bytes":
                events.add_metric((event,), count)
        yield events


def time_per_output_token(
    timeline: Timeline, completion_tokens: int, num_choices: int
) -> float | None:
    """Returns the mean seconds between tokens of a choice (TPOT); None if no choice has a second
    token or the request did not finish."""
    later_tokens = completion_tokens / max(num_choices, 1) - 1
    if timeline.first_token is None or timeline.finished is None or later_tokens <= 0:
        return None
    return (timeline.finished - timeline.first_token) / later_tokens
