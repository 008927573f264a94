"""Passes the positions of a step's tokens to transformers modules that would count the tokens of a
single sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pdserve.common.model.hf.attention import running


def takes_positions(base: nn.Module) -> bool:
    """Returns whether a model's layers (`layers_of`) take `position_ids`."""
    given = inspect.signature(base.forward).parameters
    inner: Any = getattr(base, "decoder", None)
    if "args" in given and inner is not None:  # BartDecoderWrapper and others
        given = inspect.signature(inner.forward).parameters
    return "position_ids" in given


def take_positions(model: Any, base: nn.Module) -> bool:
    """Has position embeddings use the step's positions if the class passes them none, or positions
    that count from the first token. Returns whether the class can be passed positions now."""
    for each in _numbered_from_padding(model):
        each.position_embeddings.register_forward_pre_hook(_after_padding)
    if takes_positions(base):
        return True
    counting = list(_counting(model))
    for each in counting:
        each.forward = _at_positions(each.forward)
    return bool(counting)


def _numbered_from_padding(model: nn.Module) -> Iterator[Any]:
    """Yields position embeddings of RoBERTa and others, which number positions from the padding
    token's id + 1."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and hasattr(
            module, "position_embeddings"
        ):
            yield module


def _after_padding(embedding: Any, args: tuple[Tensor]) -> Tensor:
    return args[0] + (embedding.padding_idx + 1)


def _counting(model: nn.Module) -> Iterator[Any]:
    """Yields embeddings that count tokens unless they get `position_ids` `[T]`."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            given = inspect.signature(module.forward).parameters
            if {"cache_length", "position_ids"} <= given.keys():
                yield module


def _at_positions(own: Any) -> Any:
    def forward(tokens: Any, *_: Any, **__: Any) -> Tensor:
        found: Tensor = own(tokens, 0, position_ids=running().positions)
        return found

    return forward
