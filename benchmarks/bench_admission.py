"""Compares admission policies on traces, at loads beyond the cluster's capacity.

    python benchmarks/bench_admission.py [--trace FILE ...] [--json FILE] [--plot FILE]

Runs on a virtual clock. The admission is the production object, and nodes share their steps among
prompts like production nodes (`share_budget`). There are no prefix caches. A load of 1 is the trace
sped up until its prompts use all of the prefill nodes' capacity; the decode nodes could serve a
little more.

    fifo     every request goes to the nodes immediately
    static   limits on concurrency and queue, and a time-out: the default without SLOs
    tuned    the same, with the best limits for this trace and load
    slo      --slo-ttft and --slo-itl

An answer is good if its TTFT is within --slo-ttft (or twice its prompt's time alone, if that is
longer) and its mean ITL within --slo-itl. Goodput is good answers per second. A request starves if
it gets neither a first token nor a refusal within 30 s. Eight API keys send the trace.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plots import lines
from pdserve.common.core.errors import Overloaded
from pdserve.common.engine.fair_queue import share_budget
from pdserve.router.requests.admission import Admission, Ask
from pdserve.router.requests.queue_bounds import Batch
from pdserve.router.requests.slo import NO_SLO, SLO
from pdserve.simulate.traces import read_trace

TRACES = Path(__file__).parent / "traces"
PREFILL_NODES, RATE, BUDGET, STEP = 4, 10_000.0, 2048, 0.005  # tokens per second, per step; seconds
DECODE_STEP, DECODE_CHOICE = 0.010, 0.0005  # seconds per step, and per choice in it
HAND_OFF = 0.010  # seconds
QUEUE_TIMEOUT = 30.0  # seconds
KEYS = 8
WAYS = ("fifo", "static", "tuned", "slo")
PLACES, QUEUES = (8, 16, 32, 64, 128, 256), (0, 8, 32, 128)  # of `tuned`
MOST = 10**9


@dataclass(frozen=True, slots=True)
class Request:
    time: float  # seconds
    prompt: int  # tokens
    output: int
    key: str


@dataclass(slots=True, eq=False)
class Served:
    """A request and its outcome."""

    request: Request
    ask: Ask
    left: int = 0  # prompt tokens to compute
    refused_after: float | None = None  # seconds
    first: float = 0.0  # time of the first token
    last: float = 0.0

    @property
    def ttft(self) -> float | None:
        return self.ask.ttft

    @property
    def itl(self) -> float:
        return (self.last - self.first) / max(1, self.request.output - 1)


@dataclass(frozen=True, slots=True)
class Way:
    """An admission policy with its limits."""

    places: int = 256  # --max-concurrent-requests
    queue: int = 256  # --max-queued-requests
    patience: float = QUEUE_TIMEOUT
    share: float = 0.75  # --max-client-share
    slo: SLO = NO_SLO


FIFO = Way(MOST, MOST, math.inf, 1.0)


class Nodes:
    """Prefill and decode nodes, and the admission before them."""

    def __init__(self, way: Way, decodes: int) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._patience = way.patience
        self.admission = Admission(
            *(way.places, way.queue, way.patience, way.share),
            slo=way.slo,
            prefill_backlog=way.slo.ttft and way.slo.ttft / 4,
            clock=lambda: self.now,
        )
        self.admission.cluster(PREFILL_NODES, decodes, 0)
        self._prompts: list[list[Served]] = [[] for _ in range(PREFILL_NODES)]
        self._decoding: list[list[tuple[int, int, Served]]] = [[] for _ in range(decodes)]
        self._steps = [0] * decodes
        self._prefill_steps = [0] * PREFILL_NODES
        self._busy = [False] * PREFILL_NODES

    def run(self, requests: Sequence[Request]) -> list[Served]:
        found = []
        for request in requests:
            ask = Ask(
                batch=Batch(request.key, request.prompt),
                tokens=request.prompt,
                prompt_tokens=request.prompt,
            )
            found.append(Served(request, ask, request.prompt))
            self._at(request.time, lambda each=found[-1]: self._arrives(each))  # type: ignore[misc]
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return found

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _arrives(self, each: Served) -> None:
        each.ask.tell = lambda error: self._told(each, error)
        try:
            self.admission.enter(each.ask)
        except Overloaded as error:
            self.admission.leave(each.ask)
            self._told(each, error)
        if each.ask.waits:
            patience = min(each.ask.deadline, self._patience)
            if patience < math.inf:
                self._at(self.now + patience, lambda: self._gives_up(each))

    def _gives_up(self, each: Served) -> None:
        if each.ask.waits:
            self.admission.leave(each.ask)
            each.refused_after = self.now - each.request.time

    def _told(self, each: Served, error: Overloaded | None) -> None:
        if error is not None:
            each.refused_after = self.now - each.request.time
            return
        node = min(range(PREFILL_NODES), key=lambda i: sum(p.left for p in self._prompts[i]))
        self._prompts[node].append(each)
        if not self._busy[node]:
            self._busy[node] = True
            self._at(self.now, lambda: self._prefill(node))

    def _prefill(self, node: int) -> None:
        prompts = self._prompts[node]
        shares = share_budget([each.left for each in prompts], BUDGET, self._prefill_steps[node])
        self._prefill_steps[node] += 1
        pairs = list(zip(prompts, shares, strict=True))
        self._at(self.now + STEP + sum(shares) / RATE, lambda: self._prefilled(node, pairs))

    def _prefilled(self, node: int, pairs: list[tuple[Served, int]]) -> None:
        for each, share in pairs:
            each.left -= share
            if not each.left:
                self._prompts[node].remove(each)
                each.first = self.now
                self.admission.first_token(each.ask)
                self._at(self.now + HAND_OFF, lambda each=each: self._decode(each))  # type: ignore[misc]
        if self._prompts[node]:
            self._prefill(node)
        else:
            self._busy[node] = False

    def _decode(self, each: Served) -> None:
        node = min(range(len(self._decoding)), key=lambda i: len(self._decoding[i]))
        running = self._decoding[node]
        ends = self._steps[node] + max(1, each.request.output - 1)
        heapq.heappush(running, (ends, next(self._numbers), each))
        if len(running) == 1:
            self._at(self.now, lambda: self._step(node))

    def _step(self, node: int) -> None:
        running = self._decoding[node]
        steps = max(1, min(running[0][0] - self._steps[node], 8))  # at once, to simulate less
        seconds = steps * (DECODE_STEP + DECODE_CHOICE * len(running))
        self._at(self.now + seconds, lambda: self._stepped(node, steps))

    def _stepped(self, node: int, steps: int) -> None:
        self._steps[node] += steps
        running = self._decoding[node]
        while running and running[0][0] <= self._steps[node]:
            each = heapq.heappop(running)[2]
            each.last = self.now
            each.ask.generated, each.ask.itl = each.request.output, each.itl
            self.admission.leave(each.ask)
        if running:
            self._step(node)


# ---- traces ----


def read(path: Path, most: int) -> list[Request]:
    found = enumerate(read_trace(path, most))
    return [
        Request(each.time, each.num_tokens, max(1, each.output_tokens), f"key {number % KEYS}")
        for number, each in found
    ]


def at_load(requests: Sequence[Request], load: float) -> list[Request]:
    begin, tokens = requests[0].time, sum(each.prompt for each in requests)
    scale = tokens / (PREFILL_NODES * RATE) / (requests[-1].time - begin) / load
    return [
        Request((each.time - begin) * scale, each.prompt, each.output, each.key)
        for each in requests
    ]


def decode_nodes(requests: Sequence[Request], itl: float) -> int:
    """Returns the number of decode nodes that serve a load of 1.25 within the ITL."""
    choices = (itl - DECODE_STEP) / DECODE_CHOICE
    seconds = requests[-1].time - requests[0].time
    return math.ceil(1.25 * sum(each.output for each in requests) / seconds * itl / choices)


# ---- what is compared ----


def measure(requests: Sequence[Request], way: Way, slo: SLO, decodes: int) -> dict[str, Any]:
    served = Nodes(way, decodes).run(requests)
    seconds = requests[-1].time or 1.0
    answered = [each for each in served if each.refused_after is None]
    good = [each for each in answered if _good(each, slo)]
    times = sorted(each.ttft for each in answered if each.ttft is not None)
    off = sorted(
        abs(each.ttft / each.ask.predicted - 1)
        for each in answered
        if each.ask.predicted and each.ttft is not None
    )
    waits = [each.ttft if each.refused_after is None else each.refused_after for each in served]
    return {
        "goodput": round(len(good) / seconds, 3),
        "good_tokens_s": round(sum(each.request.prompt for each in good) / seconds),
        "good": len(good),
        "late": len(answered) - len(good),
        "refused": len(served) - len(answered),
        "starved": sum(wait is None or wait > QUEUE_TIMEOUT for wait in waits),
        "ttft_p50": round(times[len(times) // 2], 2) if times else None,
        "ttft_p99": round(times[int(0.99 * len(times))], 2) if times else None,
        "predicted_off_p50": round(off[len(off) // 2], 3) if off else None,
    }


def _good(each: Served, slo: SLO) -> bool:
    alone = each.request.prompt / RATE + STEP * math.ceil(each.request.prompt / BUDGET)
    ttft = each.ttft
    return ttft is not None and ttft <= slo.deadline(alone) and each.itl <= (slo.itl or math.inf)


def compare(
    name: str, trace: Sequence[Request], loads: Sequence[float], slo: SLO
) -> Iterator[dict[str, Any]]:
    """Yields a row per load and policy."""
    decodes = decode_nodes(at_load(trace, 1.0), slo.itl or math.inf)
    for load in loads:
        requests = at_load(trace, load)
        found = {
            "fifo": measure(requests, FIFO, slo, decodes),
            "static": measure(requests, Way(), slo, decodes),
            "tuned": tuned(requests, slo, decodes),
            "slo": measure(requests, Way(slo=slo), slo, decodes),
        }
        for way, row in found.items():
            yield {"trace": name, "load": load, "way": way, **row}


def tuned(requests: Sequence[Request], slo: SLO, decodes: int) -> dict[str, Any]:
    """Returns the row of the limits with the best goodput."""
    ways = (Way(places, queue) for places in PLACES for queue in QUEUES)
    rows = (measure(requests, way, slo, decodes) for way in ways)
    return max(rows, key=lambda row: float(row["goodput"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    lines += [f"| {' | '.join('–' if v is None else str(v) for v in r.values())} |" for r in rows]
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        points = panels.setdefault(row["trace"], {}).setdefault(row["way"], [])
        points.append((row["load"], row["goodput"]))
    lines(path, panels, "load over capacity", "good answers per second")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        action="append",
        help="as in pdserve simulate (default: the samples here)",
    )
    add("--requests", type=int, default=3000, help="most requests of each trace")
    add("--loads", default="1,2,3", help="loads as multiples of the capacity")
    add("--slo-ttft", type=float, default=2.0)
    add("--slo-itl", type=float, default=0.05)
    add("--json", help="file for the rows")
    add("--plot", type=Path, help="file for a picture")
    args = parser.parse_args(argv)
    loads = [float(word) for word in args.loads.split(",")]
    rows: list[dict[str, Any]] = []
    for path in args.trace or sorted(TRACES.glob("*.csv.gz")):
        trace = read(path, args.requests)
        name = path.name.partition(".")[0]
        rows += compare(name, trace, loads, SLO(args.slo_ttft, args.slo_itl))
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
