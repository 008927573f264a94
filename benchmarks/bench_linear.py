"""Measures the matrix products of linear layers: torch's, and those with packed matrices, compared
with a floor.

The floor of a product is the larger of its matrix's bytes ÷ read bandwidth and its operations ÷ the
rate of the fastest large product, both measured in the same run. Matrices are read in turns that
exceed every cache, as in a step. With one thread, times are CPU times.

    python benchmarks/bench_linear.py [--threads 1] [--tokens 1,8,32,512] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pdserve.common.core.quantization import Quantization
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.grouped_matrix import GroupedMatrix
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.packed import Packer
from pdserve.common.model.sharding import Sharding

# (outputs, inputs) of SmolLM2-135M, of a 0.5 B model, and a square matrix.
SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
    "0.5B gate_up": (9728, 896),
    "square": (2048, 2048),
}
KINDS = {
    "bfloat16": (torch.bfloat16, False),
    "float32": (torch.float32, False),
    "int8 × bfloat16": (torch.bfloat16, True),
    "int8 × float32": (torch.float32, True),
}
INT4 = Quantization("awq", 4, group_size=64)
COLD_BYTES = 64 << 20  # of the matrices that are read in turns
ROUNDS = 8  # rounds; the best one counts


@dataclass(frozen=True)
class Result:
    kind: str
    shape: str
    tokens: int
    floor: float  # seconds
    torch: float  # seconds; int8 and int4 matrices are converted for each product
    packed: float


class Bench:
    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        self.kernels = NativeKernels()
        self.packer = Packer(self.kernels.function)
        self.memory = torch.ones(COLD_BYTES // 4)
        self.squares = {each: torch.randn(1024, 1024).to(each) for each, _ in KINDS.values()}

    def results(self, kind: str, shape: str, tokens: list[int]) -> list[Result]:
        dtype, quantized = KINDS[kind]
        plain = [
            matrix_of(SHAPES[shape], dtype, quantized)
            for _ in range(max(2, COLD_BYTES // (SHAPES[shape][0] * SHAPES[shape][1] * 2)))
        ]
        packed = [each.clone() for each in plain]
        if not self.packer.takes(plain[0]):
            return []
        for each in packed:
            self.packer.pack(each)
        scales = torch.full((len(plain[0]),), 0.01, dtype=dtype) if quantized else None

        def by_torch(x: Tensor, i: int) -> Tensor:
            if scales is None:
                return F.linear(x, plain[i])
            return F.linear(x, plain[i].to(dtype)).mul_(scales)

        def by_packer(x: Tensor, i: int) -> Tensor:
            return self.packer.linear(x, packed[i], None, scales)

        def result(count: int) -> Result:
            x = torch.randn(count, plain[0].shape[1]).to(dtype)
            ways = [lambda i: by_torch(x, i), lambda i: by_packer(x, i)]
            floor, (first, second) = self.compare(ways, plain, plain[0].nbytes, count, dtype)
            return Result(kind, shape, count, floor, first, second)

        return [result(count) for count in tokens]

    def int4_results(self, shape: str, tokens: list[int]) -> list[Result]:
        rows, inputs = SHAPES[shape]
        matrices = [
            self.int4_matrix(rows, inputs)
            for _ in range(max(2, COLD_BYTES // (rows * inputs // 2)))
        ]
        nbytes = sum(t.nbytes for t in (matrices[0].values, matrices[0].zeros, matrices[0].scales))

        def result(count: int) -> Result:
            x = torch.randn(count, inputs).bfloat16()
            ways = [
                lambda i: F.linear(x, matrices[i].dense()),
                lambda i: matrices[i].linear(x, None),
            ]
            times = self.compare(ways, matrices, nbytes, count, torch.bfloat16)
            return Result("int4 × bfloat16", shape, count, times[0], *times[1])

        return [result(count) for count in tokens]

    def int4_matrix(self, rows: int, inputs: int) -> GroupedMatrix:
        sharding = Sharding(
            GroupCoordinator(), torch.device("cpu"), torch.bfloat16, kernels=self.kernels
        )
        group_of = (torch.arange(inputs) // 64).int()
        matrix = GroupedMatrix(rows, group_of, inputs // 64, sharding, INT4)
        matrix.values.random_(0, 256)
        matrix.zeros.random_(0, 16)
        matrix.scales.fill_(0.01)
        matrix.pack()
        return matrix

    def compare(
        self,
        ways: list[Callable[[int], Tensor]],
        matrices: Sequence[Tensor | GroupedMatrix],
        nbytes: int,
        tokens: int,
        dtype: torch.dtype,
    ) -> tuple[float, list[float]]:
        square = self.squares[dtype]
        rounds = [
            (
                self.seconds(lambda _: self.memory.sum(), 1),
                self.seconds(lambda _: F.linear(square, square), 1),
                *(self.seconds(way, len(matrices)) for way in ways),
            )
            for _ in range(ROUNDS)
        ]
        read, flop, *seconds = (min(times) for times in zip(*rounds, strict=True))
        memory = nbytes * read / self.memory.nbytes
        one = matrices[0]
        numbers = one.numel() if isinstance(one, Tensor) else one.rows * len(one.group_of)
        compute = tokens * numbers * flop / 1024**3
        return max(memory, compute), seconds

    def seconds(self, work: Callable[[int], object], times: int) -> float:
        """Returns the seconds of one of `times` products."""
        started = self.clock()
        for i in range(times):
            work(i)
        return (self.clock() - started) / times


def matrix_of(shape: tuple[int, int], dtype: torch.dtype, quantized: bool) -> Tensor:
    if quantized:
        return torch.randint(-127, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,512")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokens = [int(each) for each in arguments.tokens.split(",")]
    bench, results = Bench(arguments.threads), []
    with torch.inference_mode():
        for kind in KINDS:
            for shape in arguments.shapes.split(","):
                results += bench.results(kind, shape, tokens)
        for shape in arguments.shapes.split(","):
            results += bench.int4_results(shape, tokens)
    table = Table("kind", "shape", "tokens", "floor µs", "torch ÷ floor", "packed ÷ floor")
    for each in results:
        times = (each.floor * 1e6, each.torch / each.floor, each.packed / each.floor)
        table.add_row(each.kind, each.shape, str(each.tokens), *(f"{x:.3g}" for x in times))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
