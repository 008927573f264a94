"""Runs a recorded graph: straight Python that calls one function after another."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pdserve.common.model.hf.trace import Attend, Tokens

Function = Callable[..., Tensor]
PLAIN = (int, bool, float, str, type(None))


def drop_unused(graph: Graph) -> None:
    """Erases what no other node uses, and what it alone used."""
    for node in reversed(list(graph.nodes)):
        kept = node.op in ("placeholder", "output") or node.meta.get("effect")
        if not kept and not node.users:
            graph.erase_node(node)


def compiled(graph: Graph, tensors: Mapping[str, Tensor], tokens: str) -> Function:
    """Returns a function with the graph's placeholders as parameters. `tokens` is the one whose
    first dimension counts the step's tokens."""
    return _Writer(graph, tensors, tokens).function()


class _Writer:
    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor], tokens: str) -> None:
        self._graph, self._tensors, self._tokens = graph, tensors, tokens
        self._globals: dict[str, Any] = {}
        self._last = _last_uses(graph)

    def function(self) -> Function:
        inputs = [node.name for node in self._graph.nodes if node.op == "placeholder"]
        lines = [f"def run({', '.join(inputs)}):", f"    tokens = {self._tokens}.shape[0]"]
        for node in self._graph.nodes:
            if node.op == "get_attr":
                self._globals[node.name] = self._tensors[str(node.target)]
            elif node.op == "call_function":
                lines.append(f"    {node.name} = {self._call(node)}")
                if done := self._last.get(node):
                    lines.append(f"    del {', '.join(done)}")
            elif node.op == "output":
                lines.append(f"    return {self._value(node.args[0])}")
        exec(compile("\n".join(lines), "<graph>", "exec"), self._globals)
        return self._globals["run"]  # type: ignore[no-any-return]

    def _call(self, node: Node) -> str:
        args = [self._value(each) for each in node.args]
        args += [f"{key}={self._value(each)}" for key, each in node.kwargs.items()]
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        target = torch.Tensor.reshape if node.target is torch.Tensor.view else node.target
        if isinstance(target, Attend) or getattr(target, "attends", False):
            args.insert(0, "step")
        return f"{self._constant(target)}({', '.join(args)})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, Tokens):
            return f"{value.factor} * tokens"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._value(each)}, ' for each in value)})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(map(self._value, parts))})"
        if type(value) in PLAIN and value not in (float("inf"), float("-inf")):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"_{id(value)}"
        self._globals[name] = value
        return name


def _last_uses(graph: Graph) -> dict[Node, list[str]]:
    """Returns, by node, the names of results that it is the last one to use."""
    seen: set[Node] = set()
    found: dict[Node, list[str]] = {}
    for node in reversed(graph.nodes):
        found[node] = []
        for each in node.all_input_nodes:
            if each not in seen and each.op == "call_function":
                found[node].append(each.name)
            seen.add(each)
        if node not in seen and node.op == "call_function":
            found[node].append(node.name)
    return found
