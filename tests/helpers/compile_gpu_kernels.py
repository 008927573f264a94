"""Compiles Triton kernels for a GPU that is not there: `python compile_gpu_kernels.py 90` prints as
JSON what ptxas says of each kernel that `CALLS` launch.

Needs a process of its own: kernels that were defined for the interpreter cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import product as pairs
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import SlotMapping
from pdserve.common.model.kernels.gpu import activation, launch, norms, products, sampling
from pdserve.common.model.kernels.gpu.attention_input import attention_input
from pdserve.common.model.kernels.quantized import Format, Quantized
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.sharding import Sharding


class _NoDriver(DriverBase):
    """Says that GPU 0 has the target's compute capability."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., list[float]]:
        raise NotImplementedError


def usage(cubin: bytes) -> dict[str, int]:
    """Returns registers, bytes of spills (STACK) and of shared memory of a kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"], "shared": found["SHARED"]}


def compile_calls(capability: int, few: bool) -> dict[str, dict[str, int]]:
    """Makes all `CALLS`, then those `OF_ANY_COUNT`; compiles what they launch, each once. Raises
    AssertionError if one of the latter needs another kernel for another number of tokens. `few`:
    compiles each kernel of `CALLS` for its first call only."""
    found: dict[str, dict[str, int]] = {}
    known: list[Any] = []
    names: set[str] = set()

    def compile_only(
        kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        if few and kernel.fn.__name__ in names:
            return
        compiled = kernel.warmup(*args, grid=grid, **constants)
        if any(compiled is each for each in known):
            return
        known.append(compiled)
        names.add(kernel.fn.__name__)
        sizes = usage(compiled.asm["cubin"])
        dynamic = int(compiled.metadata.shared)
        name = f"{kernel.fn.__name__} {len(found)}"
        found[name] = {**sizes, "shared": max(sizes["shared"], dynamic)}

    triton.runtime.driver.set_active(_NoDriver(GPUTarget("cuda", capability, 32)))
    launch._run = compile_only
    for call in CALLS:
        call()
    few = False
    for several in OF_ANY_COUNT:
        several(17)
        count = len(known)
        for tokens in (16, 1, 2, 1024):
            several(tokens)
            assert len(known) == count, f"{several.__name__} compiles for {tokens} tokens"
    return found


def _activations() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        activation.silu_and_mul(torch.empty(3, 2 * 4096, dtype=dtype))


def _norms() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for size in (128, 1536, 16384, 18432):
            x, weight = torch.empty(3, size, dtype=dtype), torch.empty(size, dtype=dtype)
            norms.rms_norm(x, weight, 1e-6)
            norms.add_rms_norm(x, x, weight, 1e-6)


# Query heads, KV heads, head size; norms: Qwen3 8B and 0.6B, Llama 8B and others.
INPUTS = [
    ((32, 8, 128), True),
    ((16, 8, 128), True),
    ((32, 8, 128), False),
    ((32, 8, 64), False),
    ((14, 2, 64), True),
    ((16, 4, 256), True),
    ((8, 1, 256), False),
]


def _input_of(
    heads: tuple[int, int, int], normed: bool, turned: bool, dtype: torch.dtype, tokens: int
) -> None:
    queries, kv_heads, dim = heads
    sharding = Sharding(GroupCoordinator(), torch.device("cpu"), dtype)
    norm = RMSNorm("", dim, 1e-6, sharding)
    angle = torch.empty(tokens, 1, dim // 2, dtype=dtype)
    attention_input(
        torch.empty(tokens, queries + 2 * kv_heads, dim, dtype=dtype),
        (norm, norm) if normed else None,
        (angle, angle) if turned else None,
        torch.empty(2, 4, kv_heads, 16, dim, dtype=dtype),
        SlotMapping(*torch.zeros(3, tokens, dtype=torch.int64)),  # at odd addresses
    )


def _inputs() -> None:
    for heads, normed in INPUTS:
        for dtype in (torch.bfloat16, torch.float16):
            _input_of(heads, normed, True, dtype, 3)
    _input_of((32, 8, 128), False, False, torch.bfloat16, 3)


def _layer_of(tokens: int) -> None:
    """Qwen3 8B's, and the norm of its query heads alone."""
    x, weight = torch.empty(tokens, 4096).bfloat16(), torch.empty(4096).bfloat16()
    norms.rms_norm(x, weight, 1e-6)
    norms.rms_norm(x[None], weight, 1e-6)
    norms.add_rms_norm(x, x, weight, 1e-6)
    activation.silu_and_mul(torch.empty(tokens, 2 * 12288).bfloat16())
    _input_of((32, 8, 128), True, True, torch.bfloat16, tokens)
    queries = torch.empty(tokens, 48, 128).bfloat16()[:, :32]
    norms.rms_norm(queries, weight[:128], 1e-6)


def _products() -> None:
    """Products of Llama-8B's matrices, with numbers of tokens of which some share a kernel."""
    for dtype, (rows, inputs) in pairs((torch.bfloat16, torch.float16), SHAPES):
        kinds: list[tuple[Format, int]] = [("int8", inputs), ("nibbles", 128), ("uint8", 128)]
        kinds += [("e4m3", 128)]
        for kind, size in kinds:
            stored = inputs // 2 if kind == "nibbles" else inputs
            groups, signed, has_zeros = inputs // size, kind == "int8", kind in ("nibbles", "uint8")
            matrix = Quantized(
                kind,
                torch.empty(rows, stored, dtype=torch.int8 if signed else torch.uint8),
                torch.empty(groups, rows, dtype=torch.float32 if kind == "e4m3" else dtype),
                size,
                zeros=torch.empty(groups, rows, dtype=torch.uint8) if has_zeros else None,
            )
            for tokens in (1, 7, 16, 17, 32, 64, 65, 256):
                products.product(torch.empty(tokens, inputs, dtype=dtype), matrix)


SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))


def _draws() -> None:
    for vocab in (151_936, 32_000):
        sampling.warm_up(vocab, torch.device("cpu"))


CALLS: list[Callable[[], None]] = [_activations, _norms, _inputs, _products, _draws]
"""Call the functions of the package as a GPU's steps do, with tensors on the host."""

OF_ANY_COUNT: list[Callable[[int], None]] = [_layer_of]
"""Take a number of tokens. One binary must do for all, because a graph captures and a node serves
other numbers than those of the warm-up."""

if __name__ == "__main__":
    triton.knobs.cache.dir = sys.argv[2]
    print(json.dumps(compile_calls(int(sys.argv[1]), sys.argv[3:] == ["--few"]), indent=1))
