"""Writes the parts of the pages that come from the code: the tables of options, request parameters,
metrics, errors and states, and the excerpts of the tour.

    python docs/generate.py

A part lies between `<!-- begin NAME -->` and `<!-- end -->`. A name with a colon is an excerpt:
`router.requests.pipeline:Pipeline.generate` is that method, as the file has it now.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

import vllm_tables
from excerpts import excerpt
from misdeployments import MISDEPLOYMENTS
from pdserve.cli import chat, top, trace
from pdserve.cli.main import BENCHES
from pdserve.cli.main import COMMANDS as PROGRAMS
from pdserve.cli.models import known_models, shown
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.config.node import BothNodeConfig, WorkerNodeConfig
from pdserve.common.config.options import Option, options
from pdserve.common.config.router import RouterConfig, RoutingConfig
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.parameters import PARAMETERS, Parameter, ParamType
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.node.load import SchedulerCollector
from pdserve.common.node.utilisation import LentCoresCollector, UtilisationCollector
from pdserve.common.obs.exposition import NODE_NAMES, PREFIX, ROUTER_NAMES
from pdserve.common.obs.metrics import NodeMetrics, RouterMetrics
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.status import STATUS
from pdserve.kv_transfer.control.protocol import SINK, SOURCE
from pdserve.router.api.ignored import LEFT_OUT, UNSUPPORTED, WITHOUT_EFFECT
from pdserve.router.cluster.adapters import AdaptersCollector, ServedAdapters
from pdserve.router.cluster.registry import Registry
from pdserve.router.http.absent import ABSENT
from pdserve.router.http.encoding import error_body
from pdserve.router.http.instrumentation import HTTPMetrics
from pdserve.router.requests.pipeline import Pipeline
from pdserve.router.server import PipelineCollector

FOLDER = Path(__file__).parent
ALERTS = FOLDER.parent / "compose" / "observability" / "alerts.yml"
PART = re.compile(r"<!-- begin (\S+) -->\n.*?<!-- end -->", re.DOTALL)
COMMANDS = {
    "up": ClusterConfig,
    "router": RouterConfig,
    "prefill, decode": WorkerNodeConfig,
    "both": BothNodeConfig,
}

Found = dict[str, Option]  # by command


def pages() -> list[Path]:
    """Returns the pages that have generated parts."""
    return [page for page in sorted(FOLDER.rglob("*.md")) if PART.search(page.read_text("utf-8"))]


def rewrite(page: str) -> str:
    """Returns the page with its parts as the code says now.

    Raises:
        LookupError: the page names a part or a definition that does not exist.
    """
    return PART.sub(
        lambda found: f"<!-- begin {found[1]} -->\n{_part(found[1])}\n<!-- end -->", page
    )


def _part(name: str) -> str:
    return "\n".join(excerpt(name) if ":" in name else PARTS[name]())


def _table(*rows: tuple[str, ...]) -> Iterator[str]:
    head, *body = rows
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in body:
        yield f"| {' | '.join(row)} |"


# ---- options ----


def option_tables() -> Iterator[str]:
    """Yields one table for each group of options."""
    for name, group in _groups().items():
        commands = dict.fromkeys(command for found in group.values() for command in found)
        yield f"\n**{name}** ({', '.join(commands)})\n"
        rows = [_option_row(found) for found in group.values()]
        yield from _table(("flag", "default", "meaning"), *rows)


def _groups() -> dict[str, dict[str, Found]]:
    groups: dict[str, dict[str, Found]] = {}
    for command, config in COMMANDS.items():
        for option in options(config()):
            group = groups.setdefault(option.group, {})
            group.setdefault(option.flag, {})[command] = option
    return groups


def _option_row(found: Found) -> tuple[str, str, str]:
    option = next(iter(found.values()))
    short = f", `{option.metadata['short']}`" if "short" in option.metadata else ""
    negated = f", `--no-{option.key}`" if option.kind is bool else ""
    choices = option.metadata.get("choices")
    known = option.metadata.get("known")
    meaning = option.metadata["help"] + (f" (one of: {', '.join(choices)})" if choices else "")
    meaning += f" (built in: {', '.join(known)})" if known else ""
    return f"`{option.flag}`{short}{negated}", _defaults(found), meaning.replace("|", "\\|")


def _defaults(found: Found) -> str:
    shown = {command: _default(option) for command, option in found.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{command}: {value}" for command, value in shown.items())


def _default(option: Option) -> str:
    if option.kind is bool:
        return "on" if option.default else "off"
    return "–" if option.default is None else f"`{option.default}`"


# ---- request parameters ----


def parameter_table() -> Iterator[str]:
    head = ("field", "type", "default", "range and meaning", "from", "gRPC")
    return _table(head, *(_parameter_row(each) for each in PARAMETERS.values()))


def _from_reference(text: str) -> str:
    """Links that are written as on the clients' page, as they are in the folder of the tables."""
    text = text.replace("](#", "](clients.md#")
    return re.sub(r"\]\((?=[\w-]+\.md)", "](../", text)


def unsupported_fields() -> Iterator[str]:
    refused, left_out, accepted = (
        ", ".join(f"`{name}`" for name in names)
        for names in (UNSUPPORTED, LEFT_OUT, sorted(WITHOUT_EFFECT))
    )
    yield f"Refused: {refused}.\n"
    yield f"Left out: {left_out}.\n"
    yield f"Accepted without effect: {accepted}."


def _parameter_row(each: Parameter) -> tuple[str, ...]:
    name = f"`{each.name}`" + ("" if each.http else " (gRPC)")
    meaning = _from_reference("; ".join(filter(None, (_range(each), each.meaning))))
    number = "–" if each.number is None else str(each.number)
    return name, each.kind, each.default or _sampling_default(each), meaning, each.origin, number


def _sampling_default(each: Parameter) -> str:
    value = getattr(SamplingParams(), each.name)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, (int, float)) else "–"


def _range(each: Parameter) -> str:
    unit = "tokens" if each.kind is ParamType.TOKEN_ID_LISTS else "characters"
    values, length = "", f"1 … {each.longest} {unit}" if each.longest else ""
    if each.low is not None and each.high is not None:
        low, high = _bound(each.low), _bound(each.high)
        values = f"({low}, {high}]" if each.positive else f"{low} … {high}"
    if not each.most:
        return values or length
    count = f"{each.fewest} … {each.most}" if each.fewest else f"up to {each.most}"
    return ", each ".join(filter(None, (count, values or length)))


def _bound(value: float) -> str:
    power = (int(value) + 1).bit_length() - 1 if value > 0 else int(-value).bit_length() - 1
    raised = str(power).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    if power > 16 and value == 2**power - 1:
        return f"2{raised}−1"
    if power > 16 and value == -(2**power):
        return f"−2{raised}"
    return f"{value:g}".replace("-", "−")


# ---- errors ----


def error_table() -> Iterator[str]:
    """Yields the kinds of errors that a client can get."""
    rows = [
        (
            f"`{cls.__name__}`",
            f"[`{cls.default_code}`](#{cls.default_code.lower()})",
            str(cls.http_status),
            f"`{error_body(cls(''))['error']['type']}`",
            f"`{status.name}`",
            "yes" if cls.default_retryable else "no",
        )
        for cls, status in sorted(STATUS.items(), key=lambda item: item[0].http_status)
    ]
    head = (
        "kind",
        "code, if there is no better one",
        "HTTP",
        "`type`",
        "gRPC",
        "another try may help",
    )
    return _table(head, *rows)


# ---- commands ----


def command_table() -> Iterator[str]:
    rows = [
        (f"`pdserve {name}`", summary)
        for group in PROGRAMS.values()
        for name, (_, summary) in group.items()
    ]
    rows += [(f"`pdserve bench {name}`", summary) for name, (_, summary) in BENCHES.items()]
    return _table(("command", "what"), *rows)


def flag_table(parser: ArgumentParser) -> Iterator[str]:
    rows = []
    for action in parser._actions[1:]:  # but --help
        names = ", ".join(f"`{name}`" for name in action.option_strings or [action.metavar])
        default = "–" if action.default in (None, False) else f"`{action.default}`"
        rows.append((names, default, action.help or ""))
    return _table(("flag", "default", "meaning"), *rows)


# ---- metrics ----


def router_metrics() -> Iterator[str]:
    metrics, registry = RouterMetrics(), Registry(RoutingConfig())
    # Nothing is asked of it but its queue's length, so it needs no tokenizer.
    pipeline = Pipeline(RoutingConfig(), registry, None, Channels(), metrics)  # type: ignore[arg-type]
    metrics.registry.register(PipelineCollector(pipeline))
    metrics.registry.register(AdaptersCollector(ServedAdapters(), 1))
    HTTPMetrics(metrics.registry)
    return _metric_table(metrics.registry, ROUTER_NAMES)


def node_metrics() -> Iterator[str]:
    registry = NodeMetrics().registry
    pool = KVPool([KVGroup((0,), 1, 1)], [1], block_size=1)
    registry.register(SchedulerCollector([Scheduler(pool, SchedulerConfig(), ())]))
    registry.register(UtilisationCollector([]))
    registry.register(LentCoresCollector("/dev/null", []))
    return _metric_table(registry, NODE_NAMES)


def _metric_table(registry: CollectorRegistry, vllm: Mapping[str, Any]) -> Iterator[str]:
    metrics = sorted(registry.collect(), key=lambda metric: metric.name)
    metrics = [metric for metric in metrics if not metric.name.startswith("process_")]
    rows = [
        (
            f"`{metric.name}{_suffix(metric)}`",
            metric.type,
            ", ".join(f"`vllm:{each}{_suffix(metric)}`" for each in vllm.get(_bare(metric), ())),
            metric.documentation,
        )
        for metric in metrics
    ]
    return _table(("name", "type", "vLLM's", "meaning"), *rows)


def _suffix(metric: Metric) -> str:
    return "_total" if metric.type == "counter" else ""


def _bare(metric: Metric) -> str:
    return metric.name.removeprefix(PREFIX)


def alert_table() -> Iterator[str]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rows = [_alert_row(rule) for group in groups for rule in group["rules"]]
    return _table(("alert", "severity", "what is", "what to do first"), *rows)


def _alert_row(rule: Mapping[str, Any]) -> tuple[str, ...]:
    notes = rule["annotations"]
    what = re.sub(r"{{ \$labels\.(\w+) }}", r"*\1*", notes["summary"])
    what = re.sub(r"{{ \$value .*?}}", "*value*", what)
    link = os.path.relpath(notes["runbook"].removeprefix("docs/"), "reference")
    first = f"{notes['description']} [More]({link})."
    return f"`{rule['alert']}`", rule["labels"]["severity"], what, first


# ---- states ----


def _state_table(table: Mapping[Any, Mapping[Any, Any]], events: type[StrEnum]) -> Iterator[str]:
    head = ("state", *(f"`{event}`" for event in events))
    rows = [(f"**{state}**", *(_cell(row.get(e)) for e in events)) for state, row in table.items()]
    return _table(head, *rows)


def _cell(step: tuple[Any, tuple[Any, ...]] | None) -> str:
    if step is None:
        return ""
    state, actions = step
    return f"→ {state}" + (f": {', '.join(actions)}" if actions else "")


def _events_of(table: Mapping[Any, Mapping[Any, Any]]) -> type[StrEnum]:
    return type(next(event for row in table.values() for event in row))


# ---- models ----


def model_table() -> Iterator[str]:
    rows = [(f"`{name}`", row["class"], *shown(row)) for name, row in known_models().items()]
    yield from _table(("model type", "class", "path", "KV, or why not"), *rows)


# ---- misdeployments ----


def misdeployment_table() -> Iterator[str]:
    rows = [(each.wrong, f"`{each.says}`") for each in MISDEPLOYMENTS]
    yield from _table(("what is wrong", "what `doctor` says"), *rows)


def absent_table() -> Iterator[str]:
    rows = [
        (each.what, ", ".join(f"`{path}`" for path in each.paths), each.instead or "–")
        for each in ABSENT
    ]
    yield from _table(("not supported", "paths, and all below them", "instead"), *rows)


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "models": model_table,
    "misdeployments": misdeployment_table,
    "options": option_tables,
    "vllm-same": vllm_tables.same,
    "vllm-differences": lambda: _table(*vllm_tables.differences()),
    "vllm-called": lambda: _table(*vllm_tables.called()),
    "vllm-without-effect": lambda: _table(*vllm_tables.without_effect()),
    "vllm-absent": lambda: _table(*vllm_tables.absent()),
    "vllm-variables": lambda: _table(*vllm_tables.variables()),
    "sglang": vllm_tables.sglang,
    "errors": error_table,
    "commands": command_table,
    "chat": lambda: flag_table(chat.make_parser()),
    "top": lambda: flag_table(top.make_parser()),
    "trace": lambda: flag_table(trace.make_parser()),
    "parameters": parameter_table,
    "unsupported": unsupported_fields,
    "absent": absent_table,
    "router-metrics": router_metrics,
    "node-metrics": node_metrics,
    "alerts": alert_table,
    "sink": lambda: _state_table(SINK, _events_of(SINK)),
    "source": lambda: _state_table(SOURCE, _events_of(SOURCE)),
}


if __name__ == "__main__":
    for page in pages():
        page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")
