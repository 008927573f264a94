"""Kernels of a decoder layer: in C++ for CPUs, prebuilt or compiled on the user's machine at first
use, in Triton for GPUs, and in torch."""

from pathlib import Path

from pdserve.common.core.native_library import Library

# No -ffast-math: NaN and infinity must be kept. No contraction: results must round like torch's;
# the source names fused multiply-adds where they are wanted.
_FLAGS = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
KERNELS = Library("kernels", Path(__file__).parent, _FLAGS)
