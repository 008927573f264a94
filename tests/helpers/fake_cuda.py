"""A fake GPU: tensors on the host are real, those on `cuda` are fakes with a device, a dtype and a
shape but no values. A computation that mixes devices or makes the host wait for a value (an `item`,
a boolean index) raises. So does a Triton kernel that gets another tensor than one on `cuda`, or a
layout that it cannot know. Needs a torch that is built for CUDA, but no driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from pdserve.common.model import staging
from pdserve.common.model.kernels.gpu import launch

CUDA = torch.device("cuda", 0)
NO_CUDA = pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
CAPABILITY, MULTIPROCESSORS = (9, 0), 132  # an H100's


class _FakesOnCuda(TorchFunctionMode):
    """Makes fakes of what is created on `cuda`, pinned, or moved there."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return self._fake(args[0])
        pinned = options.pop("pin_memory", False)
        on_cuda = any(_is_cuda(each) for each in (*args[1:], *options.values()))
        if func is torch.Tensor.to and on_cuda:
            args = (self._fake(args[0]), *args[1:])
        if pinned or on_cuda:
            with self._fakes:
                return func(*args, **options)
        return func(*args, **options)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fakes.from_tensor(tensor)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def check_launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Stands in for a launch of a Triton kernel, which gets addresses: checks the tensors of `args`
    and computes nothing."""
    for each in args:
        if isinstance(each, torch.Tensor):
            assert isinstance(each, FakeTensor), f"{kernel} gets a tensor with values"
            assert each.device.type == "cuda", f"{kernel} gets a tensor on {each.device}"
            check_layout(each, (*args, *constants.values()))


def check_layout(tensor: torch.Tensor, args: tuple[Any, ...]) -> None:
    """Asserts that the kernel can find the elements of a tensor: it is contiguous from some
    dimension on, and has the strides of the dimensions before that among its other `args`."""
    dense = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size > 1 and stride != dense:
            told = any(isinstance(arg, int) and arg == stride for arg in args)
            assert told, f"the kernel of {tuple(tensor.shape)} is not told the stride {stride}"
        dense = size * stride


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on `cuda` are fakes; events and Triton's kernels do nothing."""
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_run", check_launch)
        patch.setattr(staging.Mark, "set", lambda self: None)
        patch.setattr(staging.Mark, "wait", lambda self: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        with _FakesOnCuda():
            yield
