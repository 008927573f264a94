"""Compiles a Triton kernel for the first GPU, runs it and compares it with torch:

    python -m pdserve.common.model.kernels.gpu.check

It runs in its own process, because a kernel that fails makes the GPU unusable for its process. It
prints a line of JSON: `{"why": …}` if the host lacks what Triton needs, else
`{"error": …, "seconds": …}`.
"""

from __future__ import annotations

import json
import time

import torch
import torch.nn.functional as F

from pdserve.common.model.kernels.gpu import needs

ROWS, SIZE = 5, 1500  # a program's block of features is not full


def main() -> None:
    needs.use_cache_dir()
    if why := needs.missing():
        print(json.dumps({"why": why}))
        return
    started = time.monotonic()
    error = kernel_error(torch.device("cuda", 0))
    print(json.dumps({"error": error, "seconds": time.monotonic() - started}))


def kernel_error(device: torch.device) -> float:
    """Returns the largest difference of SwiGLU's product from torch's, NaN if a result is NaN."""
    from pdserve.common.model.kernels.gpu.activation import silu_and_mul

    rows = torch.randn(ROWS, 2 * SIZE, generator=torch.Generator().manual_seed(0)).to(device)
    gate, up = rows.chunk(2, dim=-1)
    return float((silu_and_mul(rows) - F.silu(gate) * up).abs().max())


if __name__ == "__main__":
    main()
