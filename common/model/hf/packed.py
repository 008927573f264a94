"""Linear layers and experts of transformers classes whose weights stay packed as in the checkpoint
(AWQ, GPTQ, pack-quantized, GGUF), and how they are found and read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import some_of
from pdserve.common.model.checkpoint import Checkpoint
from pdserve.common.model.grouped_weight import GroupedWeight
from pdserve.common.model.hf.experts import MatrixExperts
from pdserve.common.model.hf.latents import of_latents
from pdserve.common.model.hf.parallel import Cut, shares_inputs
from pdserve.common.model.packing import PackedMatrix
from pdserve.common.model.sharding import MatrixPart, Shard, Sharding

Rename = Callable[[str], tuple[str, str | None]]
"""Returns (the class's parameter that a checkpoint tensor belongs to, the pattern of its conversion
or None)."""


class PackedLinear(nn.Linear):
    """A linear layer whose matrix stays packed and is not a parameter."""

    packed: GroupedWeight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized matrix, for code of the class that reads it."""
        return self.packed.dense()

    def forward(self, x: Tensor) -> Tensor:
        found = self.packed.linear(x.reshape(-1, x.shape[-1]), self.bias)
        return found.view(*x.shape[:-1], -1)


def packed_linears(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name, module


def bytes_of(model: nn.Module) -> int:
    """Returns the bytes of the packed weights of a model."""
    total = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            total += module.packed.nbytes
        elif isinstance(run := module.__dict__.get("forward"), MatrixExperts):
            total += run.nbytes
    return total


@dataclass(slots=True)
class _Group:
    """The packed weights of a layer, which are read together."""

    weights: list[GroupedWeight] = field(default_factory=list)

    def shards(self) -> Iterator[Shard]:
        for weight in self.weights:
            yield from weight.shards()


class PackedWeights:
    """The packed weights of a rank's part of a model, by layer number."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        cuts: Mapping[str, Cut],
        converters: list[WeightConverter],
        sharding: Sharding,
    ) -> None:
        """Raises ConfigError if the class has no matrix where the checkpoint has a packed one."""
        self._model, self._checkpoint, self._cuts = model, checkpoint, cuts
        self._sharding = sharding
        self._known: Mapping[str, Tensor] = model.state_dict()
        self._order = {
            pattern: (place, len(each.source_patterns))
            for each in converters
            if _stacks(each)
            for place, pattern in enumerate(each.source_patterns)
        }
        self.names: set[str] = set()  # names of the tensors of packed matrices
        self.groups: dict[str, _Group] = defaultdict(_Group)
        self._dense: dict[str, list[Any]] = defaultdict(list)  # dequantized once they are read

    def find(self, rename: Rename) -> None:
        """Finds the checkpoint's packed matrices and allocates this rank's parts."""
        kind = self._sharding.quantization
        if kind is None or kind.rounds:
            return
        suffix = f".{PackedMatrix.of(kind.method, kind.bits).name}"
        modules = [each.removesuffix(suffix) for each in self._checkpoint if each.endswith(suffix)]
        self._collect(modules)
        stacked: dict[str, dict[int, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
        for module in modules:
            target, pattern = rename(f"{module}.weight")
            if target not in self._known:
                continue  # of another stage, or without a counterpart in the class
            if pattern is None:
                self._linear(module, target)
            elif pattern in self._order:
                stacked[target][_expert_of(module)][self._order[pattern][0]] = module
            else:
                raise _unlike(module, "transformers builds it from rows of several matrices")
        for target, experts in stacked.items():
            self._stacked(target, experts)
        self._check()

    def _collect(self, modules: list[str]) -> None:
        found = set(modules)
        for name in self._checkpoint:
            of, _, leaf = name.rpartition(".")
            if of in found and leaf != "bias":
                self.names.add(name)

    def _linear(self, module: str, target: str) -> None:
        shape = self._shape(target)
        owner: Any = self._owner(target)
        exact: type = type(owner)
        if exact is not nn.Linear or not target.endswith(".weight"):
            raise _unlike(module, f"{target} is not a linear layer")
        rows, columns = slice(0, shape[0]), slice(0, shape[1])
        if (cut := self._cuts.get(target)) is not None:
            (kept,) = (slice(*each) for each in cut.ranges)
            rows, columns = (kept, columns) if cut.dim == 0 else (rows, kept)
        part = MatrixPart(module, (shape[0], shape[1]), rows, columns, self._blocks(target))
        owner.packed = self._weight([part], target)
        owner._parameters["weight"] = None
        owner.__class__ = PackedLinear
        owner._is_hf_initialized = True
        if of_latents(self._model, module := target.removesuffix(".weight")):
            self._dense[layer_of(module)].append(owner)

    def _stacked(self, target: str, experts: Mapping[int, Mapping[int, str]]) -> None:
        """Allocates the matrices of a layer's experts, each from one or two matrices of the
        checkpoint, stacked along the outputs."""
        owner, shape = self._owner(target), self._shape(target)
        if not hasattr(owner, "_is_expert_parallel") or owner.is_transposed or len(shape) != 3:
            raise _unlike(next(iter(experts[0].values())), f"{target} has another form")
        cut = self._cuts.get(target)
        first, last = cut.ranges[0] if cut is not None and cut.dim == 0 else (0, shape[0])
        weights = [
            self._weight(self._parts(target, experts.get(each, {}), cut), target)
            for each in range(first, last)
        ]
        key = target.rpartition(".")[2]
        run = owner.__dict__.get("forward") or MatrixExperts(owner)
        run.matrices[key], owner.forward = weights, run
        owner._parameters[key] = None
        owner._is_hf_initialized = True

    def _parts(self, target: str, modules: Mapping[int, str], cut: Cut | None) -> list[MatrixPart]:
        _, rows, columns = self._shape(target)
        if not modules or sorted(modules) != list(range(len(modules))):
            raise ConfigError(f"the checkpoint lacks packed experts of {target}")
        count, parts = rows // len(modules), []
        for place in sorted(modules):
            of_rows, of_columns = slice(0, count), slice(0, columns)
            if cut is not None and cut.dim == 1:
                start, end = cut.ranges[place]
                of_rows = slice(start - place * count, end - place * count)
            elif cut is not None and cut.dim == 2:
                (of_columns,) = (slice(*each) for each in cut.ranges)
            whole, blocks = (count, columns), self._blocks(target)
            parts.append(MatrixPart(modules[place], whole, of_rows, of_columns, blocks))
        return parts

    def _weight(self, parts: list[MatrixPart], target: str) -> GroupedWeight:
        kind = self._sharding.quantization
        assert kind is not None
        weight = GroupedWeight(parts, self._sharding, kind)
        self.groups[layer_of(target)].weights.append(weight)
        return weight

    def _blocks(self, target: str) -> int:
        """Returns the number of blocks in which the matrix's inputs are summed."""
        return self._sharding.blocks if shares_inputs(self._model, target) else 1

    def _shape(self, target: str) -> tuple[int, ...]:
        cut = self._cuts.get(target)
        return tuple(self._known[target].shape) if cut is None else cut.shape

    def _owner(self, target: str) -> Any:
        return self._model.get_submodule(target.rpartition(".")[0])

    def _check(self) -> None:
        wrong = {
            shard.name
            for group in self.groups.values()
            for shard in group.shards()
            if (found := self._checkpoint.get(shard.name)) is None
            or found.get_shape() != list(shard.shape)
        }
        if wrong:
            raise ConfigError(
                f"packed weights do not fit {type(self._model).__name__}; tensors missing or of "
                f"another shape: {some_of(sorted(wrong))}"
            )

    def read(self, layer: str) -> None:
        """Reads the packed weights of a layer. Its tensors must be readable now."""
        shards = list(self.groups[layer].shards())
        for shard in shards:
            part = self._checkpoint[shard.name][shard.index].to(shard.target.device)
            shard.target.copy_(shard.convert(part))
        for shard in shards:
            shard.finish()
        for linear in self._dense.pop(layer, ()):
            linear.__class__ = nn.Linear
            linear.weight = nn.Parameter(linear.packed.dense(), requires_grad=False)
            self.groups[layer].weights.remove(linear.packed)
            del linear.packed


def layer_of(name: str) -> str:
    """Returns the number of the parameter's layer, as text; empty outside of layers."""
    return next((part for part in name.split(".") if part.isdecimal()), "")


def _expert_of(module: str) -> int:
    return int([part for part in module.split(".") if part.isdecimal()][-1])


def _stacks(converter: WeightConverter) -> bool:
    """Returns whether a conversion stacks experts, each from the rows of one or two matrices."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    return kinds in (
        [(MergeModulelist, 0)],
        [(MergeModulelist, 0), (Concatenate, 1)],
    )


def _unlike(module: str, why: str) -> ConfigError:
    return ConfigError(
        f"{module} has packed weights, which this class of transformers cannot use ({why}): serve "
        "a checkpoint that is not quantized"
    )
