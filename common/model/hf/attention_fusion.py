"""Finds norms, rotation and attention of a layer in a recorded graph, and replaces them by one call
of the attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pdserve.common.model.hf.calls import Norm, Value, pair, size_of, slice_of
from pdserve.common.model.hf.trace import Attend
from pdserve.common.model.rotary import Angles

SAME_ON_BOTH = ("unsqueeze", "to", "float", "cos", "sin")
"""Functions that leave two equal halves equal."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedAttention:
    """Norms, rotation and attention of a layer, from its product `[1, T, (heads + 2 · KV) · D]`."""

    layer: int
    norms: tuple[Norm, Norm] | None
    takes_step = True

    def __call__(self, step: Any, qkv: Tensor, angles: Angles | None) -> Tensor:
        found: Tensor = step.attend_fused(self.layer, qkv[0], self.norms, angles)
        return found[None]


def _angles(cos: Tensor, sin: Tensor) -> Angles:
    """Returns the first halves of `[1, 1, T, D]` or `[1, T, 1, D]`; the second halves are equal."""
    half = cos.shape[-1] // 2
    first, second = (each.reshape(-1, 1, 2 * half)[..., :half].contiguous() for each in (cos, sin))
    return first, second


def fuse_attention(graph: Graph, layers: frozenset[int]) -> None:
    """Replaces the attention of `layers`, whose style the backend supports."""
    angles: dict[tuple[Value, Value], Value] = {}
    for node in list(graph.nodes):
        if not isinstance(node.target, Attend) or node.target.layer not in layers:
            continue
        if (found := _found(node)) is None:
            continue
        if found.turn is not None and found.turn not in angles:
            with graph.inserting_before(node):
                angles[found.turn] = graph.call_function(_angles, found.turn)
        given = None if found.turn is None else angles[found.turn]
        node.target = FusedAttention(node.target.layer, found.norms)
        node.args = (found.product, given)


@dataclass(frozen=True, slots=True)
class _Found:
    product: Value  # `[1, T, (heads + 2 · kv_heads) · D]`
    norms: tuple[Norm, Norm] | None  # of queries and keys
    turn: tuple[Value, Value] | None  # cos and sin


def _found(node: Value) -> _Found | None:
    q, k, v = node.args[:3]
    (q, turn), (k, other_turn) = _turned(q), _turned(k)
    heads = [_heads(each) for each in (q, k, v)]
    if turn != other_turn or None in heads:
        return None
    products, starts, (norm, other_norm, none) = zip(*heads, strict=True)  # type: ignore[arg-type]
    (queries, dim), keys = (q.meta["shape"][1], size_of(q)), k.meta["shape"][1]
    right = (0, queries * dim, (queries + keys) * dim)
    if len(set(products)) > 1 or starts != right or size_of(products[0]) != right[2] + keys * dim:
        return None
    if none is not None or (norm is None) != (other_norm is None):
        return None
    if norm is None:
        return _Found(products[0], None, turn)
    same = norm.eps == other_norm.eps and {len(norm.weight), len(other_norm.weight)} == {dim}
    return _Found(products[0], (norm, other_norm), turn) if same else None


def _heads(value: Value) -> tuple[Value, int, Norm | None] | None:
    """Returns (product, first column, norm) of `[1, heads, T, D]`."""
    norm, turned = None, False
    while isinstance(value, Node):
        if isinstance(value.target, Norm) and norm is None:
            norm = value.target
        elif value.target is torch.Tensor.transpose and {*value.args[1:]} == {1, 2} and not turned:
            turned = True
        elif value.target in (torch.Tensor.view, torch.Tensor.reshape) and turned:
            product, start = slice_of(value.args[0])
            return product, start, norm
        else:
            break
        value = value.args[0]
    return None


def _turned(value: Value) -> tuple[Value, tuple[Value, Value] | None]:
    """Returns (x, (cos, sin)) of `x * cos + cat((-second half, first half)) * sin`."""
    plain = value, None
    sums = pair(value, torch.Tensor.add) or (None, None)
    straight, crossed = (pair(each, torch.Tensor.mul) for each in sums)
    if straight is None or crossed is None:
        return plain
    (x, cos), (swapped, sin) = straight, crossed
    if swapped.target is not torch.cat or not _are_halves(cos) or not _are_halves(sin):
        return plain
    parts, half = swapped.args[0], size_of(x) // 2
    if len(parts) != 2 or parts[0].target is not torch.Tensor.neg or size_of(cos) != 2 * half:
        return plain
    second, first = parts[0].args[0], parts[1]
    right = (x, (..., slice(half, None))), (x, (..., slice(None, half)))
    joined = swapped.kwargs.get("dim", swapped.args[-1]) == -1
    return (x, (cos, sin)) if joined and (second.args, first.args) == right else plain


def _are_halves(value: Value) -> bool:
    """Returns whether the two halves of the last dimension are equal."""
    while isinstance(value, Node) and value.args:
        if value.target is torch.cat:
            parts = value.args[0]
            return len(parts) == 2 and parts[0] is parts[1]  # type: ignore[arg-type,index]
        scaled = value.target is torch.Tensor.mul and isinstance(value.args[1], float | int)
        if not scaled and getattr(value.target, "__name__", "") not in SAME_ON_BOTH:
            return False
        value = value.args[0]
    return False
