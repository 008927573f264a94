"""Replaces parts of a recorded graph by pdserve's kernels that compute the same function.

linear layers with one input     one product of packed matrices
norm modules                     the kernels' RMS norm, with the sum before it if there is one
silu(gate) * up                  the kernels' SwiGLU
norms, rotation, attention       one call of the attention backend (`attention_fusion.py`)
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from pdserve.common.model.grouped_weight import GroupedWeight
from pdserve.common.model.hf.attention_fusion import fuse_attention
from pdserve.common.model.hf.calls import (
    AdaptedProduct,
    Norm,
    PackedCall,
    Product,
    Value,
    pair,
    part,
    size_of,
    slice_of,
)
from pdserve.common.model.hf.packed import PackedLinear
from pdserve.common.model.hf.program import drop_unused
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.weights import WeightMatrix

Release = Callable[[Tensor], None]
Groups = Sequence[tuple[str, ...]]
Products = Mapping[tuple[str, ...], Product]
"""Names of the fused parameters → product."""
ROUNDING = 4.0  # rounding steps by which two implementations of a norm may differ


def fuse(
    graphs: Sequence[Graph],
    tensors: dict[str, Tensor],
    kernels: Kernels,
    layers: frozenset[int],
    adapted: Collection[str],
    tables: Set[str],
    release: Release,
) -> tuple[Groups, Products]:
    """Rewrites the graphs in place. Returns the groups of adapted linear layers that became one
    product, and all products.

    Args:
        layers: indices of the layers whose attention the backend computes unchanged.
        adapted: names of linear layers that may have LoRA adapters.
        tables: names of embeddings that are products too, because a graph also multiplies by them
            (tied heads).
        release: called with tensors whose values have been copied and are no longer needed.
    """
    for graph in graphs:
        drop_unused(graph)
    linears = _Linears(graphs, tensors, kernels, release)
    groups = linears.replace(adapted, tables)
    for graph in graphs:
        _fuse_swiglu(graph, kernels)
        fuse_attention(graph, layers)
        drop_unused(graph)
        _fuse_sums(graph)
    return groups, linears.products


# ---- norms ----


def norms_of(model: nn.Module, kernels: Kernels) -> Iterator[tuple[nn.Module, Norm]]:
    """Yields the modules that compute an RMS norm, found by comparing their results."""
    for module in model.modules():
        weights = list(module.parameters(recurse=False))
        if len(weights) != 1 or weights[0].ndim != 1 or list(module.children()):
            continue
        if (norm := _as_norm(module, weights[0].data, kernels)) is not None:
            yield module, norm


def _as_norm(module: Any, weight: Tensor, kernels: Kernels) -> Norm | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0))
    x = torch.cat((x, x * eps**0.5)).to(weight.device, weight.dtype)  # small inputs show `eps`
    try:
        expected = module.forward(x)
    except Exception:  # a module with other inputs
        return None
    factors = (weight,) if weight.dtype != torch.float32 else (weight, 1.0 + weight)  # Gemma's
    for norm in (Norm(factor, eps, kernels) for factor in factors):
        found = norm(x)
        step = ROUNDING * torch.finfo(x.dtype).eps
        same = found.shape == expected.shape and found.dtype == expected.dtype
        if same and torch.allclose(found, expected, rtol=step, atol=step * 1e-3):
            return norm
    return None


# ---- linear layers ----


@dataclass(frozen=True, slots=True)
class _Linear:
    """A call that multiplies by a parameter."""

    node: Value
    x: Value
    weight: str
    bias: str | None
    transposed: bool  # the parameter is `[in, out]`
    packed: PackedLinear | None = None  # which has no parameter


def _linear(node: Value) -> _Linear | None:
    if isinstance(node.target, PackedCall):
        linear = node.target.linear
        bias = None if linear.bias is None else f"{node.target.name}.bias"
        return _Linear(node, node.args[0], f"{node.target.name}.weight", bias, False, linear)
    if node.kwargs or node.target not in (F.linear, torch.addmm):
        return None
    x, weight, bias = (*node.args, None)[:3]
    if node.target is torch.addmm:
        bias, x, weight = node.args
    if not _is_tensor(weight) or not (bias is None or _is_tensor(bias)):
        return None
    name = None if bias is None else bias.target
    return _Linear(node, x, weight.target, name, node.target is torch.addmm)


def _is_tensor(value: Value) -> bool:
    return isinstance(value, Node) and value.op == "get_attr"


class _Linears:
    """Replaces linear layers in several graphs, which may share tensors."""

    def __init__(
        self,
        graphs: Sequence[Graph],
        tensors: dict[str, Tensor],
        kernels: Kernels,
        release: Release,
    ) -> None:
        self._tensors, self._kernels, self._release = tensors, kernels, release
        self.products: dict[tuple[str, ...], Product] = {}
        self._looked_up: dict[str, list[Value]] = defaultdict(list)
        self._together: dict[Any, list[_Linear]] = defaultdict(list)
        others: set[str] = set()
        found: list[_Linear] = []
        for node in chain.from_iterable(graph.nodes for graph in graphs):
            if isinstance(node.target, PackedCall) and (linear := _linear(node)) is not None:
                found.append(linear)
            for user in node.users if node.op == "get_attr" else ():
                linear = _linear(user)
                if linear is not None and linear.weight == node.target:
                    found.append(linear)
                elif user.target is F.embedding and user.args[1] is node:
                    self._looked_up[str(node.target)].append(user)
                elif linear is None:
                    others.add(str(node.target))
        self._others = others
        self._group([each for each in found if each.weight not in others])

    def _group(self, linears: Sequence[_Linear]) -> None:
        """Groups linear layers of one module that have the same input."""
        counts = Counter(each.weight for each in linears)
        for each in linears:
            alone = each.weight in self._looked_up or counts[each.weight] > 1
            owner = each.weight if alone else each.weight.rsplit(".", 2)[0]
            if each.packed is not None or self._tensors[each.weight].ndim == 2:
                kind = each.bias is None, each.transposed, each.packed is None
                self._together[each.x, owner, *kind].append(each)

    def replace(self, adapted: Collection[str], tables: Set[str]) -> Groups:
        groups = []
        for group in self._together.values():
            product = self._product(group)
            names = tuple(each.weight.removesuffix(".weight") for each in group)
            if any(name in adapted for name in names):
                groups.append(names)
                self._put(AdaptedProduct(product, names[0]), product.width, group)
            else:
                self._put(product, product.width, group)
            self._look_up(group[0].weight, product)
        for name in self._looked_up.keys() & tables - self._others:
            if (name,) not in self.products:
                self._look_up(name, self._made((name,), [self._tensors.pop(name)], None))
        return groups

    def _look_up(self, name: str, product: Product) -> None:
        for node in self._looked_up.get(name, ()):
            node.target, node.args, node.kwargs = product.rows, (node.args[0],), {}

    def _put(self, call: Product | AdaptedProduct, width: int, group: Sequence[_Linear]) -> None:
        first = group[0].node
        if len(group) == 1:
            first.target, first.args = call, (group[0].x,)
            return
        graph, start = first.graph, 0
        with graph.inserting_after(group[0].x):
            whole = graph.create_node("call_function", call, (group[0].x,), name="v")
        whole.meta["shape"] = (*first.meta["shape"][:-1], width)
        for each in group:
            each.node.target, each.node.args = part, (whole, start, size_of(each.node))
            start += size_of(each.node)

    def _product(self, group: Sequence[_Linear]) -> Product:
        names = tuple(each.weight for each in group)
        if names in self.products:
            return self.products[names]
        if group[0].packed is not None:
            self.products[names] = _joined([each.packed for each in group if each.packed])
        else:
            weights = [self._tensors.pop(name) for name in names]
            biases = [self._tensors[each.bias] for each in group if each.bias is not None]
            bias = torch.cat(biases) if biases else None
            self._made(names, weights, bias, group[0].transposed)
        return self.products[names]

    def _made(
        self,
        names: tuple[str, ...],
        weights: Sequence[Tensor],
        bias: Tensor | None,
        transposed: bool = False,
    ) -> Product:
        columns = [each.t() for each in weights] if transposed else weights
        shape = sum(map(len, columns)), columns[0].shape[1]
        matrix = WeightMatrix(weights[0].new_empty(shape), self._kernels)
        torch.cat(list(columns), out=matrix.tensor)
        matrix.pack()
        for weight in weights:
            self._release(weight)
        self.products[names] = Product(matrix, bias, shape[0])
        return self.products[names]


def _joined(linears: Sequence[PackedLinear]) -> Product:
    """Returns the fused product of packed layers, and releases their weights."""
    matrix = GroupedWeight.joined([each.packed for each in linears])
    biases = [each.bias.data for each in linears if each.bias is not None]
    for each in linears:
        del each.packed
    return Product(matrix, torch.cat(biases) if biases else None, matrix.outputs)


# ---- activations and sums ----


def _fuse_swiglu(graph: Graph, kernels: Kernels) -> None:
    def swiglu(x: Tensor) -> Tensor:
        found = kernels.silu_and_mul(x.reshape(-1, x.shape[-1]))
        return found.view(*x.shape[:-1], -1)

    for node in graph.nodes:
        factors = pair(node, torch.Tensor.mul)
        for gate, up in (factors, factors[::-1]) if factors else ():
            if gate.target is not F.silu:
                continue
            (whole, start), other = slice_of(gate.args[0]), slice_of(up)
            if (start, other) == (0, (whole, size_of(up))) and size_of(whole) == 2 * size_of(node):
                node.target, node.args = swiglu, (whole,)
                break


def _fuse_sums(graph: Graph) -> None:
    """Fuses a residual addition with the norm after it."""
    for node in list(graph.nodes):
        total: Value = node.args[0] if isinstance(node.target, Norm) else None
        terms = pair(total, torch.Tensor.add)
        if terms is None or len(node.meta["shape"]) != 3:
            continue
        if any(each.meta["shape"] != node.meta["shape"] for each in terms):
            continue
        with graph.inserting_before(total):
            both = graph.call_function(node.target.after_sum, terms)
            found = [graph.call_function(operator.getitem, (both, index)) for index in range(2)]
        for old, new in zip((total, node), found, strict=True):
            new.meta.update(old.meta)
            old.replace_all_uses_with(new)
        graph.erase_node(node)
        graph.erase_node(total)
