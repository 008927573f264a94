"""Merges the reports of several workers into those of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pdserve.common.obs.exposition import exposed

_NODES = "pdserve_nodes"
_DEATHS = "pdserve_router_worker_deaths"
_COUNTS = ("counter", "histogram", "summary")
# Gauges that are summed over the workers; other gauges are equal in all workers.
_SHARED_OUT = (
    "num_requests_running", "num_requests_waiting", "waiting_by_reason", "_memory_bytes", "_fds",
)  # fmt: skip
# The least counts: one worker cannot serve; the first one's birth.
_WORST = ("ready", "_created", "_start_time_seconds")


# ---- /metrics ----


def merged_metrics(texts: Iterable[str]) -> bytes:
    """Returns one exposition of several in Prometheus's text format: counters, histograms and
    parts are added up; of what all workers see, the most counts. Nodes are as the worker says that
    knows most: one that two workers have in different states is still one."""
    families: dict[str, Metric] = {}
    for text in texts:
        for metric in text_string_to_metric_families(text):
            if (known := families.get(metric.name)) is None:
                families[metric.name] = metric
            elif metric.name == _NODES:
                families[metric.name] = max(known, metric, key=_total)
            else:
                known.samples = _merged(known, metric)
    return exposed(_Families(list(families.values())))


def counts_of_dead(text: str) -> str:
    """Returns the counters and histograms of a worker before it died, and counts its death."""
    kept = [each for each in text_string_to_metric_families(text) if each.type in _COUNTS]
    for metric in kept:
        if metric.name == _DEATHS:
            metric.samples = [
                sample._replace(value=sample.value + sample.name.endswith("_total"))
                for sample in metric.samples
            ]
    return exposed(_Families(kept)).decode()


def num_nodes(text: str) -> int:
    """Returns how many nodes are registered, in whatever state, by an exposition."""
    families = text_string_to_metric_families(text)
    return sum(_total(each) for each in families if each.name == _NODES)


def _total(metric: Metric) -> int:
    return sum(int(sample.value) for sample in metric.samples)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _merged(one: Metric, other: Metric) -> list[Any]:
    """Returns the samples of both, one of each name and labels, in the first one's order."""
    join = _join(one)
    found = {_key(sample): sample for sample in one.samples}
    for sample in other.samples:
        known = found.get(key := _key(sample))
        value = sample.value if known is None else join((known.value, sample.value))
        found[key] = sample._replace(value=value)
    return list(found.values())


def _key(sample: Any) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


def _join(metric: Metric) -> Callable[[Iterable[float]], float]:
    if metric.type in _COUNTS or metric.name.endswith(_SHARED_OUT):
        return sum
    return min if metric.name.endswith(_WORST) else max


# ---- /v1/cluster ----

_OF_EACH = ("in_flight", "prefill_tokens", "prompt_tokens", "cached_tokens")  # of a node
_FLOW = ("transfers", "bytes", "seconds")
_LOAD = ("running", "waiting")
_WORKER = ("pid", "ready", "reason", *_LOAD, "places", "uptime_seconds")

View = dict[str, Any]


def merged_clusters(views: Sequence[View]) -> View:
    """Returns one `/v1/cluster` of the workers' (`Pipeline.cluster`), in which the first one's
    judgement of nodes and links stands, and `workers` has each one's own load."""
    first = views[0]
    return {
        **first,
        **{name: sum(view[name] for view in views) for name in _LOAD},
        "places": max(view["places"] for view in views),
        **_prediction(views),
        "routers": max(1, max(view["routers"] for view in views) + 1 - len(views)),
        "nodes": _nodes(views),
        "flows": _added(views, "flows", _FLOW),
        "broken_links": list({_pair(link): link for link in _all(views, "broken_links")}.values()),
        "refused": _refused(views),
        "workers": [{name: view[name] for name in _WORKER} for view in views],
    }


def _prediction(views: Sequence[View]) -> View:
    """Returns the longest predicted TTFT, and the age of its measurement."""
    names = ("first_token_seconds", "first_token_measured_ago")
    longest = max(views, key=lambda view: view[names[0]] or 0.0)
    return {name: longest[name] for name in names}


def _all(views: Sequence[View], name: str) -> Iterator[View]:
    return (each for view in views for each in view[name])


def _pair(link: View) -> tuple[str, str]:
    return link["prefill"], link["decode"]


def _nodes(views: Sequence[View]) -> list[View]:
    """Merges the workers' views. Load that no worker has on a node belongs to other routers."""
    found: dict[str, View] = {}
    for node in _all(views, "nodes"):
        node_id = node["node_id"]
        if (known := found.get(node_id)) is None:
            found[node_id] = {**node, "others": node["others"] + node["in_flight"]}
        else:
            known |= {name: known[name] + node[name] for name in _OF_EACH}
    for node in found.values():
        node["others"] = max(0, node["others"] - node["in_flight"])
    return list(found.values())


def _added(views: Sequence[View], name: str, parts: Sequence[str]) -> list[View]:
    found: dict[tuple[str, str], View] = {}
    for each in _all(views, name):
        known = found.get(_pair(each))
        more = {} if known is None else {part: known[part] + each[part] for part in parts}
        found[_pair(each)] = {**each, **more}
    return list(found.values())


def _refused(views: Sequence[View]) -> list[View]:
    """Returns the refusals of all: a node asks every worker, so that the most counts."""
    found: dict[tuple[str, str], View] = {}
    for each in sorted(_all(views, "refused"), key=lambda each: int(each["count"])):
        found[each["reason"], each["port"]] = each
    return list(found.values())


# ---- /v1/cluster/history ----

_LATE = 3  # seconds for which a worker's missing sample may still come
_SAME_EVENT = 15.0  # seconds between the notes of one event by several workers


def merged_histories(histories: Sequence[View]) -> View:
    """Returns one history of the workers' (`History.since`): what each counted is added up, by
    the second. A second that some worker has not reached yet is left out."""
    newest = [each["samples"][-1]["at"] for each in histories if each["samples"]]
    until = min((at for at in newest if at >= max(newest) - _LATE), default=0)
    found: dict[int, View] = {}
    for sample in chain.from_iterable(each["samples"] for each in histories):
        at = sample["at"]
        if at <= until:
            found[at] = _sum(found[at], sample) if at in found else sample
    events = _once(chain.from_iterable(each["events"] for each in histories))
    return {
        **histories[0],
        "served": sum(each["served"] for each in histories),
        "samples": [found[at] for at in sorted(found)],
        "events": events,
    }


def _sum(one: View, other: View) -> View:
    total: View = {"at": one["at"]}
    for name in one.keys() - {"at"}:
        if isinstance(one[name], dict):
            total[name] = dict(Counter(one[name]) + Counter(other[name]))
        elif name == "nodes_tokens":  # each worker hears of all
            total[name] = max(one[name], other[name])
        else:
            total[name] = one[name] + other[name]
    return total


def _once(events: Iterable[View]) -> list[View]:
    """Returns the events in order; one that several workers have noted is there once."""
    last: dict[str, float] = {}
    found = []
    for each in sorted(events, key=lambda each: float(each["at"])):
        if each["own"] or each["at"] - last.get(each["text"], float("-inf")) > _SAME_EVENT:
            last[each["text"]] = each["at"]
            found.append(each)
    return found
