"""Splits a model of transformers over tensor-parallel ranks, in place.

A class's `tp_plan` states which of its linear layers are split by rows and which by columns. If a
class has no plan, or its code does not run with a part of the heads, each linear layer of the
decoder layers is split by rows and its output is gathered, which is correct for any code. In both
cases a rank attends with its own heads over its own KV heads (`model.py`). Experts are split within
or among the ranks by the class's plan, and embedding and head by rows of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pdserve.common.model.hf.latents import of_latents

GATHERED, PLANNED = "gathered", "planned"

KV = ("k_proj", "v_proj")  # suffixes of the layers that compute keys and values
_WHOLE = ("x_proj", "dt_proj")  # suffixes of the layers whose matrices `mamba.py` applies
_AS_IT_IS = {
    "replicate",
    "replicated_with_grad_allreduce",  # replicated: there are no gradients here
    "mla_kv_a_proj",
    "local_params",
}
"""transformers' styles that split nothing."""
_PARAMETERS = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "grouped_gemm": 0}
"""transformers' style of other parameters → the dimension that it splits."""


class Unsplittable(Exception):
    """A model cannot be split in this way."""


class Ranks(Protocol):
    """The part of `GroupCoordinator` that a split model needs."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor: ...

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class OutlineRanks:
    """Rank 0 of a group for a model on the meta device."""

    size: int
    rank: int = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([tensor] * self.size, dim)


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a parameter: ranges of one dimension of the whole."""

    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Any) -> Tensor:
        """Returns the part of a tensor; of a checkpoint's tensor only the part is read."""
        before = (slice(None),) * self.dim
        parts = [whole[(*before, slice(start, end))] for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def split(
    model: Any, group: Ranks, way: str, layers: str, gather_kv: bool, spread: bool = False
) -> dict[str, Cut]:
    """Splits `model`, on any device, and returns parameter name → cut.

    Args:
        way: `PLANNED` or `GATHERED`.
        layers: the name of the model's list of decoder layers.
            gather_kv: each rank computes all KV heads, because the ranks do not divide them.
            spread: ranks hold whole experts, different ones each.

    Raises:
        Unsplittable: the class's plan does not fit these sizes.
    """
    return _Splitter(model, group, layers, gather_kv, spread).run(way)


class _Splitter:
    def __init__(
        self, model: Any, group: Ranks, layers: str, gather_kv: bool, spread: bool
    ) -> None:
        self._model, self._group, self._layers = model, group, f"{layers}."
        self._gather_kv, self._spread = gather_kv, spread
        self._plan: dict[str, str] = dict(model.tp_plan or {})
        self._ep_plan: dict[str, str] = dict(model.ep_plan or {})
        self._cuts: dict[str, Cut] = {}

    def run(self, way: str) -> dict[str, Cut]:
        for name, module in list(self._model.named_modules()):
            if _style(self._plan | self._ep_plan, name) in (
                "moe_tp_experts",
                "ep_dispatch_experts",
            ):
                self._experts(name, module)
        linears = [
            (name, module)
            for name, module in self._model.named_modules()
            if name.startswith(self._layers) and isinstance(module, nn.Linear | Conv1D)
            if not name.endswith(_WHOLE)
        ]
        if way == GATHERED:
            for name, module in linears:
                if type(module) in (nn.Linear, Conv1D) and _width(module) % self._group.size == 0:
                    # Heads attend to latents with their own rows of the matrix.
                    split = self._rows if of_latents(self._model, name) else self._gathered
                    split(name, module)
        else:
            self._planned(linears)
        self._vocabulary()
        return self._cuts

    # ---- linear layers ----

    def _planned(self, linears: Sequence[tuple[str, nn.Module]]) -> None:
        styles = {name: _style(self._plan, name) for name, _ in linears}
        if not any(styles.values()):
            raise Unsplittable("the class has no plan")
        for name, module in linears:
            self._apply(name, module, styles[name])
        for name, module in self._model.named_modules():
            style = _style(self._plan, name)
            if not style or isinstance(module, nn.Linear | nn.Embedding):
                continue
            if style == "all_reduce":
                module.register_forward_hook(self._reduce)
            elif style == "moe_identity_expert":
                module.register_forward_pre_hook(self._share)
            elif style not in _AS_IT_IS | {"moe_tp_experts"}:
                raise Unsplittable(f"{name} is split {style!r}")
        for name, parameter in list(self._model.named_parameters()):
            style = _style(self._plan, name)
            if style and style not in _AS_IT_IS and name not in self._cuts and not self._done(name):
                self._parameter(name, parameter, style)

    def _done(self, name: str) -> bool:
        """Returns whether a linear layer is part of experts that stay whole."""
        owner = name.rpartition(".")[0]
        return _style(self._plan | self._ep_plan, owner) in (
            "moe_tp_experts",
            "ep_dispatch_experts",
        )

    def _apply(self, name: str, module: Any, style: str | None) -> None:
        if style is None or style in _AS_IT_IS:
            return
        if type(module) is not nn.Linear:
            raise Unsplittable(f"{name} is no plain linear layer")
        if style in ("colwise_gather_output", "colwise_rep"):
            self._gathered(name, module)
        elif style == "colwise":
            keep = self._gathered if self._gather_kv and name.endswith(KV) else self._rows
            keep(name, module)
        elif style in ("rowwise", "rowwise_split_input", "rowwise_rep"):
            self._columns(name, module, split_input=style != "rowwise")
        else:
            raise Unsplittable(f"{name} is split {style!r}")

    def _rows(self, name: str, module: Any, padded: bool = False) -> None:
        """Keeps this rank's output features."""
        dim = 1 if isinstance(module, Conv1D) else 0
        self._cut(f"{name}.weight", dim, padded=padded)
        if module.bias is not None:
            self._cut(f"{name}.bias", 0, padded=padded)
        if isinstance(module, Conv1D):
            module.nf = module.weight.shape[1]

    def _gathered(self, name: str, module: Any, padded: bool = False) -> None:
        """Keeps this rank's output features, and gathers those of all ranks."""
        width, group = _width(module), self._group
        self._rows(name, module, padded)
        share = -(-width // group.size)

        def gather(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            part = F.pad(out, (0, share - out.shape[-1]))
            return group.all_gather(part, dim=-1)[..., :width]

        module.register_forward_hook(gather)

    def _columns(self, name: str, module: Any, split_input: bool) -> None:
        """Keeps this rank's input features, and sums over the ranks."""
        width = module.in_features // self._group.size
        self._cut(f"{name}.weight", 1)
        if self._group.rank > 0:
            module.bias = None  # or the sum would contain it once per rank
        if split_input:
            start = self._group.rank * width
            module.register_forward_pre_hook(lambda _, args: (args[0][..., start : start + width],))
        module.register_forward_hook(self._reduce)

    def _share(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0] / self._group.size, *args[1:]  # for a sum over the ranks

    def _reduce(self, _: nn.Module, __: Any, out: Tensor) -> Tensor:
        return self._group.all_reduce(out.contiguous())

    # ---- experts ----

    def _experts(self, name: str, module: Any) -> None:
        """Splits experts within, else among the ranks, else not at all; with `spread` among them
        or never."""
        parameters = dict(module.named_parameters(prefix=name))
        within = {each: _style(self._plan, each) for each in parameters}
        among = {each: _style(self._ep_plan, each) for each in parameters}
        size = self._group.size
        if (
            not self._spread
            and _style(self._plan, name) == "moe_tp_experts"
            and all(
                (style == "packed_colwise" and each.ndim == 3 and each.shape[1] % (2 * size) == 0)
                or (style == "rowwise" and each.ndim == 3 and each.shape[2] % size == 0)
                for each, style in ((parameters[key], style) for key, style in within.items())
            )
        ):
            for key, style in within.items():
                self._parameter(key, parameters[key], str(style))
            module.register_forward_hook(self._reduce)
        elif (
            _style(self._ep_plan, name) == "ep_dispatch_experts"
            and set(among.values()) == {"grouped_gemm"}
            and hasattr(module, "_is_expert_parallel")
            and module.num_experts % size == 0
        ):
            for key in parameters:
                self._cut(key, 0)
            self._dispatch(module)
        elif self._spread:
            raise Unsplittable(f"{name} cannot be spread over the ranks")

    def _dispatch(self, module: Any) -> None:
        """Has the module compute only the tokens of this rank's experts."""
        count = module.num_experts // self._group.size
        start = self._group.rank * count
        module.num_experts, module._is_expert_parallel = count, True

        def mine(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            hidden, index, weights = args
            foreign = (index < start) | (index >= start + count)
            local = (index - start).masked_fill(foreign, count)  # an index beyond the experts
            return hidden, local, weights.masked_fill(foreign, 0.0)

        module.register_forward_pre_hook(mine)
        module.register_forward_hook(self._reduce)

    # ---- the vocabulary ----

    def _vocabulary(self) -> None:
        """Splits embedding and head by rows, where the last rank's part may be shorter."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
            return
        names = {module: name for name, module in self._model.named_modules()}
        rows, group = embedding.num_embeddings, self._group
        if rows != head.out_features:
            return
        self._gathered(names[head], head, padded=True)
        self._cut(f"{names[embedding]}.weight", 0, padded=True)
        embedding.padding_idx = None
        share = -(-rows // group.size)
        start = min(group.rank * share, rows)
        count = embedding.weight.shape[0]

        foreign = torch.empty(0)  # which tokens of the call belong to other ranks

        def mine(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal foreign
            local = args[0] - start
            foreign = (local < 0) | (local >= count)
            return local.masked_fill(foreign, 0), *args[1:]

        def reduce(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            return group.all_reduce(out.masked_fill(foreign[..., None], 0.0))

        embedding.register_forward_pre_hook(mine)
        embedding.register_forward_hook(reduce)

    # ---- parameters ----

    def _parameter(self, name: str, parameter: Tensor, style: str) -> None:
        if style not in _PARAMETERS:
            raise Unsplittable(f"{name} is split {style!r}")
        dim = _PARAMETERS[style]
        if dim < 0:
            dim = max(0, parameter.ndim + dim)
        self._cut(name, dim, pieces=2 if style == "packed_colwise" else 1)

    def _cut(self, name: str, dim: int, pieces: int = 1, padded: bool = False) -> None:
        """Replaces a parameter by this rank's part of each of `pieces` equal pieces."""
        owner, _, key = name.rpartition(".")
        module = self._model.get_submodule(owner)
        whole = module._parameters[key]
        if name in self._cuts or whole is None:
            raise Unsplittable(f"{name} is split twice")
        length, size = whole.shape[dim], self._group.size
        if length % (pieces * size) and not padded:
            raise Unsplittable(f"{name} has {length} rows")
        piece = length // pieces
        share = -(-piece // size)
        start = min(self._group.rank * share, piece)
        end = min(start + share, piece)
        ranges = tuple((i * piece + start, i * piece + end) for i in range(pieces))
        cut = Cut(tuple(whole.shape), dim, ranges)
        module._parameters[key] = nn.Parameter(cut.of(whole).clone(), requires_grad=False)
        self._cuts[name] = cut


def shares_inputs(model: Any, parameter: str) -> bool:
    """Returns whether the class's plan splits a matrix by inputs."""
    plan, names = dict(model.tp_plan or {}), (parameter, parameter.removesuffix(".weight"))
    return any(str(_style(plan, name)).startswith("rowwise") for name in names)


def _width(module: Any) -> int:
    return int(module.nf if isinstance(module, Conv1D) else module.out_features)


def _style(plan: dict[str, str], name: str) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
