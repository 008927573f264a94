"""Kernels of a decoder layer: in C++ for CPUs, compiled on the user's machine at first use, in
Triton for GPUs, and in torch."""
