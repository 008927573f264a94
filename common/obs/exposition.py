"""Exposes metrics with the label `model_name`, under the names of `--metrics-prefix`.

Internally a metric is `pdserve_NAME`; only `http_…` and `process_…` have no prefix. Metrics that
vLLM also has can be exposed as `vllm:NAME`, for vLLM's dashboards. If both router and nodes have a
metric, only the router's gets vLLM's name, so that sums over all processes count a request once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdserve.common.config.shared import BOTH, VLLM

PREFIX = "pdserve_"


def _same(*names: str) -> dict[str, Sequence[str]]:
    return {name: (name,) for name in names}


# Our names → vLLM's, older ones behind the current one.
ROUTER_NAMES: Mapping[str, Sequence[str]] = _same(
    "e2e_request_latency_seconds",
    "external_prefix_cache_hits",
    "external_prefix_cache_queries",
    "generation_tokens",
    "lora_requests_info",
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
) | {
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds")
}
NODE_NAMES: Mapping[str, Sequence[str]] = _same(
    "cache_config_info",
    "estimated_flops_per_gpu",
    "estimated_read_bytes_per_gpu",
    "estimated_write_bytes_per_gpu",
    "num_preemptions",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_drafts",
) | {
    "iteration_tokens": ("iteration_tokens_total",),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "sequences_failed": ("corrupted_requests",),
}


class Exposition(Collector):
    """Renames and labels the metrics of `inner` for `/metrics`."""

    def __init__(
        self,
        inner: Collector,
        model_name: str,
        prefix: str,
        vllm_names: Mapping[str, Sequence[str]],
    ) -> None:
        """`prefix`: --metrics-prefix."""
        self._inner = inner
        self._label = {"model_name": model_name}
        self._prefix = prefix
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            for name in self._names(metric.name):
                yield self._renamed(metric, name)

    def _names(self, name: str) -> Sequence[str]:
        names = self._vllm_names.get(name.removeprefix(PREFIX))
        if names is None or self._prefix not in (VLLM, BOTH):
            return (name,)
        vllm = [f"vllm:{each}" for each in names]
        return [name, *vllm] if self._prefix == BOTH else vllm

    def _renamed(self, metric: Metric, name: str) -> Metric:
        shown = Metric(name, metric.documentation, metric.type)
        shown.samples = [
            sample._replace(
                name=name + sample.name.removeprefix(metric.name),
                labels=self._label | dict(sample.labels),
            )
            for sample in metric.samples
        ]
        return shown


def exposed(metrics: Collector) -> bytes:
    """Returns the metrics in Prometheus's text format."""
    return generate_latest(metrics)  # type: ignore[arg-type]
