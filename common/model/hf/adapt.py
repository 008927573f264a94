"""Adapts a transformers class to steps: replaces its code that assumes a single sequence."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pdserve.common.model.hf.attention import take_temperatures
from pdserve.common.model.hf.delta_net import take_delta_nets
from pdserve.common.model.hf.indexers import take_indexers
from pdserve.common.model.hf.latents import take_latents
from pdserve.common.model.hf.mixers import ALONE, take_mixers
from pdserve.common.model.hf.own_attention import take_attention
from pdserve.common.model.hf.positions import take_positions


def adapt(model: Any) -> bool:
    """Adapts a model, with or without loaded weights. Returns whether it needs no positions other
    than the ones that it is given."""
    take_temperatures(model)
    take_delta_nets(model)
    take_mixers(model)
    take_latents(model)
    take_indexers(model)
    has_bias = take_attention(model)
    told = take_positions(model, layers_of(model)[1])
    return told or has_bias or model.config.model_type in ALONE


def layers_of(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Returns (name, module) of the class's embedding and layers, without the head."""
    name = model.base_model_prefix
    if hasattr(model, name):
        return name, getattr(model, name)
    (found,) = (each for each in model.named_children() if isinstance(each[1], PreTrainedModel))
    return found
