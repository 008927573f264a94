"""A decoder of transformers over the paged cache: a rank's part of its stage's layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.lora import adapted_shapes
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionShape,
    StepBackend,
)
from pdserve.common.model.attention_native import NativeAttention, can_attend
from pdserve.common.model.decoder import Decoder, places
from pdserve.common.model.delta_net import DeltaBackend, StateInputs, scan
from pdserve.common.model.hf.adapt import adapt
from pdserve.common.model.hf.attention import (
    Answers,
    Style,
    StyledAttention,
)
from pdserve.common.model.hf.class_config import first_line
from pdserve.common.model.hf.indexers import IndexBackend, IndexInputs
from pdserve.common.model.hf.layout import Heads, Layout
from pdserve.common.model.hf.linears import linears_of, part_of
from pdserve.common.model.hf.mixers import Mixer
from pdserve.common.model.hf.packed import bytes_of
from pdserve.common.model.hf.parallel import Cut
from pdserve.common.model.hf.probe import difference, probe
from pdserve.common.model.hf.quantize import needs_graph, round_products, tables_of
from pdserve.common.model.hf.steps import ClassSteps, GraphSteps, Recorded, Steps
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.latent import UpProjection
from pdserve.common.model.layers import LoRA
from pdserve.common.model.rotary import Angles
from pdserve.common.model.sharding import MatrixPart, Sharding
from pdserve.common.model.stages import Stage

logger = logging.getLogger(__name__)


class Differs(Exception):
    """A graph computes other results than the class it was recorded from."""


class TransformersModel(Decoder):
    """A rank's part of a transformers model, whose code `record` replaces by a graph."""

    def __init__(
        self, spec: ModelSpec, model: Any, sharding: Sharding, stage: Stage, layout: Layout
    ) -> None:
        self.spec, self.stage, self.layout = spec, stage, layout
        self.device, self.dtype, self.group = sharding.device, sharding.dtype, sharding.group
        self.kernels = sharding.kernels
        self.expert_parallel_size = sharding.all2all.group.size
        self._cuts: Mapping[str, Cut] = model.cuts
        self._bytes = sum(each.nbytes for each in model.parameters()) + bytes_of(model)
        self.rounds = spec.quantization is not None and spec.quantization.rounds
        sizes = adapted_shapes(spec)
        linears = {name: each for name, each in linears_of(model).items() if name in sizes}
        self._parts = {
            name: part_of(name, each, sizes[name], self._cuts) for name, each in linears.items()
        }
        adapt(model)
        self._places = places(spec.kv_groups, self.stage)
        self._steps: Steps = ClassSteps(model, linears)
        self.attentions: list[StepBackend] = [self._backend(kv, sharding) for kv in spec.kv_groups]

    def _backend(self, kv: KVGroup, sharding: Sharding) -> StepBackend:
        if kv.state:
            return DeltaBackend(sharding.kernels)
        if kv.planes == 1:
            return IndexBackend(self._shape(kv), self.device, self.dtype, sharding.kernels)
        return self._styled(kv)

    def record(self) -> None:
        """Replaces the class's code by a graph with our kernels, if it can be recorded. All ranks
        of a stage call this together.

        Raises:
            Differs: the graph computes other results. The model is unusable.
        ConfigError: the model is to be quantized, and cannot be recorded.
        """
        assert isinstance(self._steps, ClassSteps)
        try:
            with torch.inference_mode():
                recorded = Recorded(self._steps, self.stage, self.spec.hidden_size, self.kernels)
        except Exception as error:  # transformers classes raise errors of any type
            logger.debug("%s is not recorded", self.spec.architecture, exc_info=True)
            why = first_line(error)
            if self.rounds:
                raise needs_graph(self.spec.architecture, why) from error
            logger.info("%s runs by its class's own code: %s", self.spec.architecture, why)
            return
        self.attentions, plain = self._backends(recorded.calls)
        tables = tables_of(self._steps.model).keys() if self.rounds else frozenset[str]()
        with torch.inference_mode():
            expected = probe(self, self.group)
            try:
                self._steps = recorded.fused(plain, tables)
                why = difference(probe(self, self.group), expected)
            except Exception as error:
                logger.debug("%s's graph fails", self.spec.architecture, exc_info=True)
                raise Differs(first_line(error)) from error
        if why:
            raise Differs(why)
        if self.rounds:
            with torch.inference_mode():
                self._round(tables)

    def _round(self, tables: Set[str]) -> None:
        assert isinstance(self._steps, GraphSteps)
        names = {f"{name}.weight": part for name, part in self._parts.items()}
        parts = {name for name, part in names.items() if part.columns != slice(0, part.shape[1])}
        self._bytes -= round_products(
            self._steps.products, names.keys() | tables, parts, self.group, self.kernels
        )
        for each in self._steps.experts:
            self._bytes -= each.round(self._cuts, self.group, self.kernels)

    def _backends(self, calls: Mapping[int, Node]) -> tuple[list[StepBackend], frozenset[int]]:
        """Returns a backend per KV group, and the layers that need nothing beyond it. A group gets
        the native backend if none of its layers needs more."""
        backends: list[StepBackend] = []
        plain: set[int] = set()
        for number, kv in enumerate(self.spec.kv_groups):
            if kv.state or kv.planes == 1:
                backends.append(self.attentions[number])
                continue
            layers = [layer for layer in calls if self.place(layer)[0] == number]
            shapes = {self._plain_shape(layer, kv, calls[layer]) for layer in layers}
            shape = shapes.pop() if len(shapes) == 1 else None
            kernels = self.kernels
            if shape is not None and isinstance(kernels, NativeKernels) and can_attend(shape):
                backends.append(NativeAttention(shape, self.device, self.dtype, kernels))
                plain.update(layers)
            else:
                backends.append(self._styled(kv))
        return backends, frozenset(plain)

    def _plain_shape(self, layer: int, kv: KVGroup, node: Node) -> AttentionShape | None:
        """Returns the shape of a backend that computes the layer's attention; None without one."""
        style: Style = node.target.style  # type: ignore[union-attr]
        sizes = {each.meta["shape"][3] for each in node.args[:3]}  # type: ignore[union-attr]
        asked = style.softcap, style.sinks, style.temperature, style.slopes
        odd = any(each is not None for each in asked)
        if odd or sizes != {kv.head_dim} or self.layout.heads[layer] != Heads():
            return None
        shape = self._shape(kv, style.scale)
        heads = node.args[0].meta["shape"][1]  # type: ignore[union-attr]
        return shape if self.place(layer)[2] and heads == shape.num_heads else None

    def _shape(self, kv: KVGroup, scale: float | None = None) -> AttentionShape:
        start, end = kv.head_range(self.group.rank, self.group.size)
        heads = self.spec.num_heads // self.group.size
        return AttentionShape(heads, end - start, kv.head_dim, kv.window, kv.chunked, scale)

    def _styled(self, kv: KVGroup) -> StyledAttention:
        return StyledAttention(self._shape(kv), self.device, self.dtype)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        contexts: Sequence[AttentionContext],
        kv_caches: Sequence[Tensor],
        lora: LoRA | None = None,
    ) -> Tensor:
        """Computes a step; see `CausalLM.forward`."""
        step = _Step(self, positions, contexts, kv_caches, lora)
        return self._steps.forward(inputs, positions, step)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes logits with the class's own head, which may scale or cap them."""
        return self._steps.logits(hidden)[:, : self.spec.vocab_size].float()

    def adapted(self) -> Iterator[tuple[MatrixPart, ...]]:
        for names in self._steps.adapted:
            yield tuple(self._parts[name] for name in names)

    def expert_loads(self) -> None:
        """Returns None: transformers' experts do not count tokens."""

    @property
    def weights_bytes(self) -> int:
        return self._bytes

    def place(self, layer: int) -> tuple[int, int, bool]:
        """Returns (KV group, index in the group's cache, whether it stores its KV) of a layer. For
        a layer that shares another layer's KV, group and index are those of the other layer."""
        kept = self.spec.layer_kv[layer]
        if isinstance(kept, int):
            return *self._places[kept], False
        return *self._places[layer], True


class _Step(Answers):
    """Computes a step's attention over the cache."""

    def __init__(
        self,
        model: TransformersModel,
        positions: Tensor,
        contexts: Sequence[AttentionContext],
        kv_caches: Sequence[Tensor],
        lora: LoRA | None,
    ) -> None:
        self._model, self.positions, self._lora = model, positions, lora
        self._contexts, self._caches = contexts, kv_caches

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style) -> Tensor:
        group, index, stores = self._model.place(layer)
        attention = self._model.attentions[group]
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        if isinstance(attention, IndexBackend):
            return self._attend_latents(layer, q, k, style)
        if not isinstance(attention, StyledAttention):
            assert isinstance(attention, AttentionBackend)
            return attention.forward(index, q, k, v, self._caches[group], self._contexts[group])[
                None
            ]
        if style.temperature is not None:
            q = style.temperature.scaled(q, self.positions)
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
        if style.slopes is not None and ranks.size > 1:
            share = q.shape[1]
            mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
            style = replace(style, slopes=style.slopes[mine])
        out = attention.attend_styled(q, k, v, style, cache, context, stores)
        return (ranks.all_gather(out, dim=1) if heads.whole_queries else out)[None]

    def _attend_latents(self, layer: int, q: Tensor, latents: Tensor, style: Style) -> Tensor:
        group, index, _ = self._model.place(layer)
        attention, ranks = self._model.attentions[group], self._model.group
        assert isinstance(attention, IndexBackend)
        assert style.latent is not None and style.up is not None
        whole, sinks = self._model.layout.heads[layer].whole_queries, style.sinks
        if whole:
            share = len(style.up)
            mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
            q, sinks = q[:, mine], None if sinks is None else sinks[mine]
        own, turned = q.split((style.latent.nope_dim, style.latent.rope_dim), dim=2)
        up, chosen = UpProjection(style.latent, style.up), style.chosen
        if chosen is not None:
            chosen = chosen[0] if chosen.shape[2] else None  # every query attends to all
        cache, context = self._caches[group], self._contexts[group]
        out = attention.attend_latents(
            index, own, turned, latents, up, cache, context, chosen, sinks
        )
        return (ranks.all_gather(out, dim=1) if whole else out)[None]

    def attend_fused(
        self, layer: int, qkv: Tensor, norms: tuple[Any, Any] | None, angles: Angles | None
    ) -> Tensor:
        """Attends from a layer's QKV `[T, (heads + 2 · kv_heads) · D]` → `[T, heads, D]`."""
        group, index, _ = self._model.place(layer)
        attention, cache = self._model.attentions[group], self._caches[group]
        assert isinstance(attention, AttentionBackend)
        heads = qkv.view(len(qkv), -1, attention.shape.head_dim)
        return attention.attend(index, heads, norms, angles, cache, self._contexts[group])

    def adapt(self, linear: str, x: Tensor, y: Tensor) -> None:
        if self._lora is not None:
            self._lora.add(linear, x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]))

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        group, index, _ = self._model.place(layer)
        ranks, backend = self._model.group, self._model.attentions[group]
        assert isinstance(backend, DeltaBackend)
        start, end = self._model.spec.kv_groups[group].head_range(ranks.rank, ranks.size)
        states = self._caches[group][index][0, :, :, 0]
        out = backend.scan(inputs.of_units(start, end), states, self._contexts[group])
        shared = end - start < self._model.spec.kv_groups[group].num_kv_heads
        return ranks.all_gather(out, dim=1) if shared else out

    def index(self, layer: int, inputs: IndexInputs) -> Tensor:
        group, place, _ = self._model.place(layer)
        backend = self._model.attentions[group]
        assert isinstance(backend, IndexBackend)
        return backend.choose(inputs, self._caches[group][place], self._contexts[group])

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        group, index, _ = self._model.place(mixer.layer)
        rows, out = hidden[0], torch.empty_like(hidden[0])

        def rule(which: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            found, after = mixer.run(rows[which], before[:, 0])
            return found, after[:, None]

        scan(rule, out, self._caches[group][index][0, :, :, 0], self._contexts[group])
        return out[None]
