"""Chooses how a transformers model is split over ranks, by running it on the meta device."""

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
from pdserve.common.model.hf.class_config import first_line
from pdserve.common.model.hf.latents import UP
from pdserve.common.model.hf.meta_run import Call, StateCall, build, run_outline
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
"""Classes whose own tensor-parallel plan changes the result (found by the sweep): Gemma 3n's sparse
activations depend on the mean of all features, of which a rank would have only a part."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Heads:
    """Whether a layer's code computes the heads of all ranks; this rank attends with its own."""

    whole_queries: bool = False
    whole_keys: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is split. It is the same on all ranks."""

    layers: str  # name of the list of layers; empty: the model is not split
    heads: tuple[Heads, ...]  # per layer
    way: str = PLANNED  # argument of `split`
    gather_kv: bool = False
    tuples: int = 0  # the length of the tuple that layers return; 0: a tensor
    spread: bool = False  # whether ranks hold whole experts, different ones each

    def apply(self, model: Any, group: Ranks, stage: Stage) -> dict[str, Cut]:
        """Turns a model, on any device, into a rank's part; returns parameter name → its cut."""
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
    """Returns the layout for `size` tensor-parallel ranks and a `config` of `read_config`;
    `experts`: the expert-parallel size. Raises ConfigError if there is none."""

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
    gather_kv = any(
        isinstance(each, Call) and each.style.latent is None and each.k.shape[1] % size
        for each in whole.values()
    )
    reason = ""
    for way in (GATHERED,) if spec.family in NOT_AS_PLANNED else (PLANNED, GATHERED):
        model = fresh()
        try:
            split(model, OutlineRanks(size), way, name, gather_kv, experts > 1)
            with torch.inference_mode():
                heads = _heads(spec, whole, run_outline(model).calls, size)
        except Unsplittable as error:
            reason = str(error)
        except Exception as error:  # classes fail in any way with a part of the heads
            reason = first_line(error)
        else:
            return Layout(name, heads, way, gather_kv, tuples, experts > 1)
        logger.debug("%s cannot be split as %s: %s", spec.architecture, way, reason)
    raise ConfigError(
        f"{spec.architecture} cannot be split over {size} ranks ({reason}): use "
        "--tensor-parallel-size 1"
    )


def tie(model: Any) -> None:
    """Ties embedding and head again after both were cut, if the model ties them; also the two names
    of a head's bias."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    held = getattr(head, "weight", None) is not None and embedding.weight is not None
    if held and model.config.get_text_config().tie_word_embeddings:
        head.weight = embedding.weight
    for cut, whole in model.all_tied_weights_keys.items():
        if cut.endswith(".bias"):  # a head's bias, which has a second name in BERT
            (of, key), (other, name) = (_owner(model, each) for each in (cut, whole))
            if of.get(key) is not None:
                other[name] = of[key]


def _owner(model: Any, name: str) -> tuple[dict[str, Any], str]:
    owner, _, key = name.rpartition(".")
    return model.get_submodule(owner)._parameters, key


def _tuples(spec: ModelSpec, model: Any, layers: nn.ModuleList) -> int:
    """Returns `Layout.tuples`. Raises ConfigError if layers need more than hidden states."""
    watch = Watch(model, layers, spec.hidden_size)
    try:
        run_outline(model)
    except Exception as error:  # transformers classes raise errors of any type
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
    """Compares the calls of the layers' attention before and after the split."""
    found = []
    for layer in range(spec.num_layers):
        if layer not in whole:
            found.append(Heads())
            continue
        has, had = part[layer], whole[layer]
        if isinstance(has, StateCall) or isinstance(had, StateCall):
            found.append(Heads())  # a rank takes its own heads from the inputs of all heads
            if has.kv != had.kv:
                raise Unsplittable(f"layer {layer} has a state of {has.kv.num_kv_heads} heads")
            continue
        if had.q.shape[1] % size:
            raise Unsplittable(f"layer {layer} has {had.q.shape[1]} heads")
        if has.style.up is not None and len(has.style.up) * size != had.q.shape[1]:
            raise Unsplittable(f"layer {layer} has latents, but the plan does not split {UP}")
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
