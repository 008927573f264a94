"""A view of a checkpoint whose quantized weights read as plain float32 ones.

    FP8, INT8    X and X_scale_inv or X_scale    →  X
    MXFP4        X_blocks and X_scales           →  X

A part of a weight is dequantized when it is read, and only the bytes it needs are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.quantization import Quantization
from pdserve.common.core.stored_weights import (
    GGUF,
    MXFP4,
    StoredWeights,
    numbers_of,
    scales_of,
)
from pdserve.common.model.checkpoint import Checkpoint, StoredTensor, text_model
from pdserve.common.model.sharding import ranges

_SCALED_DTYPES = ("F8_E4M3", "I8")
_SCALES = ("_scale_inv", "_scale")
# Scales of activations and of KV; pdserve quantizes neither with them.
_UNUSED = ("input_scale", "activation_scale", "input_scale_ub", ".k_scale", ".v_scale", ".q_scale")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor([*_FP4, *(-value for value in _FP4)])
_FP4_BLOCK = 32  # weights with one scale, in 16 bytes
_EXPONENT_BIAS = 127


def model_view(spec: ModelSpec, checkpoint: Checkpoint) -> Checkpoint:
    """Returns the text model's tensors, dequantized. Raises ConfigError as `dequantized`."""
    kind = spec.quantization
    kept = kind if kind is not None and kind.scaled else None
    return dequantized(text_model(checkpoint) if spec.towers else checkpoint, spec.stored, kept)


def dequantized(
    checkpoint: Checkpoint, stored: StoredWeights | None, kept: Quantization | None = None
) -> Checkpoint:
    """Returns the view; the checkpoint itself if nothing is to be dequantized. `kept`: covers the
    FP8 and INT8 weights that are not dequantized.

    Raises:
        ConfigError: a quantized weight has no scale, or one of another shape.
    """
    if stored is None or stored.kind.startswith(GGUF):  # `gguf_weights.py` reads those
        return checkpoint
    if stored.kind == MXFP4:
        return _mxfp4_view(checkpoint)
    return _scaled_view(checkpoint, stored, kept)


# ---- FP8 and INT8 ----


def _scaled_view(
    checkpoint: Checkpoint, stored: StoredWeights, kept: Quantization | None
) -> Checkpoint:
    view: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for name, tensor in checkpoint.items():
        if tensor.get_dtype() not in _SCALED_DTYPES:
            view[name] = tensor
            continue
        scale = next((name + each for each in _SCALES if name + each in checkpoint), None)
        if scale is None:
            raise ConfigError(f"{name} is {tensor.get_dtype()} but has no {name}{_SCALES[0]}")
        scaled = _Scaled(scale, tensor, checkpoint[scale], stored.block)
        if kept is not None and kept.covers(name.removesuffix(".weight")):
            view[numbers_of(name)], view[scales_of(name)] = _Numbers(tensor), _Scales(scaled, kept)
        else:
            view[name] = scaled
        used.add(scale)
    return {n: t for n, t in view.items() if n not in used and not n.endswith(_UNUSED)}


class _Scaled:
    """A tensor times scales; `steps[d]` consecutive elements along dimension d share a scale."""

    def __init__(
        self, name: str, numbers: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None
    ) -> None:
        self._numbers, self._scale = numbers, scale
        shape, scales = numbers.get_shape(), scale.get_shape()
        if len(scales) < len(shape):  # a scale per tensor or per output channel
            scales = [*scales, *[1] * (len(shape) - len(scales))]
        self._scales = scales
        blocks = (*shape[:-2], *(block or shape[-2:]))
        self._steps = [
            1 if count == size else size if count == 1 else step
            for count, size, step in zip(scales, shape, blocks, strict=True)
        ]
        if scales != [-(-n // step) for n, step in zip(shape, self._steps, strict=True)]:
            raise ConfigError(f"{name} of shape {scale.get_shape()} does not fit weights {shape}")

    def get_shape(self) -> list[int]:
        return self._numbers.get_shape()

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        scale = self._scale[()].float().reshape(self._scales)
        for dim, (start, end) in enumerate(ranges(index, self.get_shape())):
            if self._scales[dim] > 1:
                places = torch.arange(start, end) // self._steps[dim]
                scale = scale.index_select(dim, places)
        return self._numbers[index].float().mul_(scale)

    def by_rows(self) -> Tensor:
        """Returns the scales of a matrix, `[out, groups]`."""
        scale = self._scale[()].float().reshape(self._scales)
        places = torch.arange(self.get_shape()[0]) // self._steps[0]
        return scale.index_select(0, places) if len(scale) > 1 else scale.expand(len(places), -1)


class _Numbers:
    """The numbers of a weight as bytes."""

    def __init__(self, numbers: StoredTensor) -> None:
        self._numbers = numbers

    def get_shape(self) -> list[int]:
        return self._numbers.get_shape()

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index: Any) -> Tensor:
        return self._numbers[index].view(torch.uint8)


class _Scales:
    """The scales of a weight, float32 `[out, groups]`."""

    def __init__(self, scaled: _Scaled, kept: Quantization) -> None:
        self._scaled, (rows, inputs) = scaled, scaled.get_shape()
        self._shape = [rows, kept.groups(0, inputs, inputs)[1]]

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        return self._scaled.by_rows().expand(self._shape)[index]


# ---- MXFP4 ----


def _mxfp4_view(checkpoint: Checkpoint) -> Checkpoint:
    view = dict(checkpoint)
    for blocks in [name for name in checkpoint if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        if f"{name}_scales" not in checkpoint:
            raise ConfigError(f"{blocks} has no {name}_scales")
        view[name] = _Mxfp4(name, view.pop(blocks), view.pop(f"{name}_scales"))
    return view


class _Mxfp4:
    """`[experts, in, out]` of uint8 blocks `[experts, out, in / 32, 16]`, two numbers a byte (low
    bits first), and a power of two for each block. gpt-oss has inputs before outputs."""

    def __init__(self, name: str, blocks: StoredTensor, scales: StoredTensor) -> None:
        self._blocks, self._scales = blocks, scales
        shape = blocks.get_shape()
        if len(shape) != 4 or scales.get_shape() != shape[:3] or 2 * shape[3] != _FP4_BLOCK:
            raise ConfigError(f"{name}_blocks {shape} and _scales {scales.get_shape()} do not fit")

    def get_shape(self) -> list[int]:
        experts, outputs, blocks, _ = self._blocks.get_shape()
        return [experts, blocks * _FP4_BLOCK, outputs]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        experts, inputs, outputs = ranges(index, self.get_shape())
        first, last = inputs[0] // _FP4_BLOCK, -(-inputs[1] // _FP4_BLOCK)
        part = (slice(*experts), slice(*outputs), slice(first, last))
        packed = self._blocks[*part, slice(None)]
        values = _FP4_VALUES[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()]
        exponents = self._scales[part].int() - _EXPONENT_BIAS
        whole = torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)
        start = inputs[0] - first * _FP4_BLOCK
        return whole.narrow(-1, start, inputs[1] - inputs[0]).transpose(1, 2)
