"""Exposes metrics with the label `model_name`, under the names of `--metrics-prefix`.

Internally a metric is `pdserve_NAME`. Metrics that vLLM also has can be exposed as `vllm:NAME`, for
vLLM's dashboards. If both router and nodes have a metric, only the router's gets vLLM's name, so
that sums over all processes count a request once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdserve.common.config.shared import BOTH, VLLM

PREFIX = "pdserve_"

# Our names → older names in vLLM, which its older dashboards use; the current one is the same.
ROUTER_NAMES: Mapping[str, Sequence[str]] = {
    "e2e_request_latency_seconds": (),
    "generation_tokens": (),
    "inter_token_latency_seconds": ("time_per_output_token_seconds",),
    "lora_requests_info": (),
    "num_requests_running": (),
    "num_requests_waiting": (),
    "prompt_tokens": (),
    "request_decode_time_seconds": (),
    "request_generation_tokens": (),
    "request_inference_time_seconds": (),
    "request_max_num_generation_tokens": (),
    "request_params_max_tokens": (),
    "request_params_n": (),
    "request_prefill_time_seconds": (),
    "request_prompt_tokens": (),
    "request_queue_time_seconds": (),
    "request_success": (),
    "request_time_per_output_token_seconds": (),
    "time_to_first_token_seconds": (),
}
NODE_NAMES: Mapping[str, Sequence[str]] = {
    "cache_config_info": (),
    "estimated_flops_per_gpu": (),
    "estimated_read_bytes_per_gpu": (),
    "estimated_write_bytes_per_gpu": (),
    "kv_cache_usage_perc": ("gpu_cache_usage_perc",),
    "num_preemptions": (),
    "prefix_cache_hits": (),
    "prefix_cache_queries": (),
    "spec_decode_num_accepted_tokens": (),
    "spec_decode_num_accepted_tokens_per_pos": (),
    "spec_decode_num_draft_tokens": (),
    "spec_decode_num_drafts": (),
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
        bare = name.removeprefix(PREFIX)
        older = self._vllm_names.get(bare)
        if older is None or self._prefix not in (VLLM, BOTH):
            return (name,)
        vllm = [f"vllm:{each}" for each in (bare, *older)]
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
