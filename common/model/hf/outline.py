"""Computes on the meta device which weights the ranks of a transformers model hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pdserve.common.core.lora import adapted_shapes
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.hf.class_config import read_config
from pdserve.common.model.hf.experts import experts_of, matrices_of, sizes_of
from pdserve.common.model.hf.latents import of_latents
from pdserve.common.model.hf.layout import choose_layout, tie
from pdserve.common.model.hf.linears import linears_of, size_of
from pdserve.common.model.hf.meta_run import build
from pdserve.common.model.hf.packed import layer_of
from pdserve.common.model.hf.parallel import Cut, OutlineRanks
from pdserve.common.model.hf.pipeline import check_stage
from pdserve.common.model.hf.quantize import tables_of
from pdserve.common.model.rank_weights import RankWeights, WeightsOf
from pdserve.common.model.stages import Stage


def weights_of(spec: ModelSpec, folder: Path, overrides: Mapping[str, Any]) -> WeightsOf:
    """Returns the function for a checkpoint. It caches its results, and raises ConfigError if the
    model cannot be split this way."""

    @cache
    def found(dtype: str, tp: int, ep: int, stage: Stage) -> RankWeights:
        check_stage(spec.architecture, spec.layer_kv, stage)
        config = read_config(folder, overrides)
        layout = choose_layout(spec, config, tp, stage, ep)
        model = build(config, getattr(torch, dtype))
        cuts = layout.apply(model, OutlineRanks(tp), stage)
        tie(model)
        return RankWeights(
            nbytes=sum(each.nbytes for each in model.parameters()) - _saved(spec, model, cuts),
            linears=tuple(map(tuple, _linears(spec, model))),
            experts=tuple(sizes for each in experts_of(model).values() for sizes in sizes_of(each)),
            tables=tuple((len(each), each.shape[1]) for each in tables_of(model).values()),
        )

    return found


def _saved(spec: ModelSpec, model: Any, cuts: Mapping[str, Cut]) -> int:
    """Returns the bytes that packed weights save."""
    kind = spec.quantization
    if kind is None or kind.rounds:
        return 0
    item = model.dtype.itemsize

    def inputs(parameter: str, columns: int) -> int:
        cut = cuts.get(parameter)
        return columns if cut is None else cut.shape[-1]

    saved = 0
    for name, linear in linears_of(model).items():
        rows, columns = size_of(linear)
        whole = inputs(f"{name}.weight", columns)
        packs = layer_of(name) and kind.covers(name) and not of_latents(model, name)
        if packs and rows % 8 == whole % 8 == 0:
            saved += rows * columns * item - kind.nbytes(rows, columns, whole, item)
    for name, module in experts_of(model).items():
        for key, parameter in matrices_of(module) if kind.covers(f"{name}.0.down_proj") else ():
            count, rows, columns = parameter.shape
            whole, parts = inputs(f"{name}.{key}", columns), 1 + (key == "gate_up_proj")
            packed = kind.nbytes(rows, columns, whole, item, parts)
            saved += count * (rows * columns * item - packed)
    return saved


def _linears(spec: ModelSpec, model: Any) -> list[list[tuple[int, int]]]:
    known = adapted_shapes(spec)
    found: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for name, linear in linears_of(model).items():
        if name in known:
            outputs, inputs = size_of(linear)
            found[name.rpartition(".")[0], inputs].append((outputs, inputs))
    return list(found.values())
