"""The names and labels under which metrics are shown."""

from __future__ import annotations

import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter

from pdserve.common.obs.exposition import NODE_NAMES, ROUTER_NAMES, Exposition, exposed
from pdserve.common.obs.metrics import NodeMetrics, RouterMetrics


def shown(prefix: str) -> str:
    metrics = RouterMetrics()
    metrics.requests.labels("OK").inc()
    metrics.prompt_tokens.inc(7)
    metrics.itl.observe_all([0.02])
    return exposed(Exposition(metrics.registry, 'my "model"', prefix, ROUTER_NAMES)).decode()


@pytest.mark.parametrize(
    ("prefix", "ours", "vllm"),
    [("pdserve", True, False), ("vllm", False, True), ("both", True, True)],
)
def test_shared_metrics_have_the_chosen_prefix(prefix: str, ours: bool, vllm: bool) -> None:
    lines = shown(prefix).splitlines()
    label = r'{model_name="my \"model\""}'
    assert (f"pdserve_prompt_tokens_total{label} 7.0" in lines) is ours
    assert (f"vllm:prompt_tokens_total{label} 7.0" in lines) is vllm
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert (f"vllm:{name}_count{label} 1.0" in lines) is vllm
    assert r'pdserve_requests_total{code="OK",model_name="my \"model\""} 1.0' in lines


@pytest.mark.parametrize("prefix", ["pdserve", "vllm", "both"])
def test_every_series_has_the_model_s_name_and_every_metric_a_prefix(prefix: str) -> None:
    for line in shown(prefix).splitlines():
        if not line.startswith("#"):
            assert line.startswith(("pdserve_", "vllm:", "process_")), line
            assert "model_name=" in line, line


def test_metrics_with_a_vllm_name_exist() -> None:
    """The names of collectors are looked for where they are scraped
    (`tests/e2e/test_observed.py`)."""
    own = {metric.name.removeprefix("pdserve_") for metric in RouterMetrics().registry.collect()}
    collected = {
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason",
        "lora_requests_info",
    }  # fmt: skip
    assert ROUTER_NAMES.keys() - own == collected
    assert not ROUTER_NAMES.keys() & NODE_NAMES.keys(), "a sum over all would count twice"


def test_a_metric_may_be_called_otherwise_in_vllm() -> None:
    failed = CollectorRegistry()
    Counter("pdserve_sequences_failed_total", "Failed", registry=failed).inc()
    lines = exposed(Exposition(failed, "m", "vllm", NODE_NAMES)).decode().splitlines()
    assert 'vllm:corrupted_requests_total{model_name="m"} 1.0' in lines
    assert not any("sequences_failed" in line for line in lines)


@pytest.mark.parametrize("kind", [RouterMetrics, NodeMetrics])
def test_the_process_s_memory_cpu_and_files_are_shown(
    kind: type[RouterMetrics] | type[NodeMetrics],
) -> None:
    found = kind().registry.get_sample_value
    process = psutil.Process()
    assert found("process_resident_memory_bytes") == pytest.approx(
        process.memory_info().rss, rel=0.5
    )
    assert found("process_start_time_seconds") == pytest.approx(process.create_time(), abs=60)
    assert 0 < (found("process_open_fds") or 0) < (found("process_max_fds") or 0)
    used = found("process_cpu_seconds_total") or 0.0
    assert used > 0
    while (found("process_cpu_seconds_total") or 0.0) <= used:
        pass


def test_no_gauge_looks_like_a_counter() -> None:
    for metrics in (RouterMetrics(), NodeMetrics()):
        for metric in metrics.registry.collect():
            assert metric.type == "counter" or not metric.name.endswith("_total"), metric.name
