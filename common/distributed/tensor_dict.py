"""A dict of tensors and plain values as bytes and raw tensors: what a receiver needs to allocate
goes ahead as msgpack, so that nothing executable crosses (no pickle)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from pdserve.common.core.errors import NodeError

TensorDict = Mapping[str, Any]
"""Values are tensors, or what msgpack knows: None, bool, int, float, str, bytes, list, dict."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class TensorSpec(msgspec.Struct, frozen=True):
    """What a tensor is, without its content."""

    dtype: str
    shape: tuple[int, ...]
    on_cpu: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), tensor.device.type == "cpu")

    def empty(self, device: torch.device) -> Tensor:
        """On the CPU, or on `device` if the original was not there.

        Raises:
            NodeError: no such dtype.
        """
        if self.dtype not in _DTYPES:
            raise NodeError(f"a tensor dict holds {self.dtype!r}, which is no dtype that travels")
        place = torch.device("cpu") if self.on_cpu else device
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device=place)


class _Outline(msgspec.Struct, frozen=True):
    tensors: dict[str, TensorSpec]
    values: dict[str, Any]
    order: list[str]


def outline(items: TensorDict) -> tuple[bytes, list[Tensor]]:
    """The dict without the tensors' content, and the tensors in order."""
    tensors = {key: value for key, value in items.items() if isinstance(value, Tensor)}
    specs = {key: TensorSpec.of(tensor) for key, tensor in tensors.items()}
    values = {key: value for key, value in items.items() if key not in tensors}
    body = msgspec.msgpack.encode(_Outline(specs, values, list(items)))
    return body, list(tensors.values())


def from_outline(body: bytes, device: torch.device) -> dict[str, Any]:
    """The dict with tensors yet to be filled, in the order in which they come.

    Raises:
        NodeError: `body` is no outline.
    """
    try:
        parsed = msgspec.msgpack.decode(body, type=_Outline)
        tensors = {key: spec.empty(device) for key, spec in parsed.tensors.items()}
        return {key: {**parsed.values, **tensors}[key] for key in parsed.order}
    except (msgspec.DecodeError, KeyError) as error:
        raise NodeError(f"a tensor dict came without a sound outline: {error}") from error
