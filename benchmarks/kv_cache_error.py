"""Measures the error of 8-bit KV (--kv-cache-dtype) and, for comparison, of computing in bfloat16.

The reference is the same model in float32 with a float32 cache: logits of stories, and greedy
continuations of their beginnings. Speeds are of decoding one sequence after a story, in CPU time of
one thread, in turns with the unquantized cache of the same dtype.

    python benchmarks/kv_cache_error.py [--model FOLDER] [--texts 4] [--tokens 32] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from quantization_error import COLUMNS, PLAIN, Errors, Subject, decode_speed, texts_of
from rich.console import Console
from rich.table import Table

from pdserve.common.core.kv_groups import KV_AUTO, KV_CACHE_DTYPES
from pdserve.common.model.device import dtype_name
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.demo_model.embedded import ensure_embedded_model


@dataclass(frozen=True)
class Result:
    dtype: str
    kv_cache_dtype: str
    kv_bytes_per_token: int
    errors: Errors
    decode_speed: float  # relative to the unquantized cache


def measure(
    exact: Subject, plain: Subject, other: Subject, texts: list[list[int]], count: int
) -> Result:
    return Result(
        dtype=dtype_name(other.model.dtype),
        kv_cache_dtype=other.model.attentions[0].kv_cache_dtype,
        kv_bytes_per_token=other.cache.nbytes // (other.cache.shape[2] * other.cache.shape[4]),
        errors=Errors.of(exact, other, texts, count),
        decode_speed=decode_speed(texts[0], plain, other),
    )


def results_of(folder: Path, num_texts: int, count: int) -> list[Result]:
    texts = texts_of(folder, num_texts)
    native, found = replace(PLAIN, kernels=NativeKernels()), []
    exact = Subject(folder, sharding=native)
    for dtype in (torch.float32, torch.bfloat16):
        of_dtype = replace(native, dtype=dtype)
        plain = Subject(folder, sharding=of_dtype)
        for kind in KV_CACHE_DTYPES:
            other = Subject(folder, sharding=replace(of_dtype, kv_cache_dtype=kind))
            found.append(measure(exact, plain, other, texts, count))
    return found


def show(results: Sequence[Result]) -> None:
    table = Table("dtype", "KV", "bytes a token", *COLUMNS, "decode ×")
    for each in results:
        kind = each.dtype if each.kv_cache_dtype == KV_AUTO else each.kv_cache_dtype
        speed = f"{each.decode_speed:.2f}"
        table.add_row(each.dtype, kind, str(each.kv_bytes_per_token), *each.errors.cells(), speed)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: the demo model)")
    parser.add_argument("--texts", type=int, default=4, help="number of stories")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per greedy continuation")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        results = results_of(args.model or ensure_embedded_model(), args.texts, args.tokens)
    show(results)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(each) for each in results], indent=2))


if __name__ == "__main__":
    main()
