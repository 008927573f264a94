"""Which dtype a device should compute in."""

from __future__ import annotations

from pathlib import Path

import torch

from common.core.errors import ConfigError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CPU_INFO = Path("/proc/cpuinfo")
_FAST_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm


def choose_dtype(requested: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """`--dtype` resolved. "auto" is the checkpoint's, except on CPUs without instructions for
    it: there half precision is many times slower than float32.

    Raises:
        ConfigError: `requested` names no dtype.
    """
    name = checkpoint_dtype if requested == "auto" else requested
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    if requested == "auto" and device.type == "cpu":
        fast = name == "bfloat16" and cpu_has_fast_bf16()
        return torch.bfloat16 if fast else torch.float32
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """For example "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware; False where unknown."""
    if not _CPU_INFO.is_file():
        return False
    for line in _CPU_INFO.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return not _FAST_BF16_FLAGS.isdisjoint(value.split())
    return False
