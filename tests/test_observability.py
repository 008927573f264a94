"""`compose/observability/`: rules and alerts by promtool, and every query of the dashboards by a
real Prometheus that scrapes a real cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from prometheus_client import ProcessCollector

from benchmarks.fleet import free_port
from cluster import START_TIMEOUT
from paths import ROOT
from warm import WarmCluster

FOLDER = ROOT / "compose" / "observability"
MODEL = "llama-gqa"
# What vLLM's dashboard asks.
VLLM = (
    "e2e_request_latency_seconds_bucket", "prompt_tokens_total", "generation_tokens_total",
    "time_per_output_token_seconds_bucket", "inter_token_latency_seconds_sum",
    "num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_bucket",
    "gpu_cache_usage_perc", "kv_cache_usage_perc", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_success_total", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum", "prefix_cache_hits_total",
)  # fmt: skip

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="needs prometheus (Debian: prometheus)"
)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboards() -> list[list[dict[str, Any]]]:
    """Their panels."""
    paths = sorted((FOLDER / "dashboards").glob("*.json"))
    return [json.loads(path.read_text())["panels"] for path in paths]


def queries() -> list[tuple[str, str]]:
    """(panel's title, expression) of all dashboards."""
    return [
        (panel["title"], target["expr"])
        for panels in dashboards()
        for panel in panels
        for target in panel["targets"]
    ]


def series() -> set[str]:
    """The names that processes expose, by the page that `docs/generate.py` writes, and that rules
    record."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    found = {"up", *(metric.name for metric in ProcessCollector(registry=None).collect())}
    found |= {f"{name}_total" for name in found if name.endswith("_seconds")}
    for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE):
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
        found |= {name + suffix for suffix in suffixes.get(kind, ("",))}
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return found | {rule["record"] for group in groups for rule in group["rules"]}


def test_every_expression_reads_series_that_exist() -> None:
    known = series()
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    asked = queries() + [(alert["alert"], alert["expr"]) for alert in alerts()]
    asked += [(rule["record"], rule["expr"]) for group in groups for rule in group["rules"]]
    for title, expression in asked:
        bare = re.sub(r'"[^"]*"', '""', expression)
        names = set(re.findall(r"\b[\w:]*(?:pdserve|http|process)_[\w:]+|\bup\b", bare))
        assert names - known == set(), (title, names - known)
        assert names or expression.startswith("vector("), title


def test_dashboards_start_with_stat_tiles() -> None:
    nodes, service = dashboards()
    for panels in (nodes, service):
        kinds = [panel["type"] for panel in panels]
        tiles = kinds.count("stat")
        assert tiles >= 6 and kinds[:tiles] == ["stat"] * tiles
        places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in panels]
        assert places == sorted(set(places))
        assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    titles = {panel["title"] for panel in service if panel["type"] == "stat"}
    assert titles >= {
        "Requests a second", "Requests that fail", "TTFT p95", "ITL p95", "Nodes ready",
        "Generated tokens a second", "Fullest KV cache", "Prompt tokens cached", "Requests waiting",
    }  # fmt: skip


def test_an_alert_says_what_is_what_to_do_first_and_where_to_read_on() -> None:
    for alert in alerts():
        notes, name = alert["annotations"], alert["alert"]
        assert set(notes) == {"summary", "description", "runbook"}, name
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        page, _, heading = notes["runbook"].partition("#")
        text = (ROOT / page).read_text(encoding="utf-8")
        headings = {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        }
        assert not heading or heading in headings, (name, heading)


def test_each_row_of_the_failure_matrix_has_an_alert() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = page.partition("## Failure matrix")[2].partition("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    named = [re.findall(r"`(Pdserve\w+)`", row.split("|")[-2]) for row in rows]
    assert len(rows) > 20 and all(named)
    assert {name for names in named for name in names} <= {alert["alert"] for alert in alerts()}


def test_each_alert_is_tested_to_fire_and_to_be_silent() -> None:
    tests = yaml.safe_load((FOLDER / "tests.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    names = {alert["alert"] for alert in alerts()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("test", "rules", "tests.yml")],
    ids=lambda arguments: arguments[0],
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A server of its own. The nodes are where the router says, as `http_sd_configs` would ask it,
    which takes some seconds more."""

    def __init__(self, folder: Path, router: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
        address = router.removeprefix("http://")
        nodes = requests.get(f"{router}/v1/cluster/targets", timeout=60).json()
        config["scrape_configs"] = [
            {"job_name": "pdserve-router", "static_configs": [{"targets": [address]}]},
            {"job_name": "pdserve-nodes", "static_configs": nodes},
        ]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )

    def get(self, path: str, **query: str) -> Any:
        answer = requests.get(f"{self.url}/api/v1/{path}", params=query, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("query", query=expression)["result"]
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    options = {"metrics_prefix": "both"}
    with WarmCluster(MODEL, router=options, **options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prometheus(
    cluster: WarmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), cluster.url)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _sees(server, "up == 1", 3):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # Between two scrapes everything grows.
        while not _sees(server, "rate(pdserve_request_success_total[1m]) > 0", 1) or not _sees(
            server, "rate(pdserve_prefix_cache_queries_total[1m]) > 0", 2
        ):
            assert time.monotonic() < deadline
            cluster.complete("Once upon a time there was a girl", max_tokens=8)
        while not _sees(server, "model:pdserve_request_failures:ratio_rate5m", 1):  # rules follow
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30)


def _sees(server: Prometheus, expression: str, count: int) -> bool:
    try:
        return len(server.query(expression)) >= count
    except (requests.ConnectionError, AssertionError):  # not yet
        return False


@needs_prometheus
def test_every_query_of_the_dashboards_finds_something(prometheus: Prometheus) -> None:
    found = queries()
    assert len(found) > 30
    for title, expression in found:
        asked = expression.replace("$model_name", MODEL).replace("$__rate_interval", "1m")
        assert "$" not in asked
        assert prometheus.query(asked), (title, asked)


@needs_prometheus
def test_metrics_of_vllm_s_dashboard_exist(prometheus: Prometheus) -> None:
    for name in VLLM:
        assert prometheus.query(f'vllm:{name}{{model_name="{MODEL}"}}'), name
    once = prometheus.query(f'vllm:prompt_tokens_total{{model_name="{MODEL}"}}')
    assert [series["metric"]["job"] for series in once] == ["pdserve-router"]


@needs_prometheus
def test_metrics_of_alerts_exist_from_the_start(prometheus: Prometheus) -> None:
    """Else they would miss the first time: a series that begins with 1 has not grown."""
    for alert in alerts():
        for name, labels in re.findall(r"increase\((\w+)\{(\w+=~?\"[^\"]+\")\}", alert["expr"]):
            label, _, values = labels.replace("=~", "=").partition("=")
            for value in values.strip('"').split("|"):
                series = f'{name}{{{label}="{value}"}}'
                assert prometheus.query(series), (alert["alert"], series)


@needs_prometheus
def test_rules_work_and_nothing_is_wrong(cluster: WarmCluster, prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    cluster.wait_for(lambda: all(rule["health"] == "ok" for rule in rules()))
    assert [rule["name"] for rule in rules() if rule.get("state") == "firing"] == []
