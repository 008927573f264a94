"""Which attention backend fits a device."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from common.model.attention import AttentionBackend, AttentionShape
from common.model.attention_torch import TorchAttention

logger = logging.getLogger(__name__)


def make_backend(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """FlashInfer on a GPU where it is installed and computes in `dtype`; otherwise torch, which on
    a GPU is slower and never chosen in silence."""
    if device.type != "cuda":
        return TorchAttention(shape, device, dtype)
    if missing := _without_flashinfer(dtype):
        logger.warning("attention in plain torch, which is slower: %s", missing)
        return TorchAttention(shape, device, dtype)
    # Importing flashinfer takes seconds and needs a GPU.
    from common.model.attention_flashinfer import FlashInferAttention

    return FlashInferAttention(shape, device, dtype)


def _without_flashinfer(dtype: torch.dtype) -> str:
    """Why it cannot be used, and the mend; empty: it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashInfer does not compute in {dtype}: use --dtype bfloat16 or float16"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'pdserve[cuda]'"
    return ""
