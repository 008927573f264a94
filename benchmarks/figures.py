"""Writes measured figures into docs/performance.md: `make bench` first, then `make figures`.

    python benchmarks/figures.py build/bench/step.json build/bench/peers.json docs/performance.md

A part is between `<!-- measured NAME -->` and `<!-- end NAME -->`. It shows ratios, since times
depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

METRICS = {
    "tok_s": "tok/s",
    "ttft_p50": "TTFT p50",
    "itl_p99": "ITL p99",
    "long_ttft_p50": "long TTFT p50",
}


def rewrite(page: str, step: dict[str, Any] | None, peers: dict[str, Any] | None) -> str:
    """Returns the page with new figures; a part that was not measured stays."""
    parts = {
        "step": step and "\n".join(step_lines(step)),
        "peers": peers and "\n".join(peers_lines(peers)),
    }
    for name, text in parts.items():
        pattern = rf"(<!-- measured {name} -->\n)(.*?)(<!-- end {name} -->)"
        head, begin, _, end, tail = re.split(pattern, page, maxsplit=1, flags=re.DOTALL)
        if text:
            page = f"{head}{begin}{text}\n{end}{tail}"
    return page


def step_lines(result: dict[str, Any]) -> Iterator[str]:
    threads = f"{result['threads']} thread" + "s" * (result["threads"] > 1)
    yield (
        f"{result['cpu']}, {threads}, {result['dtype']}, torch {result['torch']}; "
        f"{result['peak_gflops']:,.0f} GFLOP/s, {result['read_gb_per_s']:.0f} GB/s read:"
    )
    yield ""
    yield "| step | ÷ floor | bound by | of the matrix peak | of the bandwidth | most of it |"
    yield "|---|---|---|---|---|---|"
    for name, cell in result["cells"].items():
        step, whole = cell["step"], sum(row["ms"] for row in cell["parts"].values())
        most = sorted(cell["parts"].items(), key=lambda item: -item[1]["ms"])[:3]
        shares = ", ".join(f"{part} {row['ms'] / whole:.0%}" for part, row in most)
        yield (
            f"| {name} | {step['ratio']:.1f} | {step['bound_by']} | {cell['mfu']:.0%} | "
            f"{cell['bandwidth_utilisation']:.0%} | {shares} |"
        )


def peers_lines(result: dict[str, Any]) -> Iterator[str]:
    first, *others = _servers(result)
    yield f"{result['cpu']}, {len(result['cores'])} cores for all, {result['dtype']}; {first} ÷ …:"
    yield ""
    yield f"| workload | figure | {' | '.join(others) or 'alone'} |"
    yield "|---|---|" + "---|" * max(1, len(others))
    for workload, medians in result["medians"].items():
        for metric, title in METRICS.items():
            own = medians.get(first, {}).get(metric)
            cells = [_ratio(own, medians.get(other, {}).get(metric)) for other in others]
            if own is not None:
                yield f"| {workload} | {title} | {' | '.join(cells) or '–'} |"
    for name, reason in result["absent"].items():
        yield f"\nAbsent: {name} ({reason})."


def _servers(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(each["server"] for each in result["rounds"]))


def _ratio(own: float | None, other: float | None) -> str:
    return "–" if not own or not other else f"{own / other:.2f} ×"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", type=Path, help="output of pdserve bench step --json")
    parser.add_argument("peers", type=Path, help="output of peers.py --json")
    parser.add_argument("page", type=Path)
    args = parser.parse_args(argv)
    step, peers = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        for path in (args.step, args.peers)
    )
    page = args.page.read_text(encoding="utf-8")
    args.page.write_text(rewrite(page, step, peers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
