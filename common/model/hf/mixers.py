"""Runs transformers layers with a recurrent state (Mamba, short convolutions, delta attention …) by
their class's own code: several tokens of one sequence at a time, or one token of several.

The class's code reads and writes states in transformers' cache, in whose place it gets an object
with the states of these sequences only. All of a layer's states are in one row of the KV group, in
float32, and every tensor-parallel rank computes and keeps all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from pdserve.common.model.hf.attention import running
from pdserve.common.model.hf.mamba import take_mamba
from pdserve.common.model.hf.mamba2 import take_mamba2

MIXERS = {
    "bamba": "BambaMixer",  # in `MAMBA2`; here for activations that `mamba2.py` lacks
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lara_mini": "LaraMiniGatedDeltaNet",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "minimax": "MiniMaxLightningAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "bailing_hybrid": "BailingHybridDeltaAttention",
}
"""Model type → class of the layers with a recurrent state."""
MAMBA = {"falcon_mamba", "jamba", "mamba"}
"""Model types whose layers are Mamba (`mamba.py`)."""
MAMBA2 = {"bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"}
"""Model types whose layers are Mamba-2 (`mamba2.py`)."""
ALONE = {"falcon_mamba", "mamba", "mamba2"}
"""Model types without attention, whose layers need no positions."""
BESIDE = {"falcon_h1": "FalconH1Attention"}
"""Model type → class of the attention in the same layer, which counts as a layer before it."""


class States:
    """Stands for transformers' cache: the states of a layer for B sequences, `[B, …]` each."""

    def __init__(self) -> None:
        self.conv: dict[int, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0
    ) -> Tensor:
        """Returns the convolution's inputs: earlier ones, then `[B, channels, n]`."""
        past = self.conv.get(state_idx)
        if past is None:
            past = inputs.new_zeros(*inputs.shape[:-1], conv_kernel_size)
        seen = torch.cat((past, inputs), dim=-1)
        self.conv[state_idx] = seen[..., -past.shape[-1] :]
        return seen

    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.recurrent[state_idx] = states
        return states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.recurrent.get(0)

    def set_linear_cache(self, layer_idx: int, states: Tensor) -> None:
        self.recurrent[0] = states

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # then one token uses the same convolution as several


@dataclass(frozen=True, slots=True)
class _Part:
    """The shape and dtype of one of a sequence's states."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Mixer:
    """A layer with a recurrent state."""

    def __init__(self, net: Any) -> None:
        self.layer: int = net.layer_idx
        self.pair = type(net).__name__ == "MiniMaxLightningAttention"  # is what it returns
        self._own = net.forward
        self._parts: dict[tuple[str, int], _Part] = {}

    def numbers(self, hidden: Tensor) -> int:
        """Returns the elements of a sequence's states; `hidden`: any `[B, n, size]`."""
        if not self._parts:
            states = States()
            self._call(hidden[:1, :1], states)
            self._parts = {
                (kind, index): _Part(found[index].shape[1:], found[index].dtype)
                for kind, found in _kinds(states).items()
                for index in sorted(found)
            }
        return sum(prod(part.shape) for part in self._parts.values())

    def run(self, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """hidden `[B, n, size]`, before float32 `[B, numbers]` → `[B, n, size]`, states after."""
        assert before.shape[1] == self.numbers(hidden)
        states, start = States(), 0
        for (kind, index), part in self._parts.items():
            end = start + prod(part.shape)
            found = before[:, start:end].reshape(-1, *part.shape)
            _kinds(states)[kind][index] = found.to(part.dtype)
            start = end
        out = self._call(hidden, states)
        after = [_kinds(states)[kind][index] for kind, index in self._parts]
        return out, torch.cat([each.flatten(1).float() for each in after], dim=1)

    def _call(self, hidden: Tensor, states: States) -> Tensor:
        unused = {"position_embeddings": None, "attention_mask": None} if self.pair else {}
        found = self._own(hidden, cache=states, **unused)
        out: Tensor = found[0] if self.pair else found
        return out


def _kinds(states: States) -> Mapping[str, dict[int, Tensor]]:
    return {"conv": states.conv, "recurrent": states.recurrent}


def take_mixers(model: Any) -> None:
    """Has these layers compute their states through the step."""
    kind = model.config.model_type
    for net in list(model.modules()):
        if type(net).__name__ == BESIDE.get(kind):
            net.layer_idx *= 2
        if type(net).__name__ != MIXERS.get(kind):
            continue
        if kind in BESIDE:
            net.layer_idx = 2 * net.layer_idx + 1
        if kind in MAMBA:
            take_mamba(net)
        elif kind not in MAMBA2 or not take_mamba2(net):
            net.forward = partial(_forward, Mixer(net))


def _forward(mixer: Mixer, hidden_states: Tensor, **_: Any) -> Any:
    out = running().mix(mixer, hidden_states)
    return (out, None) if mixer.pair else out
