"""A decoder of transformers over the paged cache: a rank's part of its stage's layers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from pdserve.common.config.node import ModelConfig
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.printable import some_of
from pdserve.common.model.attention import (
    AttentionContext,
    AttentionShape,
)
from pdserve.common.model.decoder import Decoder, places
from pdserve.common.model.delta_net import DeltaBackend, DeltaInputs
from pdserve.common.model.dequantize import model_view
from pdserve.common.model.folder import ModelFolder
from pdserve.common.model.hf.attention import (
    NAME,
    Answers,
    Style,
    StyledAttention,
    answering,
    take_temperatures,
)
from pdserve.common.model.hf.delta_net import take_delta_nets
from pdserve.common.model.hf.describe import first_line, layers_of, model_class, read_config
from pdserve.common.model.hf.layout import Layout, choose_layout
from pdserve.common.model.hf.loading import Prepare, partial_class
from pdserve.common.model.hf.parallel import Cut, split
from pdserve.common.model.hf.pipeline import StageRun, check_stage
from pdserve.common.model.layers import LoRA
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage

_BUILDING = threading.Lock()  # transformers changes its own classes while it makes a model


class TransformersModel(Decoder):
    """A rank's part of a class of transformers."""

    expert_parallel_size = 1

    def __init__(
        self, spec: ModelSpec, model: Any, sharding: Sharding, stage: Stage, layout: Layout
    ) -> None:
        self.spec, self.stage, self.layout = spec, stage, layout
        self.device, self.dtype, self.group = sharding.device, sharding.dtype, sharding.group
        self._model = model
        take_temperatures(model)
        take_delta_nets(model)
        self._base = layers_of(model)[1]
        self._head = _head_of(model)
        self._run: StageRun = model.stage_run
        self.attentions = [
            DeltaBackend(sharding.kernels) if kv.state else self._attention(kv)
            for kv in spec.kv_groups
        ]
        self._places = places(spec.kv_groups, self.stage)

    def _attention(self, kv: KVGroup) -> StyledAttention:
        start, end = kv.head_range(self.group.rank, self.group.size)
        heads = self.spec.num_heads // self.group.size
        shape = AttentionShape(heads, end - start, kv.head_dim, kv.window, kv.chunked)
        return StyledAttention(shape, self.device, self.dtype)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        contexts: Sequence[AttentionContext],
        kv_caches: Sequence[Tensor],
        lora: LoRA | None = None,
    ) -> Tensor:
        """Computes a step; see `CausalLM.forward`."""
        assert lora is None, "refused at start"
        with answering(_Step(self, positions, contexts, kv_caches)):
            return self._run.forward(self._base, inputs, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes logits by the class's own code, which may scale or cap them."""
        self._head.given.hidden = hidden[None]
        logits: Tensor = self._head.model(input_ids=None, inputs_embeds=hidden[None]).logits[0]
        return logits[:, : self.spec.vocab_size].float()

    def expert_loads(self) -> None:
        """Experts are transformers' own, which count nothing."""

    @property
    def weights_bytes(self) -> int:
        return sum(each.nbytes for each in self._model.parameters())

    def place(self, layer: int) -> tuple[int, int, bool]:
        """Returns (KV group, index in the group's cache, whether it stores its KV) of a layer; of
        one that shares another layer's KV, that layer's."""
        kept = self.spec.layer_kv[layer]
        if isinstance(kept, int):
            return *self._places[kept], False
        return *self._places[layer], True


class _Step(Answers):
    """Answers with attention over the cache."""

    def __init__(
        self,
        model: TransformersModel,
        positions: Tensor,
        contexts: Sequence[AttentionContext],
        kv_caches: Sequence[Tensor],
    ) -> None:
        self._model, self._positions = model, positions
        self._contexts, self._caches = contexts, kv_caches

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style) -> Tensor:
        group, index, stores = self._model.place(layer)
        attention = self._model.attentions[group]
        assert isinstance(attention, StyledAttention)
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        if style.temperature is not None:
            q = style.temperature.scaled(q, self._positions)
        cache, context = self._caches[group][index], self._contexts[group]
        ranks, heads = self._model.group, self._model.layout.heads[layer]
        if heads.whole_queries:
            share = q.shape[1] // ranks.size
            mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
            q = q[:, mine]
            if style.sinks is not None:
                style = replace(style, sinks=style.sinks[mine])
        if heads.whole_keys:
            mine = slice(*self._model.spec.kv_groups[group].head_range(ranks.rank, ranks.size))
            k, v = k[:, mine], v[:, mine]
        out = attention.attend_styled(q, k, v, style, cache, context, stores)
        return (ranks.all_gather(out, dim=1) if heads.whole_queries else out)[None]

    def recur(self, layer: int, inputs: DeltaInputs) -> Tensor:
        group, index, _ = self._model.place(layer)
        ranks, backend = self._model.group, self._model.attentions[group]
        assert isinstance(backend, DeltaBackend)
        start, end = self._model.spec.kv_groups[group].head_range(ranks.rank, ranks.size)
        states = self._caches[group][index][0, :, :, 0]
        out = backend.scan(inputs.of_units(start, end), states, self._contexts[group])
        return ranks.all_gather(out, dim=1) if ranks.size > 1 else out


@dataclass(frozen=True)
class _Output:
    """The output of a class's layers; what else some have is None."""

    last_hidden_state: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in for the layers, whose output is known."""

    hidden: Tensor

    @property
    def decoder(self) -> _Given:  # OPT calls `model.decoder`
        return self

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(self.hidden)


class _Head:
    """The class's own way from the last hidden states to logits."""

    def __init__(self, model: Any, given: _Given) -> None:
        self.model, self.given = model, given


def _head_of(model: Any) -> _Head:
    given, head = _Given(), copy.copy(model)
    head._modules = {**model._modules, layers_of(model)[0]: given}
    return _Head(head, given)


def load_transformers_model(
    spec: ModelSpec,
    config: ModelConfig,
    sharding: Sharding,
    stage: Stage,
    folder: ModelFolder | None = None,
) -> TransformersModel:
    """Loads this rank's part of the model, of `config` or `folder`, onto the sharding's device.

    Raises:
        ConfigError: the model cannot be split so, or the folder's tensors do not match the class;
            the message lists differences.
    """
    assert config.model is not None
    with _BUILDING:
        return _load(spec, config, sharding, stage, folder or ModelFolder(config.model))


def _load(
    spec: ModelSpec, config: ModelConfig, sharding: Sharding, stage: Stage, folder: ModelFolder
) -> TransformersModel:
    check_stage(spec.architecture, spec.layer_kv, stage)
    with folder.files() as path:
        hf_config = read_config(path, config.overrides)
    layout = choose_layout(spec, hf_config, sharding.group.size, stage)

    def prepare(model: Any) -> dict[str, Cut]:
        cuts = {}
        if sharding.group.size > 1:
            cuts = split(model, sharding.group, layout.way, layout.layers, layout.gather_kv)
        layers = model.get_submodule(layout.layers) if layout.layers else ()
        model.stage_run = StageRun(model, layers, stage, layout.tuples)
        return cuts

    kind = model_class(hf_config)
    if config.load_format == "dummy":
        torch.manual_seed(config.seed)
        made = kind._from_config(hf_config, attn_implementation=NAME, dtype=sharding.dtype)
        prepare(made)
    else:
        made = _read(kind, prepare, folder, spec, hf_config, sharding.dtype)
    return TransformersModel(spec, made.to(sharding.device).eval(), sharding, stage, layout)


def _read(
    kind: Any,
    prepare: Prepare,
    folder: ModelFolder,
    spec: ModelSpec,
    hf_config: Any,
    dtype: torch.dtype,
) -> Any:
    hf_logging.disable_progress_bar()
    with folder.weights(partial(model_view, spec)) as weights:
        try:
            model, info = partial_class(kind, prepare, weights).from_pretrained(
                None,
                config=hf_config,
                state_dict=dict(weights.tensors),  # parts of which are read when they are needed
                dtype=dtype,
                attn_implementation=NAME,
                ignore_mismatched_sizes=True,  # they are refused below, all at once
                output_loading_info=True,
            )
        except PdserveError:
            raise
        except Exception as error:  # of a file or a tensor
            why = first_line(error)
            raise ConfigError(f"the weights in {folder.path} cannot be loaded: {why}") from error
    problems = [
        f"{what}: {some_of(sorted(map(str, info[key])))}"
        for key, what in (("missing_keys", "missing"), ("mismatched_keys", "of another shape"))
        if info.get(key)
    ]
    if problems:
        raise ConfigError(f"weights do not fit {kind.__name__}; tensors {'; '.join(problems)}")
    return model
