"""Runs a recorded graph: calls one function after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pdserve.common.model.hf.trace import Tokens

Function = Callable[..., Tensor]


def drop_unused(graph: Graph) -> None:
    """Erases nodes that no other node uses, and then those that only they used."""
    for node in reversed(list(graph.nodes)):
        kept = node.op in ("placeholder", "output") or node.meta.get("effect")
        if not kept and not node.users:
            graph.erase_node(node)


@dataclass(frozen=True, slots=True)
class _Call:
    target: Function
    args: tuple[Any, ...]  # indices of values, or containers of them
    kwargs: Mapping[str, Any]
    result: int
    done: tuple[int, ...]  # values to free after the call


class Program:
    """Runs a graph and owns its tensors. Each value, also a constant, has an index."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor], tokens: str) -> None:
        """`tokens`: the placeholder whose first dimension counts the step's tokens."""
        self.constants: list[Any] = []
        self.calls: list[_Call] = []
        self._inputs: list[int] = []
        self._numbers: dict[Node, int] = {}
        self._multiples: dict[int, int] = {}  # factor → index of the value
        last = _last_uses(graph)
        for node in graph.nodes:
            if node.op == "output":
                self._output = self._numbers[node.args[0]]
                continue
            value = tensors[str(node.target)] if node.op == "get_attr" else None
            self._numbers[node] = self._new(value)
            if node.op == "placeholder":
                self._inputs.append(self._numbers[node])
                if node.name == tokens:
                    self._tokens = self._numbers[node]
                if node.name == "step":
                    self._step = self._numbers[node]
            elif node.op == "call_function":
                done = tuple(self._numbers[each] for each in last[node])
                self.calls.append(self._call(node, done))

    def __call__(self, *inputs: Any) -> Tensor:
        values = self.constants.copy()
        for number, given in zip(self._inputs, inputs, strict=True):
            values[number] = given
        tokens = len(values[self._tokens])
        for factor, number in self._multiples.items():
            values[number] = factor * tokens
        for call in self.calls:
            args = [values[each] if type(each) is int else each.of(values) for each in call.args]
            kwargs = {key: each.of(values) for key, each in call.kwargs.items()}
            values[call.result] = call.target(*args, **kwargs)
            for number in call.done:
                values[number] = None
        found: Tensor = values[self._output]
        return found

    def _new(self, value: Any) -> int:
        self.constants.append(value)
        return len(self.constants) - 1

    def _call(self, node: Node, done: tuple[int, ...]) -> _Call:
        target: Any = torch.Tensor.reshape if node.target is torch.Tensor.view else node.target
        args = [self._argument(each) for each in node.args]
        if getattr(target, "takes_step", False):
            args.insert(0, self._step)
        given = {key: _Nested(self._argument(each)) for key, each in node.kwargs.items()}
        return _Call(target, tuple(args), given, self._numbers[node], done)

    def _argument(self, value: Any) -> Any:
        """Returns the index of a value, or a container of indices."""
        if isinstance(value, Node):
            return self._numbers[value]
        if isinstance(value, Tokens):
            if value.factor not in self._multiples:
                self._multiples[value.factor] = self._new(None)
            return self._multiples[value.factor]
        if isinstance(value, tuple):
            return _Nested(tuple(map(self._argument, value)))
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return _Nested(tuple(map(self._argument, parts)), slice)
        return self._new(value)


@dataclass(frozen=True, slots=True)
class _Nested:
    """An argument that contains values."""

    inner: Any
    kind: type | None = None

    def of(self, values: list[Any]) -> Any:
        if type(self.inner) is int:
            return values[self.inner]
        if isinstance(self.inner, _Nested):
            return self.inner.of(values)
        parts = [values[each] if type(each) is int else each.of(values) for each in self.inner]
        return slice(*parts) if self.kind is slice else tuple(parts)


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """Returns node → values that it is the last to use."""
    seen: set[Node] = set()
    found: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        found[node] = []
        for each in node.all_input_nodes:
            if each not in seen and each.op == "call_function":
                found[node].append(each)
            seen.add(each)
        if node not in seen and node.op == "call_function":
            found[node].append(node)
    return found
