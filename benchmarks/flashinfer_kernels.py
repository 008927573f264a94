"""Compiles, without a GPU, the FlashInfer modules that the first run on a GPU asks for:

    python -m benchmarks.flashinfer_kernels FOLDER [--arch 9.0a] [--dtype bfloat16] [--head-dim 128]

writes the archive (`gpu_kernels.py`) that `scripts/first-gpu-run` takes to a card of that
architecture, so that nothing is compiled there. `make gpu-kernels` sets up torch for CUDA,
FlashInfer and nvcc from PyPI and runs it: half an hour of one core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_kernels

ROOT = Path(__file__).parents[1]
# Query heads and KV heads: for FlashInfer's decode kernel, and for its tensor cores.
HEADS = {"decode": (16, 8), "prefill": (32, 8)}
WINDOWS = (None, 7)  # a window has modules of its own
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # FlashInfer reads these when it is imported.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = options.arch
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(folder / "flashinfer-build")
    os.environ.setdefault("CUDA_HOME", str(toolkit(folder / "cuda")))
    from flashinfer import jit

    from pdserve.common.model.attention_flashinfer import find_ninja

    find_ninja()
    makers = {"decode": jit.gen_batch_decode_module, "prefill": jit.gen_batch_prefill_module}
    backend = "fa3" if options.arch.startswith("9.") else "fa2"
    wanted = dict.fromkeys(
        asked
        for heads in options.kernels.split(",")
        for window in WINDOWS[: options.windows]
        for asked in modules(HEADS[heads], options, window, backend)
    )
    libraries = []
    for kind, args in wanted:
        spec, started = makers[kind](*args), time.monotonic()
        spec.build(verbose=False)
        libraries.append(spec.jit_library_path)
        print(f"{time.monotonic() - started:5.0f} s  {spec.name}", flush=True)
    name = gpu_kernels.archive_name(options.arch.replace(".", ""))
    if archive := gpu_kernels.write(folder / name, libraries):
        print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashinfer_kernels", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="9.0a", help="compute capability; 9.0a: H100, H200")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernels", default=",".join(HEADS), help="of decode and prefill")
    parser.add_argument(
        "--no-windows", dest="windows", action="store_const", const=1, help="none with a window"
    )
    return parser


def modules(
    heads: tuple[int, int], options: argparse.Namespace, window: int | None, backend: str
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the modules that a decode and a mixed step ask for, as FlashInfer's own Python layer
    says on a fake GPU. The decode kernel alone if it is asked for alone."""
    sys.path.append(str(ROOT / "tests" / "helpers"))
    import pytest

    from fake_cuda import CUDA, fake_cuda
    from fake_kernels import fake_kernels
    from pdserve.common.model.attention import AttentionBatch, AttentionShape
    from pdserve.common.model.attention_flashinfer import FlashInferAttention

    shape = AttentionShape(*heads, options.head_dim, window)
    with pytest.MonkeyPatch.context() as patch, fake_cuda(patch):
        asked = fake_kernels(patch, backend)
        attention = FlashInferAttention(shape, CUDA, DTYPES[options.dtype])
        for queries in ([1, 1], [1, 9])[: 1 if options.kernels == "decode" else 2]:
            attention.prepare(AttentionBatch(queries, [5, 30], [[3], [1, 4, 7]], 16))
        yield from asked.modules


def toolkit(folder: Path) -> Path:
    """Lays the packages nvidia-cuda-nvcc, -crt, -cccl and -runtime out as a CUDA toolkit. The
    driver's library, which none has, is a stub for the linker."""
    import nvidia

    (packages,) = (each / "cu13" for each in map(Path, nvidia.__path__))
    libraries = folder / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "include", "nvvm"):
        _link(folder / name, packages / name)
    for file in (packages / "lib").iterdir():
        _link(libraries / file.name, file)
    _link(libraries / "libcudart.so", packages / "lib" / "libcudart.so.13")
    stub = [*["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o"]]
    subprocess.run([*stub, str(libraries / "libcuda.so")], check=True)
    return folder


def _link(link: Path, target: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


if __name__ == "__main__":
    main()
