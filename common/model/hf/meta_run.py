"""Builds a transformers model on the meta device, where it takes no memory, runs it once, and
records how its layers attend."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import LayerKV
from pdserve.common.model.delta_net import StateInputs
from pdserve.common.model.hf.adapt import adapt, layers_of
from pdserve.common.model.hf.attention import OUTLINE, Answers, Mask, Style, answering
from pdserve.common.model.hf.class_config import model_class, name_of
from pdserve.common.model.hf.delta_net import MODEL_TYPES
from pdserve.common.model.hf.indexers import IndexInputs
from pdserve.common.model.hf.mixers import ALONE, MIXERS, Mixer
from pdserve.common.model.hf.own_attention import list_attentions
from pdserve.common.model.hf.positions import takes_positions

NUM_TOKENS = 3  # tokens of the run


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a layer's `Answers.attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    style: Style

    @property
    def kv(self) -> LayerKV:
        mask, size = self.style.mask, max(self.k.shape[3], self.v.shape[3])
        planes = 2 if self.style.latent is None else 1
        return LayerKV(self.k.shape[1], size, mask.window, mask.chunked, planes)


@dataclass(frozen=True, slots=True)
class StateCall:
    """The KV of a layer with a recurrent state, or of an indexer."""

    kv: LayerKV


@dataclass(slots=True)
class CallRecorder(Answers):
    positions: Tensor
    calls: dict[int, Call | StateCall] = field(default_factory=dict)
    linears: set[str] = field(default_factory=set)  # names of linear layers that were called
    repeated: bool = False
    mixed: bool = False  # whether a layer's own code computes its state

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style) -> Tensor:
        self.repeated |= layer in self.calls
        self.calls[layer] = Call(q, k, v, style)
        return style.output(q, v)

    def adapt(self, linear: str, x: Tensor, y: Tensor) -> None:
        self.linears.add(linear)

    def recur(self, layer: int, inputs: StateInputs) -> Tensor:
        self._note(layer, LayerKV.of_state(inputs.units, inputs.numbers))
        return inputs.output()

    def index(self, layer: int, inputs: IndexInputs) -> Tensor:
        self._note(layer, LayerKV(1, inputs.k.shape[2], planes=1))
        return inputs.output()

    def mix(self, mixer: Mixer, hidden: Tensor) -> Tensor:
        called, self.mixed = self.linears.copy(), True
        self._note(mixer.layer, LayerKV.of_state(1, mixer.numbers(hidden)))
        self.linears = called  # its own linear layers get tokens in another layout
        return torch.empty_like(hidden)

    def _note(self, layer: int, kv: LayerKV) -> None:
        self.repeated |= layer in self.calls
        self.calls[layer] = StateCall(kv)


def build(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns the model on the meta device, where it takes no memory."""
    list_attentions(config)
    config._experts_implementation = "batched_mm"  # the one without data-dependent sizes
    with torch.device("meta"):
        kind, options = model_class(config), {"attn_implementation": OUTLINE, "dtype": dtype}
        model = kind._from_config(config, **options).eval()
    _pass_experts(model)
    if not adapt(model):
        raise ConfigError(
            f"{name_of(config)} takes no positions: it counts the tokens of a single sequence, but "
            "a step has several sequences"
        )
    return model


def _pass_experts(model: Any) -> None:
    """Replaces experts whose code reads the routing: returns tensors of the right sizes."""

    def experts(x: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(x)

    for net in model.modules():
        if type(net).__name__ in ("DbrxExperts", "JetMoeMoE", "LongcatFlashExperts"):
            net.forward = experts
        elif type(net).__name__ == "JetMoeMoA":  # of queries and outputs
            net.map = partial(_mapped, net.top_k, net.hidden_size)
            net.reduce = partial(_reduced, net.input_size)


def _mapped(top_k: int, size: int, x: Tensor) -> tuple[Tensor, None, None]:
    return x.new_empty(*x.shape[:2], top_k, size), None, None


def _reduced(size: int, x: Tensor, _: None) -> Tensor:
    return x.new_empty(*x.shape[:2], size)


def run_outline(model: Any) -> CallRecorder:
    """Runs a model made by `build`, and returns how its layers attended. Raises whatever errors a
    transformers class raises."""
    recorder = CallRecorder(torch.arange(NUM_TOKENS, device="meta"))
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    base = layers_of(model)[1]
    told = {"position_ids": recorder.positions[None]} if takes_positions(base) else {}
    with answering(recorder):
        base(
            input_ids=tokens,
            attention_mask=_masks(model.config, tokens),
            use_cache=False,
            **told,
        )
    return recorder


def _masks(config: Any, tokens: Tensor) -> Any:
    """Returns masks by layer type, for classes that would read the values of a mask."""
    if config.model_type in ALONE:
        return None
    if not has_states(config):
        return torch.ones_like(tokens)
    window = getattr(config, "sliding_window", None)
    masks = {"full_attention": Mask(), "sliding_attention": Mask(window)}
    return {**masks, "linear_attention": None, "conv": None}


def has_states(config: Any) -> bool:
    return config.model_type in MODEL_TYPES or config.model_type in MIXERS
