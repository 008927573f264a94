"""`pdserve calibrate`: measures a prefill and a decode node of this host, and writes what
`pdserve simulate` needs.

Prompts go through a real cluster, one at a time. Their timelines give the duration of each part:
steps with their overheads, and the hand-off with its commit and digests. At the end of each turn
both nodes compute at once, which slows both down if they share caches and memory.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle, islice, product
from math import ceil
from pathlib import Path
from typing import Any

from pdserve.cli.host_share import share_host, visible_gpus
from pdserve.common.config.engine import EngineConfig, ParallelConfig
from pdserve.common.config.options import changed
from pdserve.common.config.shared import counts
from pdserve.common.config.simulate import CalibrateConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.core.host import cpu_name, usable_cores
from pdserve.common.core.waits import progress
from pdserve.offline.llm import LLM
from pdserve.offline.outputs import RequestOutput
from pdserve.offline.params import SamplingParams
from pdserve.simulate.calibration import LEAST, MOST_RATIO, Calibration, Line, Scatter, drawn
from pdserve.simulate.kept import Found, Kept, Point, Samples, merged

VOCABULARY = range(3, 500)  # ids that every model has
ONE_OF_EACH: dict[str, Any] = {
    "prefill": 1,
    "decode": 1,
    "log_level": "warning",
    "peak_tflops": 1.0,  # not measured, since only metrics need it
    "peak_bandwidth": 1.0,
    "share_cores": "off",  # no idle peer's cores, which a busy cluster would not have
}
SHORT, LONG = 5, 21  # tokens of answers, whose durations differ by 16 steps
BESIDE = 3  # prompts computed while the decode node computes
MOST_BESIDE = 256  # tokens of such an answer, at most
QUANTILES = 20  # of scatter, besides the least
_OWN = ("output", "repetitions", "batch", "context", "chunk", "cached")

Turn = Mapping[Point, Found]
Taken = Iterator[tuple[tuple[Any, ...], float]]
Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(
        CalibrateConfig,
        prog="pdserve calibrate",
        description="Start a prefill and a decode node here, measure how long their steps and the "
        "hand-off take, and write the durations to --output for pdserve simulate. Nothing else "
        "should run on this host meanwhile.",
        argv=argv,
    )
    if config.output is None or not Path(config.output).resolve().parent.is_dir():
        raise ConfigError("--output must name a file in a folder that exists")
    points, output = Points(config), Path(config.output)
    kept = Kept(output.with_name(f"{output.name}.part"), _kept_options(config))
    with progress("pdserve calibrate") as say:
        try:
            found = _measured(points, config, kept, say)
        except BaseException:  # also an interruption
            _keep(points, config, kept, output)
            raise
    found.write(output)
    kept.remove()
    print(
        json.dumps({"prefill": found.prefill, "decode": found.decode, "transfer": found.transfer})
    )
    return 0


class Points:
    """The points to measure: checked lists of counts."""

    def __init__(self, config: CalibrateConfig) -> None:
        self.batch = counts("--batch", config.batch)
        self.context = counts("--context", config.context)
        self.chunk = counts("--chunk", config.chunk)
        self.cached = counts("--cached", config.cached, least=0)

    def plan(self, has_neighbour: bool = True) -> list[Point]:
        """Returns what a turn measures, in order."""
        alone = [
            *(("prefill", *each) for each in product(self.chunk, self.cached)),
            *(("decode", *each) for each in product(self.batch, self.context)),
        ]
        batches = dict.fromkeys((min(self.batch), max(self.batch))) if has_neighbour else ()
        return [*alone, *(("beside", batch, min(self.context)) for batch in batches)]


def _kept_options(config: CalibrateConfig) -> dict[str, Any]:
    """Returns the options that measurements depend on."""
    given = {each.name: each.default for each in changed(config)}
    points = {name: getattr(config, name) for name in ("batch", "context", "chunk", "cached")}
    rest = {name: given[name] for name in given if name not in ("output", "repetitions")}
    return {**rest, **points, "cpu": cpu_name()}


def _measured(points: Points, config: CalibrateConfig, kept: Kept, say: Say) -> Calibration:
    """Measures what is not kept, with a cluster of its own."""
    if len(turns := kept.whole(points.plan())) >= config.repetitions:
        return calibration(turns[: config.repetitions], config)
    if count := kept.num_points():
        say(f"continuing an interrupted run; points measured before: {count}")
    say("starting a prefill and a decode node")
    given = {each.name: each.default for each in changed(config) if each.name not in _OWN}
    with LLM(**ONE_OF_EACH, **given) as llm:
        return measure(llm, points, config, kept, say)


def _keep(points: Points, config: CalibrateConfig, kept: Kept, output: Path) -> None:
    """Says what an interrupted run keeps; writes the calibration if a turn is whole."""
    if not (count := kept.num_points()):
        return
    told = f"measured points so far: {count}"
    if turns := kept.whole(points.plan()):
        calibration(turns, config).write(output)
        told += f"; {output} has {len(turns)} of {config.repetitions} repetitions"
    print(
        f"pdserve calibrate: {told}; run the same command to continue", file=sys.stderr, flush=True
    )


def measure(
    llm: LLM,
    points: Points,
    config: CalibrateConfig,
    kept: Kept | None = None,
    say: Say = lambda text: None,
) -> Calibration:
    """Measures all points in turns, except the kept ones, after one turn that does not count."""
    turns = islice(measured(llm, points, kept=kept, say=say), 1, config.repetitions + 1)
    return calibration(list(turns), config)


def measured(
    llm: LLM,
    points: Points,
    both: int = 0,
    kept: Kept | None = None,
    say: Say = lambda text: None,
) -> Iterator[Samples]:
    """Measures all points once for each `next`, except the kept ones; the first turn, with cold
    nodes, is not kept. `both`: the number of nodes of both roles, if the cluster has them instead
    of a prefill and a decode node. Calls `say` with what begins."""
    ask = _Asks(llm, hands_over=not both)
    kept = Kept() if kept is None else kept
    plan = points.plan(has_neighbour=both != 1)
    for number in count():
        turn, cold = kept.turn(number - 1) if number else {}, not number
        name = "warm-up" if cold else f"repetition {number}"
        ask(1, 0)  # does not count: the nodes were idle
        for point in plan:
            if point not in turn:
                kind, one, two = point
                say(f"{name}: {_DOING[kind].format(one, two)}")
                found = list(_KINDS[kind](ask, points, (one, two), turn))
                turn[point] = found
                if not cold:
                    kept.add(number - 1, point, found)
        yield merged(turn)


def calibration(turns: Sequence[Samples], config: CalibrateConfig) -> Calibration:
    """Returns the medians of all turns, and how far measurements were from them."""
    merged: Samples = {}
    for name, found in ((name, each[name]) for each in turns for name in each):
        merged.setdefault(name, []).extend(found)
    of = {name: statistics.median(found) for name, found in merged.items()}
    decode = {name[1:]: max(LEAST, of[name]) for name in of if name[0] == "decode"}
    prefill = {name[1:]: of[name] for name in of if name[0] == "prefill"}
    moved = [(name[1], of[name]) for name in of if name[0] == "transfer"]
    transfer = _line(moved) if moved else [(0, 0.0)]
    short = {name[1:]: of[name] for name in of if name[0] == "short"}
    over = {  # of each kind of step and work: measured over the median alone
        "prefill": _ratios(merged, "prefill", lambda *point: prefill[point]),
        "prefill_beside": _ratios(merged, "prefill beside", lambda *point: prefill[point]),
        "decode": _ratios(merged, "long", lambda *point: of["long", *point]),
        "decode_beside": _ratios(merged, "decode beside", lambda *point: decode[point]),
        "transfer": _ratios(merged, "transfer", Line(dict(transfer))),
        "transfer_beside": _ratios(merged, "transfer beside", Line(dict(transfer))),
        "router": _ratios(merged, "router", lambda: of["router",]),
        "router_beside": _ratios(merged, "router beside", lambda: of["router",]),
        "reserve": _ratios(merged, "reserve", lambda: of["reserve",]),
        "reserve_beside": _ratios(merged, "reserve beside", lambda: of["reserve",]),
    }
    over = {name: found for name, found in over.items() if found}
    return Calibration(
        model=str(config.model.model or "the embedded model"),
        device=config.device if config.device != "auto" else cpu_name(),
        prefill=[(*name, seconds) for name, seconds in prefill.items()],
        decode=[(*name, seconds) for name, seconds in decode.items()],
        transfer=transfer,
        kv_bytes_per_token=of.get(("kv_bytes_per_token",), 0.0),
        router_s=of["router",],
        reserve_s=of.get(("reserve",), 0.0),
        answer_s=max(0.0, statistics.median(short[n] - (SHORT - 1) * decode[n] for n in short)),
        cores=_cores(config),
        **{
            name: min(MOST_RATIO, max(1.0, statistics.median(over[name])))
            for name in over
            if "beside" in name
        },
        scatter=Scatter(**{name: _quantiles(found) for name, found in over.items()}),
    )


def _ratios(samples: Samples, kind: str, alone: Callable[..., float]) -> list[float]:
    """Returns the samples of this kind, each over what `alone` returns for its point."""
    return [
        max(LEAST, seconds) / max(LEAST, alone(*name[1:]))
        for name, found in samples.items()
        if name[0] == kind
        for seconds in found
    ]


def _quantiles(ratios: Sequence[float]) -> list[float]:
    """Returns quantiles of the ratios over their median."""
    ascending, middle = sorted(ratios), statistics.median(ratios)
    shares = (number / QUANTILES for number in range(QUANTILES + 1))
    found = (round(drawn(ascending, share) / middle, 4) for share in shares)
    return [min(MOST_RATIO, max(0.0001, each)) for each in found]


def _cores(config: CalibrateConfig) -> int:
    """Returns the cores of a node; 0: it has a GPU."""
    if gpus := visible_gpus(config.device):
        return 0
    engine = EngineConfig(parallel=ParallelConfig(cpu_threads=config.cpu_threads))
    both = [engine.parallel] * 2
    return share_host(engine, both, gpus=gpus, cores=usable_cores())[0].num_threads


def _prefill(ask: _Asks, points: Points, point: tuple[int, int], turn: Turn) -> Taken:
    tokens, cached = point
    output = ask(tokens, cached)
    line = output.timeline
    yield ("prefill", tokens, cached), line["prefill_seconds"]
    yield from _around(line)
    if ask.hands_over:
        moved = len(output.prompt_token_ids) - line["decode_cached_tokens"]
        yield ("kv_bytes_per_token",), line["transfer_bytes"] / moved


def _decode(ask: _Asks, points: Points, point: tuple[int, int], turn: Turn) -> Taken:
    batch, context = point
    short, long = (_decoded(ask(1, context - 1, batch, count)) for count in (SHORT, LONG))
    yield ("decode", *point), (long - short) / (LONG - SHORT)
    yield ("long", *point), long
    if batch == min(points.batch):
        yield ("short", *point), short


def _beside(ask: _Asks, points: Points, point: tuple[int, int], turn: Turn) -> Taken:
    """Measures prompts while the decode node computes steps of `point`, sequences and context, and
    those steps. The first and the last prompt run partly alone, and do not count."""
    (batch, context), cached = point, min(points.cached)
    steps = _steps_beside(points, merged(turn))
    found: list[tuple[int, dict[str, Any]]] = []
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(ask, 1, context - 1, batch, 1 + steps)
        for tokens in cycle(points.chunk):
            if answer.done() and len(found) >= BESIDE:
                break
            found.append((tokens, ask(tokens, cached).timeline))
    for tokens, line in found[1:-1]:
        yield ("prefill beside", tokens, cached), line["prefill_seconds"]
        yield from _around(line, " beside")
    yield ("decode beside", *point), _decoded(answer.result()) / steps


def _steps_beside(points: Points, turn: Samples) -> int:
    """Returns how many decode steps take as long as the prompts beside them."""
    ((chunk_s,), (step_s,)) = (
        turn["prefill", max(points.chunk), max(points.cached)],
        turn["decode", min(points.batch), min(points.context)],
    )
    return min(MOST_BESIDE, ceil((BESIDE + 2) * chunk_s / max(LEAST, step_s)))


_KINDS = {"prefill": _prefill, "decode": _decode, "beside": _beside}
_DOING = {
    "prefill": "a step of {} prompt tokens after {} cached ones",
    "decode": "steps of {} sequences of {} tokens",
    "beside": "both nodes at once, with {} sequences of {} tokens",
}


def _around(line: Mapping[str, Any], beside: str = "") -> Taken:
    """Yields the parts of a prompt's time that are no step."""
    first, reserve = line["first_token"], 0.0
    if line["transferred"] is not None:
        reserve = max(0.0, line["reserved"] - line["queued"])
        yield ("reserve" + beside,), reserve
        yield ("transfer" + beside, line["transfer_bytes"]), max(0.0, line["transferred"] - first)
    steps = line["prefill_queue_seconds"] + line["prefill_seconds"]
    yield ("router" + beside,), max(0.0, first - reserve - steps)


def _decoded(output: RequestOutput) -> float:
    """Returns the seconds of the tokens after the first."""
    line = output.timeline
    began = line["first_token"] if line["transferred"] is None else line["transferred"]
    return float(line["finished"] - began)


class _Asks:
    """Sends prompts of random tokens; their prefixes may be cached."""

    def __init__(self, llm: LLM, hands_over: bool) -> None:
        self._llm = llm
        self.hands_over = hands_over
        self._chance = random.Random(0)
        self._known: dict[int, list[int]] = {}  # length → cached prompt

    def __call__(
        self, tokens: int, cached: int, choices: int = 1, max_tokens: int = 2
    ) -> RequestOutput:
        if cached not in self._known:
            self._known[cached] = self._draw(cached)
            if cached:
                self._generate(self._known[cached], 1, 2)
        return self._generate([*self._known[cached], *self._draw(tokens)], choices, max_tokens)

    def _draw(self, count: int) -> list[int]:
        return self._chance.choices(VOCABULARY, k=count)

    def _generate(self, prompt: list[int], choices: int, max_tokens: int) -> RequestOutput:
        params = SamplingParams(n=choices, max_tokens=max_tokens, temperature=0, ignore_eos=True)
        (output,) = self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        lost = self.hands_over and max_tokens > 1 and output.timeline["transferred"] is None
        if output.timeline["migrations"] or lost:
            raise NodeError("a node failed while it was measured; see the log above")
        return output


def _line(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns two points of a non-decreasing line through all points (Theil-Sen: the median of
    slopes): the hand-off's jitter exceeds the time for a few bytes."""
    slopes = [
        (two[1] - one[1]) / (two[0] - one[0])
        for one, two in product(points, points)
        if one[0] < two[0]
    ]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    start = max(0.0, statistics.median(seconds - slope * size for size, seconds in points))
    most = max(size for size, _ in points)
    return [(0, start), (most, start + slope * most)]
