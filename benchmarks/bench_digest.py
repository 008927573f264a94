"""Measures the latency of KV digests: two clusters on this host, with and without digests, get the
same prompts in turns. Digests are compared between the first and the second token, so TTFT plus the
first gap contains their whole cost.

    python benchmarks/bench_digest.py [--model FOLDER] [--prompt-len 512] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.live import up

MAX_TOKEN_ID = 400  # in every vocabulary


def ask(url: str, prompt: list[int]) -> tuple[float, float]:
    """Returns the seconds from the request to its first and its second (last) token."""
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    started, moments = time.perf_counter(), []
    with urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                moments.append(time.perf_counter() - started)
    return moments[0], moments[-1]  # a single token may not complete a character


def measure(plain: str, digested: str, length: int, rounds: int) -> list[dict[str, float]]:
    """Returns pairs of measurements. Every prompt is new, so that its KV is transferred."""
    rng, pairs = random.Random(0), []
    for number in range(rounds + 1):
        prompt = [rng.randrange(3, MAX_TOKEN_ID) for _ in range(length)]
        order = (plain, digested) if number % 2 else (digested, plain)
        times = {url: ask(url, prompt) for url in order}
        pairs.append(
            {
                "ttft_plain_s": times[plain][0],
                "second_plain_s": times[plain][1],
                "ttft_digests_s": times[digested][0],
                "second_digests_s": times[digested][1],
            }
        )
    return pairs[1:]  # without the first pair, which connects


def summarize(pairs: list[dict[str, float]]) -> dict[str, float]:
    summary = {key: statistics.median(each[key] for each in pairs) for key in pairs[0]}
    ratios = [each["second_digests_s"] / each["second_plain_s"] for each in pairs]
    summary["ratio"] = statistics.median(ratios)
    summary["ratio_of_medians"] = summary["second_digests_s"] / summary["second_plain_s"]
    return summary


def show(summary: dict[str, float]) -> None:
    table = Table("medians", title=f"with digests: × {summary['ratio']:.3f} (median of pairs)")
    for column in ("TTFT", "TTFT + first gap"):
        table.add_column(column, justify="right")
    for name, key in (("without digests", "plain"), ("with digests", "digests")):
        moments = summary[f"ttft_{key}_s"], summary[f"second_{key}_s"]
        table.add_row(name, *(f"{1e3 * moment:.1f} ms" for moment in moments))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a checkpoint's folder (default: the embedded model)")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=20, help="prompts")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    options = {"model": args.model} if args.model else {}
    with ExitStack() as stack:
        plain, digested = (
            f"http://127.0.0.1:{stack.enter_context(up({**options, switch: ''}))[0]}"
            for switch in ("no_enable_kv_digests", "enable_kv_digests")
        )
        pairs = measure(plain, digested, args.prompt_len, args.rounds)
    summary = summarize(pairs)
    show(summary)
    if args.json:
        Path(args.json).write_text(json.dumps({**vars(args), **summary, "pairs": pairs}, indent=2))


if __name__ == "__main__":
    main()
