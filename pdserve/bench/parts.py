"""Times the parts of a step with clocks around functions and methods of the model.

torch's profiler does not do: it sees only torch operators, and a step also runs other kernels. A
part's time excludes the parts it calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

from pdserve.common.model import attention
from pdserve.common.model.attention import SlotMapping
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.latent import LatentAttention
from pdserve.common.model.layers import (
    MLP,
    ColumnParallelLinear,
    ParallelLMHead,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from pdserve.common.model.moe import MoE
from pdserve.common.model.rotary import RotaryEmbedding
from pdserve.common.worker import runner
from pdserve.common.worker.peaks import Clock

_CALIBRATION = 2000  # calls

REST = "Python and the rest"
# (part, class or module, names of its functions). No names: all public methods of the class.
# `linear` is replaced by the layer's own name.
Owner = Any
PARTS: tuple[tuple[str, Owner, tuple[str, ...]], ...] = (
    ("inputs", runner, ("flatten",)),
    ("embedding", VocabParallelEmbedding, ()),
    ("norms", RMSNorm, ()),
    ("linear", ColumnParallelLinear, ("__call__",)),
    ("linear", RowParallelLinear, ("__call__", "partial", "addend")),
    ("rope", RotaryEmbedding, ()),
    ("rope", attention, ("apply_rotary",)),
    ("KV write", SlotMapping, ("write",)),
    ("activation", MLP, ("__call__", "inner")),
    ("experts", MoE, ("__call__",)),
    ("residuals", CausalLM, ("forward", "compute_logits")),
    ("logits", ParallelLMHead, ("__call__",)),
    ("sampling", runner, ("sample",)),
    (REST, runner.ModelRunner, ("run",)),
)
# The attention backend's methods, and the kernels that an instance holds. A kernel that applies
# rotary embedding and writes KV in one call counts as KV write.
METHODS = {
    "prepare": "inputs",
    "attend": "attention",
    "forward": "attention",
    "attend_latents": "attention",
}
KERNELS = {"_rotate_and_cache": "KV write"}
LINEARS = {name: name for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}
OF_LATENTS = {"down_proj": "qkv_proj", "query_proj": "qkv_proj", "o_proj": "o_proj"}
ORDER = (
    "inputs", "embedding", "norms", "qkv_proj", "rope", "KV write", "attention", "o_proj",
    "gate_up_proj", "activation", "down_proj", "experts", "residuals", "logits", "sampling", REST,
)  # fmt: skip


class PartTimer:
    """Collects seconds by part in `seconds` while `installed`. For one thread."""

    def __init__(self, model: CausalLM, clock: Clock) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._model = model
        self._clock = clock
        self._inner: list[float] = [0.0]  # per part on the stack: seconds of the parts it called
        self._own_cost = 0.0
        self._names = _names_of_linears(model)
        self._calibrate()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Computes layers part by part meanwhile, not in one call."""
        found = [(*place, vars(place[1])[place[2]]) for place in self._places()]
        native_layers, self._model.native_layers = self._model.native_layers, None
        try:
            for part, owner, name, function in found:
                setattr(owner, name, self._timed(part, function))
            yield
        finally:
            self._model.native_layers = native_layers
            for _, owner, name, function in found:
                setattr(owner, name, function)

    def _places(self) -> Iterator[tuple[str, Owner, str]]:
        """Yields (part, owner, attribute name) of each function to time."""
        for part, owner, names in PARTS:
            yield from ((part, owner, name) for name in names or _methods(owner))
        backends = self._model.attentions  # of one class
        for cls in type(backends[0]).__mro__:
            for name in METHODS.keys() & _methods(cls):
                yield METHODS[name], cls, name
        for backend in backends:
            for name in KERNELS.keys() & vars(backend).keys():
                yield KERNELS[name], backend, name

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        inner, clock, names = self._inner, self._clock, self._names

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            started = clock()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = clock() - started
                own = names.get(id(args[0]), "experts") if part == "linear" else part
                self.seconds[own] += elapsed - inner.pop()
                inner[-1] += elapsed + self._own_cost

        return timed

    def _calibrate(self) -> None:
        """Measures the overhead that a timed call adds to the part that calls it."""
        nothing = self._timed("nothing", lambda: None)
        started = self._clock()
        for _ in range(_CALIBRATION):
            nothing()
        elapsed = self._clock() - started
        self._own_cost = max(0.0, (elapsed - self.seconds.pop("nothing")) / _CALIBRATION)
        self._inner[:] = [0.0]


def _methods(cls: type) -> tuple[str, ...]:
    """Returns the names of the class's public methods and `__call__`."""
    return tuple(
        name
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType) and not getattr(value, "__isabstractmethod__", False)
        if name != "shards" and (name == "__call__" or name[0] != "_")
    )


def _names_of_linears(model: CausalLM) -> dict[int, str]:
    return {
        id(getattr(part, name)): shown
        for layer in model.layers
        for part in (layer.attention, layer.mlp)
        for name, shown in (OF_LATENTS if isinstance(part, LatentAttention) else LINEARS).items()
        if hasattr(part, name)
    }
