"""The layers of a stage in one call of the native kernels.

The models that CPUs serve are small: between products, a layer's ten calls from Python take as long
as some of the products. `layers.cpp` makes the same calls, so the results have the same bits. It
returns where Python has work between two layers: to add up ranks' sums, and to compute experts.

Buffers are kept from step to step, and grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pdserve.common.model.attention import AttentionBackend
from pdserve.common.model.attention_native import NO_WINDOW, NativeAttention, NativeContext
from pdserve.common.model.decoder_layer import Attention, DecoderLayer
from pdserve.common.model.kernels.native import NativeKernels, call_of
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.kernels.packed import Packed, pointer
from pdserve.common.model.layers import MLP, Linear, RMSNorm, RowParallelLinear
from pdserve.common.model.moe import MoE
from pdserve.common.model.rotary import Angles

DTYPES = (torch.float32, torch.bfloat16)  # for which there are products


# ---- the structs of `layers.cpp` ----


class _Norm(Structure):
    _fields_ = (("weight", c_void_p), ("eps", c_double))


class _Layer(Structure):
    _fields_ = (
        ("group", c_int64),
        ("index", c_int64),
        ("input_norm", _Norm),
        ("qkv", Packed),
        ("o", Packed),
        ("q_norm", _Norm),
        ("k_norm", _Norm),
        ("mlp_norm", _Norm),
        ("gate_up", Packed),
        ("down", Packed),
    )


class _Group(Structure):
    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("format", c_int64),
        ("window", c_int64),
        ("chunked", c_int64),
        ("scale", c_double),
        ("cache", c_void_p),
        ("layer_bytes", c_int64),
        ("plane_bytes", c_int64),
        ("block_size", c_int64),
        ("sequences", c_int64),
        ("slots", c_void_p),
        ("rows", c_void_p),
        ("counts", c_void_p),
        ("starts", c_void_p),
        ("skipped", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
    )


class _Step(Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("size", c_int64),
        ("inputs", c_void_p),
        ("residual", c_void_p),
        ("hidden", c_void_p),
        ("sums", c_void_p),
        ("inner", c_void_p),
        ("wide", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


class NativeLayers:
    """All layers of a stage, for steps without adapters."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        table: Sequence[_Layer],
        attentions: Sequence[NativeAttention],
        kernels: NativeKernels,
    ) -> None:
        """Use `of`. `table`: describes `layers`, whose memory it points to."""
        self._layers = layers
        self._table = (_Layer * len(table))(*table)
        self._groups = (_Group * len(attentions))(*map(_group, attentions))
        self.calls = list(_calls(layers))
        self._buffers = _Buffers.of(layers, table)
        self._run_layers = kernels.function("run_layers")

    @classmethod
    def of(
        cls,
        layers: Sequence[DecoderLayer],
        places: Sequence[tuple[int, int]],
        attentions: Sequence[AttentionBackend],
        kernels: Kernels,
        dtype: torch.dtype,
    ) -> NativeLayers | None:
        """Returns the layers of loaded weights; None if the kernels lack one of their operations:
        without native kernels, in float16, with latents, or with a matrix that is not packed.

        Args:
            places: (KV group, index in its cache) of each layer.
            attentions: of each KV group.
        """
        if not isinstance(kernels, NativeKernels) or dtype not in DTYPES or not layers:
            return None
        native = [each for each in attentions if isinstance(each, NativeAttention)]
        table = [_describe(*each) for each in zip(layers, places, strict=True)]
        found = [each for each in table if each is not None]
        if len(native) < len(attentions) or len(found) < len(table):
            return None
        return cls(layers, found, native, kernels)

    def __call__(
        self,
        inputs: Tensor,
        angles: Angles,
        contexts: Sequence[NativeContext],
        kv_caches: Sequence[Tensor],
    ) -> Tensor:
        """Computes as `CausalLM.forward`, from embedded tokens `[T, hidden]` to what follows the
        last layer, `[T, hidden]`."""
        inputs = inputs.contiguous()
        held = self._buffers.of_step(inputs)
        step = _Step(
            *inputs.shape, inputs.data_ptr(), held.residual.data_ptr(), held.hidden.data_ptr(),
            pointer(held.sums), held.inner.data_ptr(), held.wide.data_ptr(),
            *(part.data_ptr() for part in angles),
        )  # fmt: skip
        for group, cache, context in zip(self._groups, kv_caches, contexts, strict=True):
            _fill(group, cache, context)
        dtype, threads, hidden = *call_of(inputs), held.hidden
        for call in self.calls:
            step.hidden = hidden.data_ptr()
            self._run_layers(
                dtype, threads, call.begin, call.end, self._table, self._groups, byref(step)
            )
            if call.finish is not None:
                hidden = call.finish(held)
        return held.residual + hidden


# ---- the calls of a step ----


@dataclass(frozen=True, slots=True)
class _Call:
    """Computes the halves `begin … end-1` of the layers, then `finish` returns their result."""

    begin: int
    end: int
    finish: Callable[[_Held], Tensor] | None  # None: it is where `Step.hidden` points to


def _calls(layers: Sequence[DecoderLayer]) -> Iterator[_Call]:
    begin = 0
    for number, layer in enumerate(layers):
        assert isinstance(layer.attention, Attention)
        for end, part in ((2 * number + 1, layer.attention.o_proj), (2 * number + 2, layer.mlp)):
            if isinstance(part, MLP):
                part = part.down_proj
            if not isinstance(part, RowParallelLinear):
                yield _Call(begin, end, partial(_computed, part))
            elif part.group.size > 1:
                yield _Call(begin, end, partial(_reduced, part))
            else:
                continue
            begin = end
    if begin < 2 * len(layers):
        yield _Call(begin, 2 * len(layers), None)


def _computed(experts: MoE, held: _Held) -> Tensor:
    return experts(held.normed).contiguous()


def _reduced(linear: RowParallelLinear, held: _Held) -> Tensor:
    assert held.sums is not None
    return linear.finish(linear.group.all_reduce(held.sums), held.hidden.dtype)


# ---- buffers ----


@dataclass(frozen=True, slots=True)
class _Held:
    """A step's buffers of T tokens; a layer's parts overwrite each other's."""

    residual: Tensor  # [T, hidden]
    hidden: Tensor  # [T, hidden]
    sums: Tensor | None  # float32 [T, hidden], with several ranks
    inner: Tensor  # [T · …]
    wide: Tensor  # [T · …]

    @property
    def normed(self) -> Tensor:
        """The input of experts, `[T, hidden]`."""
        return self.inner[: self.hidden.numel()].view_as(self.hidden)


class _Buffers:
    """Memory for the largest step so far."""

    def __init__(self, size: int, inner: int, wide: int, sums: bool) -> None:
        """Numbers per token of each buffer; see `Step` in `layers.cpp`."""
        self._size, self._inner, self._wide, self._sums = size, inner, wide, sums
        self._room: _Held | None = None

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], table: Sequence[_Layer]) -> _Buffers:
        inner = max(
            max(each.qkv.inputs, each.o.inputs, each.gate_up.inputs, each.down.inputs)
            for each in table
        )
        wide = max(max(each.qkv.rows, each.gate_up.rows) for each in table)
        attention = layers[0].attention
        assert isinstance(attention, Attention)
        return cls(table[0].o.rows, inner, wide, attention.o_proj.group.size > 1)

    def of_step(self, inputs: Tensor) -> _Held:
        """Returns buffers for `inputs` `[T, hidden]`, in their dtype."""
        tokens = len(inputs)
        room = self._room
        if room is None or len(room.hidden) < tokens:
            self._room = room = self._held(inputs, 1 << (tokens - 1).bit_length())
        return _Held(
            room.residual[:tokens],
            room.hidden[:tokens],
            None if room.sums is None else room.sums[:tokens],
            room.inner,
            room.wide,
        )

    def _held(self, like: Tensor, tokens: int) -> _Held:
        sums = like.new_empty(tokens, self._size, dtype=torch.float32) if self._sums else None
        return _Held(
            like.new_empty(tokens, self._size),
            like.new_empty(tokens, self._size),
            sums,
            like.new_empty(tokens * self._inner),
            like.new_empty(tokens * self._wide),
        )


# ---- tables ----


def _describe(layer: DecoderLayer, place: tuple[int, int]) -> _Layer | None:
    """Returns the layer's entry of the table; None if a part of it is not native."""
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention):
        return None
    linears: list[Linear] = [attention.qkv_proj, attention.o_proj]
    if isinstance(mlp, MLP):
        linears += mlp.gate_up_proj, mlp.down_proj
    packed = [found for found in map(_packed, linears) if found is not None]
    if len(packed) < len(linears):
        return None
    q_norm, k_norm = map(_norm, attention.qk_norms or (None, None))
    of_mlp = packed[2:] or (Packed(), Packed())
    norms = _norm(layer.input_norm), _norm(layer.mlp_norm)
    return _Layer(*place, norms[0], *packed[:2], q_norm, k_norm, norms[1], *of_mlp)


def _packed(linear: Linear) -> Packed | None:
    found = linear.weight.packed()
    if found is not None:
        found.bias = pointer(linear.bias)
    return found


def _norm(norm: RMSNorm | None) -> _Norm:
    return _Norm() if norm is None else _Norm(norm.weight.data_ptr(), norm.eps)


def _group(attention: NativeAttention) -> _Group:
    shape = attention.shape
    return _Group(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, attention.format,
        shape.window or NO_WINDOW, shape.chunked, shape.scale,
    )  # fmt: skip


def _fill(group: _Group, kv_cache: Tensor, context: NativeContext) -> None:
    """Sets a step's part. The arrays of `context` must outlive the step."""
    size = kv_cache.itemsize
    group.cache = kv_cache.data_ptr()
    group.layer_bytes, group.plane_bytes = kv_cache.stride(0) * size, kv_cache.stride(1) * size
    group.block_size, group.sequences = context.block_size, len(context.rows)
    group.slots = context.slots.ctypes.data
    group.rows = context.rows.ctypes.data
    group.counts = context.counts.ctypes.data
    group.starts = context.starts.ctypes.data
    group.skipped = context.skipped.ctypes.data
    group.tables = context.tables.ctypes.data
    group.table_stride = context.tables.shape[1]
