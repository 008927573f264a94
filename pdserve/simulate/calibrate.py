"""`pdserve calibrate`: measures a prefill and a decode node of this host, and writes what
`pdserve simulate` needs.

Prompts go through a real cluster, one at a time. Their timelines contain the duration of each part:
steps with their overhead, and the hand-off with its commit and digests.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pdserve.common.config.options import changed
from pdserve.common.config.simulate import CalibrateConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.core.host import cpu_name
from pdserve.offline.llm import LLM
from pdserve.offline.outputs import RequestOutput
from pdserve.offline.params import SamplingParams
from pdserve.simulate.calibration import Calibration

VOCABULARY = range(3, 500)  # ids that every model has
ONE_OF_EACH: dict[str, Any] = {
    "prefill": 1,
    "decode": 1,
    "log_level": "warning",
    "peak_tflops": 1.0,  # not measured, since only metrics need it
    "peak_bandwidth": 1.0,
    "share_cores": "off",  # no idle peer's cores, which a busy cluster would not have
}
STEPS = 8  # decode steps per measurement
_OWN = ("output", "repetitions", "batch", "context", "chunk", "cached")


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
    points = Points(config)
    given = {each.name: each.default for each in changed(config) if each.name not in _OWN}
    with LLM(**ONE_OF_EACH, **given) as llm:
        found = measure(llm, points, config)
    found.write(Path(config.output))
    print(
        json.dumps({"prefill": found.prefill, "decode": found.decode, "transfer": found.transfer})
    )
    return 0


class Points:
    """The points to measure: checked lists of counts."""

    def __init__(self, config: CalibrateConfig) -> None:
        self.batch = _counts("--batch", config.batch)
        self.context = _counts("--context", config.context)
        self.chunk = _counts("--chunk", config.chunk)
        self.cached = _counts("--cached", config.cached, least=0)


def _counts(flag: str, text: str, least: int = 1) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(f"{flag} {text!r} is not a list of counts such as 1,8,32")
    return sorted({int(word) for word in words})


def measure(llm: LLM, points: Points, config: CalibrateConfig) -> Calibration:
    """Measures all points in turns, after a warm-up turn."""
    samples: dict[tuple[Any, ...], list[float]] = {}
    ask = _Asks(llm)
    for turn in range(config.repetitions + 1):
        for name, seconds in _turn(ask, points):
            if turn:
                samples.setdefault(name, []).append(seconds)
    of = {name: statistics.median(found) for name, found in samples.items()}
    return Calibration(
        model=str(config.model.model or "the embedded model"),
        device=config.device if config.device != "auto" else cpu_name(),
        prefill=[(name[1], name[2], of[name]) for name in of if name[0] == "prefill"],
        decode=[(name[1], name[2], of[name]) for name in of if name[0] == "decode"],
        transfer=_line([(name[1], of[name]) for name in of if name[0] == "transfer"]),
        kv_bytes_per_token=of["kv_bytes_per_token",],
        router_s=of["router",],
    )


def _turn(ask: _Asks, points: Points) -> Iterator[tuple[tuple[Any, ...], float]]:
    for tokens, cached in product(points.chunk, points.cached):
        output = ask(tokens, cached)
        line = output.timeline
        yield ("prefill", tokens, cached), line["prefill_seconds"]
        yield ("router",), max(0.0, line["first_token"] - line["prefill_seconds"])
        yield (
            ("transfer", line["transfer_bytes"]),
            max(0.0, line["transferred"] - line["first_token"]),
        )
        moved = len(output.prompt_token_ids) - line["decode_cached_tokens"]
        yield ("kv_bytes_per_token",), line["transfer_bytes"] / moved
    for batch, context in product(points.batch, points.context):
        line = ask(1, context - 1, batch, 1 + STEPS).timeline
        yield ("decode", batch, context), (line["finished"] - line["transferred"]) / STEPS


class _Asks:
    """Sends prompts of random tokens; their prefixes may be cached."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
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
        if output.timeline["migrations"] or output.timeline["transferred"] is None:
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
