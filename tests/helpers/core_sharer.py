"""A process that owns a core of the table `FILE` and computes products in a step that does not end,
also on others' cores; it prints a line per product.

    python core_sharer.py FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.worker.lent_cores import LentCores


def main(file: str) -> None:
    torch.set_num_threads(1)
    kernels = NativeKernels()
    assert kernels.packer is not None
    weight, x = torch.ones(4096, 1024), torch.ones(64, 1024)
    kernels.packer.pack(weight)
    with LentCores(Path(file), threads=1, cores=2, kernels=kernels).computing():
        while True:
            assert torch.equal(kernels.packer.linear(x, weight), torch.full((64, 4096), 1024.0))
            print("right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
