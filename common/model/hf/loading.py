"""Reads the weights of a split transformers model by transformers' own rules for names and
conversions. A rank reads only its part of tensors that are merely renamed; tensors that are
converted are read whole, one layer at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

from pdserve.common.model.checkpoint import Checkpoint, StoredTensor
from pdserve.common.model.folder import OpenWeights
from pdserve.common.model.hf.packed import PackedWeights
from pdserve.common.model.hf.parallel import Cut
from pdserve.common.model.hf.pipeline import FORGOTTEN
from pdserve.common.model.sharding import Sharding

Prepare = Callable[[Any], Mapping[str, Cut]]
"""Turns a model on the meta device into this rank's part; returns parameter name → cut."""


def partial_class(kind: Any, prepare: Prepare, weights: OpenWeights, sharding: Sharding) -> Any:
    """Returns a subclass of `kind` whose `from_pretrained` loads a rank's part of `weights`; its
    state dict names all tensors. `sharding`: format of the packed ones."""

    class Partial(kind):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._whole = self.state_dict().keys()
            self._cuts = prepare(self)

        def _init_weights(self, module: Any) -> None:
            """Initializes buffers, which checkpoints lack, and missing weights."""
            if not any(each in FORGOTTEN for each in module.children()):
                super()._init_weights(module)

        @staticmethod
        def _load_pretrained_model(
            model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *_: Any
        ) -> tuple[LoadStateDictInfo, None]:
            return _Loading(model, state_dict, load_config, sharding).run(weights), None

    Partial.__name__, Partial.__module__ = kind.__name__, kind.__module__
    return Partial


class _Part:
    """A tensor of the checkpoint that reads as this rank's part of it."""

    def __init__(self, stored: StoredTensor, cut: Cut) -> None:
        self._stored, self._cut = stored, cut

    def get_shape(self) -> list[int]:
        return list(self[...].shape)

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, _: Any) -> Tensor:
        return self._cut.of(self._stored)


class _Loading:
    def __init__(self, model: Any, checkpoint: Checkpoint, config: Any, sharding: Sharding) -> None:
        self._model, self._checkpoint, self._config = model, checkpoint, config
        self._cuts: Mapping[str, Cut] = model._cuts
        self._known = model.state_dict()
        self._mismatched: set[Any] = set()
        self._needed: set[str] = set()  # names of the tensors that this rank reads
        rules = config.weight_mapping or []
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._packed = PackedWeights(model, checkpoint, self._cuts, self._converters, sharding)
        self._packed.find(self._renamed)

    def run(self, weights: OpenWeights) -> LoadStateDictInfo:
        parts = list(self._parts().items())
        groups = [[name for name in part if name in self._needed] for _, part in parts]
        packed = list(self._packed.groups)
        groups += [[each.name for each in group.shards()] for group in self._packed.groups.values()]
        infos = []
        for number in weights.readable(groups):
            if number >= len(parts):
                self._packed.read(packed[number - len(parts)])
                continue
            (_, converted), part = parts[number]
            infos.append(self._load(part, converted))
        missing = [info.missing_keys for info in infos] or [set(self._known)]
        wrong = {name for name, _, _ in self._mismatched}
        return LoadStateDictInfo(
            missing_keys=set.intersection(*missing) - wrong,
            unexpected_keys=set().union(*(info.unexpected_keys for info in infos))
            - self._model._whole,  # parameters of other stages
            mismatched_keys=self._mismatched.union(*(info.mismatched_keys for info in infos)),
            error_msgs=[line for info in infos for line in info.error_msgs],
            conversion_errors={k: v for info in infos for k, v in info.conversion_errors.items()},
            skipped_pp_keys=set(),
        )

    def _parts(self) -> dict[tuple[str, bool], dict[str, Any]]:
        """Returns (layer, whether converted) → tensors."""
        parts = defaultdict[Any, dict[str, Any]](dict)
        for name, stored in self._checkpoint.items():
            if name in self._packed.names:
                continue
            target, pattern = self._renamed(name)
            found = re.search(r"\.(\d+)\.", target)
            place = (found[1] if found else "", pattern is not None)
            if target in self._known:
                self._needed.add(name)
            cut = self._cuts.get(target) if pattern is None else None
            if cut is None:
                parts[place][name] = stored
            elif tuple(stored.get_shape()) == cut.shape:
                parts[place][name] = _Part(stored, cut)
            else:
                self._mismatched.add((target, tuple(stored.get_shape()), cut.shape))
        return dict(parts)

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """Returns the parameter that a tensor is for, and the pattern of its conversion, if any."""
        target, pattern = rename_source_key(
            name,
            self._renamings,
            self._converters,
            self._model.base_model_prefix,
            self._known,
        )
        return (
            (name, None) if target not in self._known and name in self._known else (target, pattern)
        )

    def _load(self, part: dict[str, Any], converted: bool) -> LoadStateDictInfo:
        """Loads tensors into the model. Converted ones are loaded whole, then cut."""
        waiting = {}
        if converted:
            for name, cut in self._cuts.items():
                owner, key = self._owner(name)
                if (local := owner._parameters[key]) is not None and local.is_meta:
                    waiting[name] = local
                    whole = torch.empty(cut.shape, dtype=local.dtype, device="meta")
                    owner._parameters[key] = nn.Parameter(whole, requires_grad=False)
        info: LoadStateDictInfo
        info, _ = convert_and_load_state_dict_in_model(self._model, part, self._config)
        for name, local in waiting.items():
            owner, key = self._owner(name)
            loaded = owner._parameters[key]
            if not loaded.is_meta:
                local = nn.Parameter(self._cuts[name].of(loaded).clone(), requires_grad=False)
                local._is_hf_initialized = True  # type: ignore[attr-defined]
            owner._parameters[key] = local
        return info

    def _owner(self, name: str) -> tuple[Any, str]:
        owner, _, key = name.rpartition(".")
        return self._model.get_submodule(owner), key
