"""Which attention backend fits a device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from common.model.attention import AttentionBackend, AttentionShape
from common.model.attention_torch import TorchAttention


def make_backend(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """FlashInfer on a GPU where it is installed and computes in `dtype`; otherwise torch."""
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type == "cuda" and half and find_spec("flashinfer") is not None:
        # Importing flashinfer takes seconds and needs a GPU.
        from common.model.attention_flashinfer import FlashInferAttention

        return FlashInferAttention(shape, device, dtype)
    return TorchAttention(shape, device, dtype)
