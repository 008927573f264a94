"""Runs the Triton kernels of `common/model/kernels/gpu` where the tests run: on the GPU if there is
one, else on the CPU in Triton's interpreter. Import this before a module of that package.

The interpreter keeps bfloat16 as 16-bit integers. Its own `dot` multiplies these integers, and its
conversions to bfloat16 truncate, where a GPU rounds to nearest. Both are mended here. So are the
functions that Triton has in Triton (`tl.sum`), which were defined when Triton was imported. The
interpreter replaces functions of Triton while it runs a kernel, so threads take turns.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np
import torch
import triton
from triton.language import bfloat16, float32, standard
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from pdserve.common.model.kernels.gpu import launch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), float32)


def _mend() -> None:
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    convert = InterpreterBuilder.create_fp_to_fp

    def exact_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(builder, _widened(a), _widened(b), *rest)

    def rounding(builder: Any, source: Any, target: Any) -> Any:
        if target.scalar != bfloat16 or source.dtype.scalar == bfloat16:
            return cast(builder, source, target)
        rounded = torch.tensor(source.data.astype(np.float32)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), bfloat16)

    def converting(builder: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.scalar == bfloat16:
            return rounding(builder, source, target)
        return convert(builder, source, target, mode)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = exact_dot, rounding
    InterpreterBuilder.create_fp_to_fp = converting
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton 3.6 gives NumPy's `int` an array of one number, which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
    for name, value in list(vars(standard).items()):
        if isinstance(value, triton.JITFunction):
            interpreted = InterpretedFunction(value.fn)
            for module in (standard, triton.language):
                if getattr(module, name, None) is value:
                    setattr(module, name, interpreted)


def _take_turns() -> None:
    run, turn = launch._run, Lock()

    def one_at_a_time(kernel: Any, grid: Any, args: Any, constants: Any) -> None:
        with turn:
            run(kernel, grid, args, constants)

    launch._run = one_at_a_time


if DEVICE.type == "cpu":
    triton.knobs.runtime.interpret = True  # read where a kernel is defined
    _mend()
    _take_turns()
