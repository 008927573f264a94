"""Records the torch functions that a transformers class calls for a step, as a graph.

The class's code runs twice on the meta device, with two different numbers of tokens. Integers that
differ between the runs are multiples of the number of tokens. Code that behaves otherwise, or reads
the values of tensors, cannot be recorded; modules that do so (experts) are recorded as one call.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.delta_net import StateInputs
from pdserve.common.model.hf.attention import Answers, Style
from pdserve.common.model.hf.indexers import IndexInputs

COUNTS = (5, 11)  # tokens of the two runs
META = torch.device("meta")
DIFFERS = "its code depends on the number of tokens"


class Untraceable(Exception):
    """The code cannot be recorded."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """An integer in a graph: a multiple of the step's tokens."""

    factor: int


@dataclass(frozen=True, slots=True)
class Attend:
    """A graph's call of a layer's attention."""

    layer: int
    style: Style
    takes_step = True

    def __call__(
        self, step: Answers, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
        chosen: Tensor | None, up: Tensor | None,
    ) -> Tensor:  # fmt: skip
        style = replace(self.style, sinks=sinks, chosen=chosen, up=up)
        return step.attend(self.layer, q, k, v, style)


@dataclass(frozen=True, slots=True)
class Recur:
    """A graph's call of a layer with a state, with the tensors among its inputs."""

    layer: int
    names: tuple[str, ...]
    inputs: Any = field(compare=False)  # a `StateInputs`, for its other fields
    takes_step = True

    def __call__(self, step: Answers, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.names, tensors, strict=True))
        return step.recur(self.layer, replace(self.inputs, **given))


@dataclass(frozen=True, slots=True)
class Index:
    """A graph's call of a layer's indexer."""

    layer: int
    inputs: IndexInputs = field(compare=False)  # for its other fields
    takes_step = True

    def __call__(self, step: Answers, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        return step.index(self.layer, replace(self.inputs, q=q, k=k, weights=weights))


Named = Mapping[int, tuple[str, Tensor]]
"""`id` of a tensor on the meta device → (name, real tensor)."""


class Recorder(TorchFunctionMode):
    """Records into `graph` the torch functions that run under it. `input` makes the inputs."""

    def __init__(self, named: Named, device: torch.device) -> None:
        super().__init__()
        self.graph = Graph()
        self.tensors: dict[str, Tensor] = {}  # tensors of the `get_attr` nodes
        self._named, self._device = named, device
        self._nodes: dict[int, tuple[Tensor, Node]] = {}  # keeps tensors alive: ids stay unique

    def input(self, name: str, like: Tensor | None = None) -> Tensor | None:
        node = self.graph.placeholder(name)
        return None if like is None else self._keep(like, node)

    def output(self, value: Tensor) -> None:
        self.graph.output(self._recorded(value))

    def call(
        self,
        target: Callable[..., Any],
        args: Any,
        like: Tensor,
        kwargs: Mapping[str, Any] | None = None,
        effect: bool = False,
    ) -> Tensor:
        """Records one call; returns a tensor with the sizes of `like`. `effect`: the call also has
        side effects."""
        return self._keep(like, self._call(target, args, kwargs or {}, effect))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        inplace = func.__name__ == "__setitem__" or func.__name__.removesuffix("__")[-1:] == "_"
        if isinstance(found, Tensor):
            self._keep(found, self._call(func, args, kwargs, inplace))
        elif isinstance(found, tuple | list) and any(isinstance(each, Tensor) for each in found):
            node = self._call(func, args, kwargs)
            for index, each in enumerate(found):
                self._keep(each, self.graph.call_function(operator.getitem, (node, index)))
        elif inplace:
            self._call(func, args, kwargs, inplace)
        return found

    def _call(self, target: Any, args: Any, kwargs: Any, effect: bool = False) -> Node:
        given = self._recorded(tuple(args)), self._recorded(dict(kwargs))
        node = self.graph.create_node("call_function", target, *given, name="v")
        node.meta["effect"] = effect
        return node

    def _keep(self, tensor: Tensor, node: Node) -> Tensor:
        node.meta["shape"] = tuple(tensor.shape)
        self._nodes[id(tensor)] = tensor, node
        return tensor

    def _recorded(self, value: Any) -> Any:
        """Returns an argument with tensors replaced by nodes."""
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._recorded, value))
        if isinstance(value, dict):
            return {key: self._recorded(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._recorded, (value.start, value.stop, value.step)))
        return self._device if value in (META, "meta") else value

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)][1]
        name, real = self._named.get(id(tensor), ("", tensor))
        if real.device.type == "meta":
            raise Untraceable("it uses a tensor made outside of the recording")
        name = name or f"constant {len(self.tensors)}"
        self.tensors[name] = real.to(self._device)
        node = self.graph.get_attr(name)
        self._keep(tensor, node)
        return node


class Recording(threading.local):
    """The active recorder of this thread, if any."""

    recorder: Recorder | None = None

    @contextmanager
    def by(self, recorder: Recorder) -> Iterator[None]:
        self.recorder = recorder
        try:
            yield
        finally:
            self.recorder = None


recording = Recording()


class RecordedRanks:
    """The ranks of `group` as `parallel.Ranks`; collectives are recorded as calls."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if (recorder := recording.recorder) is None:
            return self._group.all_reduce(tensor)
        with torch._C.DisableTorchFunction():
            like = torch.empty_like(tensor)
        return recorder.call(self._group.all_reduce, (tensor,), like, effect=True)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        if (recorder := recording.recorder) is None:
            return self._group.all_gather(tensor, dim)
        with torch._C.DisableTorchFunction():
            like = torch.cat([tensor] * self.size, dim)
        return recorder.call(self._group.all_gather, (tensor, dim), like, effect=True)


class RecordedAnswers(Answers):
    def __init__(self, recorder: Recorder, positions: Tensor) -> None:
        self._recorder, self.positions = recorder, positions

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style) -> Tensor:
        with torch._C.DisableTorchFunction():
            like = style.output(q, v)
        args = (q, k, v, style.sinks, style.chosen, style.up)
        return self._recorder.call(Attend(layer, style), args, like, effect=True)

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        with torch._C.DisableTorchFunction():
            like = inputs.output()
        given: Any = inputs
        values = {each.name: getattr(given, each.name) for each in fields(given)}
        tensors = {name: each for name, each in values.items() if isinstance(each, Tensor)}
        call = Recur(layer, tuple(tensors), inputs)
        return self._recorder.call(call, tuple(tensors.values()), like, effect=True)

    def index(self, layer: int, inputs: IndexInputs) -> Tensor:
        with torch._C.DisableTorchFunction():
            like = inputs.output()
        args = (inputs.q, inputs.k, inputs.weights)
        return self._recorder.call(Index(layer, inputs), args, like, effect=True)

    def mix(self, mixer: Any, hidden: Tensor) -> Tensor:
        raise Untraceable(f"layer {mixer.layer} has a state")


@contextmanager
def on_meta(model: nn.Module) -> Iterator[Named]:
    """Has the model's parameters and buffers on the meta device while the block runs."""
    twins: dict[int, Tensor] = {}
    named: dict[int, tuple[str, Tensor]] = {}
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            before.append((held, dict(held)))  # type: ignore[arg-type]
            for key, real in held.items():
                if real is None:
                    continue
                if id(real) not in twins:
                    twin = torch.empty_like(real, device=META)
                    if isinstance(real, nn.Parameter):
                        twin = nn.Parameter(twin, requires_grad=False)
                    twins[id(real)] = twin
                    named[id(twin)] = f"{prefix}.{key}" if prefix else key, real
                held[key] = twins[id(real)]  # type: ignore[assignment]
    try:
        yield named
    finally:
        for held, content in before:
            held.update(content)


def merged(first: Recorder, second: Recorder) -> Graph:
    """Merges two runs into a graph for any number of tokens. Raises Untraceable."""
    ours, others = list(first.graph.nodes), list(second.graph.nodes)
    if len(ours) != len(others):
        raise Untraceable(DIFFERS)
    same = dict(zip(others, ours, strict=True))
    for node, other in zip(ours, others, strict=True):
        if node.op != other.op or _other_target(node.target, other.target):
            raise Untraceable(DIFFERS)
        args = _merge((node.args, node.kwargs), (other.args, other.kwargs), same)
        node.args, node.kwargs = args
    return first.graph


def _other_target(a: Any, b: Any) -> bool:
    if isinstance(a, Attend) and isinstance(b, Attend):
        return a.layer != b.layer
    return bool(a != b)


def _merge(a: Any, b: Any, same: Mapping[Node, Node]) -> Any:
    if type(a) is not type(b):
        raise Untraceable(DIFFERS)
    if isinstance(a, Node):
        if same[b] is not a:
            raise Untraceable(DIFFERS)
        return a
    if isinstance(a, tuple | list):
        if len(a) != len(b):
            raise Untraceable(DIFFERS)
        return tuple(_merge(x, y, same) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return {key: _merge(a[key], b[key], same) for key in a}
    if isinstance(a, slice):
        parts = ((a.start, b.start), (a.stop, b.stop), (a.step, b.step))
        return slice(*(_merge(x, y, same) for x, y in parts))
    if type(a) is int and a != b:
        factor, rest = divmod(a, COUNTS[0])
        if rest or factor * COUNTS[1] != b:
            raise Untraceable(f"a size is {a} for {COUNTS[0]} tokens and {b} for {COUNTS[1]}")
        return Tokens(factor)
    if type(a) is not int and a != b:
        raise Untraceable(DIFFERS)
    return a
