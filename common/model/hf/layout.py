"""Chooses how a model of transformers is split, by running it without memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.hf.describe import Call, StateCall, build, first_line, run_outline
from pdserve.common.model.hf.parallel import (
    GATHERED,
    PLANNED,
    Cut,
    OutlineRanks,
    Ranks,
    Unsplittable,
    split,
)
from pdserve.common.model.hf.pipeline import StageRun, Watch, decoder_layers
from pdserve.common.model.stages import Stage

NOT_AS_PLANNED = {"gemma3n", "gemma3n_text"}
"""Classes whose own plan changes what they compute, as the sweep found: Gemma 3n's sparse
activations are relative to the mean of all features, of which a rank would have a part."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Heads:
    """Whether a layer's code has the heads of all ranks, of which this one attends with its own."""

    whole_queries: bool = False
    whole_keys: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is split. It is the same on all ranks."""

    layers: str  # the name of the list of layers; empty for a model that is not split
    heads: tuple[Heads, ...]  # per layer
    way: str = PLANNED  # of `split`
    gather_kv: bool = False
    tuples: int = 0  # the length of what layers return, if that is a tuple
    spread: bool = False  # whether ranks have different experts, and never a part of each

    def apply(self, model: Any, group: Ranks, stage: Stage) -> dict[str, Cut]:
        """Changes a model, on any device, into a rank's part; returns the cuts by the names of
        parameters."""
        cuts = {}
        if group.size > 1:
            cuts = split(model, group, self.way, self.layers, self.gather_kv, self.spread)
        layers = model.get_submodule(self.layers) if self.layers else ()
        part = stage.over(len(self.heads) // len(layers)) if layers else stage
        model.stage_run = StageRun(model, layers, part, self.tuples)
        return cuts


def choose_layout(
    spec: ModelSpec, config: Any, size: int, stage: Stage, experts: int = 1
) -> Layout:
    """Returns the layout for `size` tensor-parallel ranks of a `config` of `read_config`, over
    `experts` of which the experts are spread. Raises ConfigError if there is none."""

    def fresh() -> Any:
        return build(copy.deepcopy(config))

    if stage == Stage.whole(spec.num_layers) and size == 1:
        return Layout("", (Heads(),) * spec.num_layers)
    model = fresh()
    name, layers = decoder_layers(model, spec.num_layers)
    if (places := spec.num_layers // len(layers)) > 1 and (
        stage.start % places or stage.end % places
    ):
        raise ConfigError(
            f"{spec.architecture}: each layer counts as {places}, so stages must have multiples of "
            f"{places}: use --pipeline-partition"
        )
    tuples = 0 if stage.first and stage.last else _tuples(spec, model, layers)
    if size == 1:
        return Layout(name, (Heads(),) * spec.num_layers, tuples=tuples)
    with torch.inference_mode():
        whole = run_outline(fresh()).calls
    gather_kv = any(isinstance(each, Call) and each.k.shape[1] % size for each in whole.values())
    reason = ""
    for way in (GATHERED,) if spec.family in NOT_AS_PLANNED else (PLANNED, GATHERED):
        model = fresh()
        try:
            split(model, OutlineRanks(size), way, name, gather_kv, experts > 1)
            with torch.inference_mode():
                heads = _heads(spec, whole, run_outline(model).calls, size)
        except Unsplittable as error:
            reason = str(error)
        except Exception as error:  # whatever a class of transformers does with a part of the heads
            reason = first_line(error)
        else:
            return Layout(name, heads, way, gather_kv, tuples, experts > 1)
        logger.debug("%s cannot be split as %s: %s", spec.architecture, way, reason)
    raise ConfigError(
        f"{spec.architecture} cannot be split over {size} ranks ({reason}): use "
        "--tensor-parallel-size 1"
    )


def tie(model: Any) -> None:
    """Gives embedding and head, which both were cut, one tensor again, if the model ties them, and
    a head's bias its other name's."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    held = getattr(head, "weight", None) is not None and embedding.weight is not None
    if held and model.config.get_text_config().tie_word_embeddings:
        head.weight = embedding.weight
    for cut, whole in model.all_tied_weights_keys.items():
        if cut.endswith(".bias"):  # of a head, which has a second name for it (BERT)
            (of, key), (other, name) = (_owner(model, each) for each in (cut, whole))
            if of.get(key) is not None:
                other[name] = of[key]


def _owner(model: Any, name: str) -> tuple[dict[str, Any], str]:
    owner, _, key = name.rpartition(".")
    return model.get_submodule(owner)._parameters, key


def _tuples(spec: ModelSpec, model: Any, layers: nn.ModuleList) -> int:
    """Returns `Layout.tuples`. Raises ConfigError if hidden states are not all that layers need."""
    watch = Watch(model, layers, spec.hidden_size)
    try:
        run_outline(model)
    except Exception as error:  # whatever a class of transformers does
        watch.reason = first_line(error)
    if watch.reason:
        raise ConfigError(
            f"{spec.architecture} cannot be split into pipeline stages ({watch.reason}): use "
            "--pipeline-parallel-size 1"
        )
    return watch.tuples


def _heads(
    spec: ModelSpec,
    whole: Mapping[int, Call | StateCall],
    part: Mapping[int, Call | StateCall],
    size: int,
) -> tuple[Heads, ...]:
    """Compares how the layers attend, whole and split."""
    found = []
    for layer in range(spec.num_layers):
        if layer not in whole:
            found.append(Heads())
            continue
        has, had = part[layer], whole[layer]
        if isinstance(has, StateCall) or isinstance(had, StateCall):
            found.append(Heads())  # a rank has the inputs of all heads, of which it takes its own
            if has.kv != had.kv:
                raise Unsplittable(f"layer {layer} has a state of {has.kv.num_kv_heads} heads")
            continue
        if had.q.shape[1] % size:
            raise Unsplittable(f"layer {layer} has {had.q.shape[1]} heads")
        keys = had.k.shape[1]
        found.append(
            Heads(
                _whole("query heads", has.q.shape[1], had.q.shape[1], had.q.shape[1] // size),
                _whole("KV heads", has.k.shape[1], keys, max(1, keys // size)),
            )
        )
        if has.v.shape[1] != has.k.shape[1]:
            raise Unsplittable(f"layer {layer} has fewer values than keys")
    return tuple(found)


def _whole(what: str, count: int, whole: int, share: int) -> bool:
    if count not in (whole, share):
        raise Unsplittable(f"a rank has {count} of {whole} {what}")
    return count == whole != share
