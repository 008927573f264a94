"""The flags of `pdserve bench serve`. Names follow `vllm bench serve` where it has them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pdserve.bench.serving.datasets import FIRST_TOKEN_ID
from pdserve.bench.serving.metrics import SLO_METRICS
from pdserve.client.server import DEFAULT_URL, URL_HELP
from pdserve.client.terminal import json_object, number, positive
from pdserve.common.config.options import CommandParser

DATASETS = ("random", "sharegpt", "prefix_repetition", "trace")
# Default lengths in tokens; `fit_lengths` lowers them if the server's context is too short.
LENGTHS = {
    "random_input_len": 1024,
    "random_output_len": 128,
    "sharegpt_max_len": 2048,
    "prefix_repetition_prefix_len": 256,
    "prefix_repetition_suffix_len": 256,
    "prefix_repetition_output_len": 128,
}
# Per data set: the lengths that add up to a request, and how often each counts.
_TOGETHER = {
    "random": {"random_input_len": 1, "random_output_len": 1},
    "sharegpt": {"sharegpt_max_len": 2},
    "prefix_repetition": dict.fromkeys([each for each in LENGTHS if each.startswith("prefix")], 1),
}
CHAT_TEMPLATE = 64  # tokens of the context that are reserved for the chat template


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default that says something and that the help does not name itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default in ({}, [])
        if silent or "default:" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        prog="pdserve bench serve",
        description="Load generator for any OpenAI-compatible server.",
        formatter_class=_Defaults,
    )
    _server_options(parser)
    _load_options(parser)
    _capacity_options(parser)
    _dataset_options(parser)
    _result_options(parser)
    args = parser.parse_args(argv)
    _check(parser, args)
    return args


def fit_lengths(args: argparse.Namespace, window: int | None) -> list[str]:
    """Fills in the lengths that were not given, with less than the defaults where a request would
    exceed `window` (the server's context in tokens; None: unknown). Returns the lowered ones as
    flags."""
    open_lengths = [name for name in LENGTHS if getattr(args, name) is None]
    for name in open_lengths:
        setattr(args, name, LENGTHS[name])
    together = _TOGETHER.get(args.dataset_name, {})
    mine = [name for name in together if name in open_lengths]
    varied = 1 + args.random_range_ratio if args.dataset_name == "random" else 1.0
    wanted = sum(times * getattr(args, name) * varied for name, times in together.items())
    opens = sum(together[name] * getattr(args, name) * varied for name in mine)
    left = math.inf if window is None else window - (wanted - opens)
    left -= CHAT_TEMPLATE if args.backend == "openai-chat" else 0
    left -= args.random_prefix_len if args.dataset_name == "random" else 0
    if opens <= left:
        return []
    for name in mine:
        setattr(args, name, max(1, int(getattr(args, name) * left / opens)))
    return [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in mine]


def _fitted(name: str) -> str:
    return f"default: {LENGTHS[name]}, or less if the server's context is shorter"


def _server_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--base-url", "--url", default=DEFAULT_URL, help=URL_HELP)
    add("--backend", choices=("openai", "openai-chat"), default="openai", help="endpoint to call")
    add("--model", help="default: the first model listed")
    add("--timeout", type=positive, default=600.0, help="seconds for one request")
    add("--temperature", type=number(float), default=0.0, help="of sampling; 0: greedy")
    add("--ignore-eos", action="store_true", help="generate every answer to its full length")
    add("--extra-body", type=json_object, default={}, help="JSON merged into every request")


def _load_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=number(int, 1), default=1000, help="requests to send")
    add(
        "--request-rate",
        type=positive,
        help="arrivals per second, or inf (default: the trace's own times, else inf)",
    )
    add(
        "--burstiness",
        type=positive,
        default=1.0,
        help="shape of the gamma distribution of gaps: 1 is Poisson, less is burstier",
    )
    add("--max-concurrency", type=number(int, 1), help="requests in flight at once")
    add(
        "--num-warmups", type=number(int, 0), default=0, help="requests sent first and not measured"
    )
    add("--seed", type=number(int, 0), default=0, help="of arrivals and prompts")


def _capacity_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "capacity", "with a limit: find the highest request rate at which enough requests meet it"
    ).add_argument
    add("--slo-ttft-ms", type=positive, help="limit of the time to first token")
    add(
        "--slo-itl-ms",
        type=positive,
        help="limit of a request's mean time between tokens (TPOT)",
    )
    add("--slo-attainment", type=_share, default=0.9, help="share that must meet the limits")
    add(
        "--capacity-precision",
        type=positive,
        default=0.1,
        help="relative precision of the rate found",
    )


def _dataset_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data set").add_argument
    add("--dataset-name", choices=DATASETS, default="random")
    add(
        "--prompt-format",
        choices=("ids", "words"),
        help="token ids, or text with that many words (default: ids; words for chat)",
    )
    add("--vocab-size", type=int, default=512, help=f"draw ids from [{FIRST_TOKEN_ID}, this)")
    add("--random-input-len", type=number(int, 1), help=_fitted("random_input_len"))
    add("--random-output-len", type=number(int, 1), help=_fitted("random_output_len"))
    add("--random-range-ratio", type=float, default=0.0, help="vary lengths by ± this share")
    add("--random-prefix-len", type=number(int, 0), default=0, help="tokens that all prompts share")
    longest = f"longest input and longest output ({_fitted('sharegpt_max_len')})"
    add("--sharegpt-max-len", type=number(int, 1), help=longest)
    for name in ("prefix", "suffix", "output"):
        help = _fitted(f"prefix_repetition_{name}_len")
        add(f"--prefix-repetition-{name}-len", type=number(int, 1), help=help)
    add(
        "--prefix-repetition-num-prefixes",
        type=number(int, 1),
        default=10,
        help="different prefixes",
    )
    add("--dataset-path", type=Path, help="trace file: Mooncake's JSONL or Azure's CSV")
    add("--trace-speedup", type=positive, default=1.0, help="replay the trace this much faster")
    add("--trace-length-scale", type=positive, default=1.0, help="multiply the trace's lengths")


def _result_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("result").add_argument
    add(
        "--goodput",
        type=_slo,
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help=f"limits of a good request; metrics: {', '.join(SLO_METRICS)}",
    )
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--save-result", type=Path, metavar="FILE", help="write the JSON here")
    add("--plot", type=Path, metavar="FILE", help="write a PNG of the distributions here")


def _share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is more than 1")
    return value


def _slo(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in SLO_METRICS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SLO_METRICS)}")
    return name, positive(limit)


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Reports options that exclude each other."""
    chat = args.backend == "openai-chat"
    if chat and args.prompt_format == "ids":
        parser.error("chat endpoints take no token ids: use --prompt-format words")
    if args.dataset_name == "trace" and args.dataset_path is None:
        parser.error("--dataset-name trace needs --dataset-path")
    if seeks_capacity(args):
        if args.dataset_name == "trace" or args.max_concurrency is not None:
            parser.error("--slo-… excludes --dataset-name trace and --max-concurrency")
        if args.request_rate is not None and math.isinf(args.request_rate):
            parser.error("--slo-… starts its search at --request-rate, which must be finite")
        if args.goodput:
            parser.error("--goodput and --slo-… set the same limits: give only one of them")
    if not 0 <= args.random_range_ratio < 1:
        parser.error("--random-range-ratio must be in [0, 1)")
    if args.vocab_size <= FIRST_TOKEN_ID:
        parser.error(f"--vocab-size must be greater than {FIRST_TOKEN_ID}")
    for flag, path in (("--save-result", args.save_result), ("--plot", args.plot)):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{flag} {path}: its folder does not exist")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'pdserve[bench]'")


def seeks_capacity(args: argparse.Namespace) -> bool:
    return args.slo_ttft_ms is not None or args.slo_itl_ms is not None


def limits(args: argparse.Namespace) -> dict[str, float]:
    """Returns the limits of a good request: metric → milliseconds."""
    slo = {"ttft": args.slo_ttft_ms, "tpot": args.slo_itl_ms}
    return dict(args.goodput) | {name: limit for name, limit in slo.items() if limit is not None}
