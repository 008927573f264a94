"""The shapes that FlashInfer (arXiv:2501.01005) can compute and the workspace it needs, read in the
sources of versions 0.5.3, 0.6.6 and 0.7.2. Needs neither FlashInfer nor a GPU."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from packaging.version import Version

from pdserve.common.model.attention import AttentionShape

OLDEST, BEYOND = Version("0.5.3"), Version("0.8")  # tested against signatures of both ends

# Head sizes of the Ampere and Hopper kernels (`prefill_sm90.cuh`); others do not compile.
HEAD_DIMS = (64, 128, 256)

MIN_WORKSPACE_BYTES = 128 * 2**20  # FlashInfer's recommendation
INT_WORKSPACE_BYTES = 8 * 2**20  # allocated by each wrapper for its plan
_ALIGNMENT = 32  # of the two parts of a workspace
_DECODE_BLOCKS = 16  # most thread blocks of 128 threads on a multiprocessor


def why_not(shape: AttentionShape, dtype: torch.dtype) -> str:
    """Returns why FlashInfer cannot be used, and the fix if there is one; "" if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer does not compute in {dtype}: use --dtype bfloat16 or float16"
    if shape.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"FlashInfer has no kernel for heads of size {shape.head_dim}, only {sizes}"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'pdserve[cuda]'"
    if not OLDEST <= (found := _version()) < BEYOND:
        wanted = f"flashinfer-python>={OLDEST},<{BEYOND}"
        return f"FlashInfer {found} is not a version known to fit: pip install '{wanted}'"
    return ""


def _version() -> Version:
    try:
        return Version(version("flashinfer-python"))
    except PackageNotFoundError:  # a copy on Python's path
        return Version("0")


def tensor_cores(shape: AttentionShape) -> bool:
    """Returns whether single queries use the prefill kernel, which multiplies on tensor cores. The
    other kernel has groups of 1, 2, 3, 4 or 8 query heads for a KV head."""
    return shape.num_heads >= 4 * shape.num_kv_heads


def workspace_bytes(shape: AttentionShape, multiprocessors: int, graph_size: int = 0) -> int:
    """Returns the bytes of the float workspace on a GPU with this many multiprocessors: for all
    steps, or for captured steps of up to `graph_size` single queries.

    A kernel that splits long contexts keeps partial outputs (float32, head_dim + 1 numbers for each
    head): one tile of rows for each thread block. The prefill kernel runs at most two thread blocks
    on a multiprocessor, shared by the KV heads; in a graph at least as many as its rows have tiles
    (`PrefillPlan`, `DecodePlan` and `FA2DetermineCtaTileQ` in FlashInfer's `scheduler.cuh` and
    `utils.cuh`). Versions since 0.7 need less for groups of heads.
    """
    group = -(-shape.num_heads // shape.num_kv_heads)
    row = shape.num_heads * (shape.head_dim + 1) * 4
    blocks = 2 * multiprocessors // shape.num_kv_heads
    rows = _DECODE_BLOCKS * multiprocessors // shape.num_kv_heads  # of the decode kernel
    if not graph_size:
        rows = max(rows, blocks * _tile(2**31, shape))
    elif tensor_cores(shape):
        tile = _tile(group, shape)
        tiles = -(-graph_size * group // tile) + graph_size - 1
        rows = max(blocks, tiles) * tile
    return max(rows * row + _ALIGNMENT, MIN_WORKSPACE_BYTES)


def _tile(rows: int, shape: AttentionShape) -> int:
    """Returns the rows (queries × query heads per KV head) that a thread block of the prefill
    kernel computes, for a sequence of `rows`."""
    if rows > 64 and shape.head_dim < 256:
        return 128
    return 64 if rows > 16 else 16
