"""Describes a checkpoint of any transformers decoder from its `config.json` alone: builds the model
on the meta device, runs it once, and records what each layer's attention keeps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pdserve.common.core.checkpoint_config import overridden, read_json
from pdserve.common.core.config_values import MAX_LAYERS
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.generic_spec import Outline
from pdserve.common.core.kv_groups import LayerKV
from pdserve.common.core.model_spec import ModelSpec, RopeSpec
from pdserve.common.core.quantization import Quantization
from pdserve.common.core.stored_weights import StoredWeights, weight_formats
from pdserve.common.core.towers import has_towers, native_text
from pdserve.common.model.hf.attention import OUTLINE
from pdserve.common.model.hf.class_config import first_line, model_class, name_of, read_config
from pdserve.common.model.hf.experts import experts_of
from pdserve.common.model.hf.indexers import INDEXERS
from pdserve.common.model.hf.linears import let_adapt, linears_of, size_of
from pdserve.common.model.hf.meta_run import (
    Call,
    CallRecorder,
    StateCall,
    build,
    has_states,
    run_outline,
)
from pdserve.common.model.hf.mixers import BESIDE
from pdserve.common.model.hf.pipeline import decoder_layers

logger = logging.getLogger(__name__)

LAYERS = {
    "conv": "a short convolution, whose state is not supported",
    "linear_attention": "linear attention or a Mamba mixer of a kind that is not supported",
    "hybrid": "attention beside a recurrent state, which is not supported",
    "hybrid_sliding": "attention beside a recurrent state, which is not supported",
    "indexed_attention": "sparse attention with an indexer, whose keys are not supported",
    "minimax_m3_sparse": "attention to selected blocks, which is not supported",
    "compressed_sparse_attention": "attention to compressed tokens, which is not supported",
    "heavily_compressed_attention": "attention to compressed tokens, which is not supported",
}
"""transformers' layer type → why it cannot run on the paged cache."""
KEEP_NOTHING = ("mlp", "moe")
"""Layer types that compute each token independently."""
_NO_INTERFACE = "{} does not use transformers' attention interface"


def describe(folder: Path, overrides: Mapping[str, Any]) -> ModelSpec:
    """Returns the model's spec; raises ConfigError if it cannot run on the paged cache."""
    config = read_config(folder, overrides)
    model_class(config)
    name = name_of(config)
    if (count := getattr(config, "num_hidden_layers", 0) or 0) > MAX_LAYERS:
        raise ConfigError(
            f"config.json: {name} has {count} layers, more than the supported {MAX_LAYERS}"
        )
    for layer, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        known = ("hybrid",) if config.model_type in BESIDE else ("conv", "linear_attention")
        served = layer_type in known and has_states(config)
        served |= layer_type == "indexed_attention" and config.model_type in INDEXERS
        if layer_type in LAYERS and not served:
            raise ConfigError(f"{name}: layer {layer} is {LAYERS[layer_type]}")
    try:
        model = build(config)
        linears = _linears(model, config)
        let_adapt(linears)
        with torch.inference_mode():
            recorder = run_outline(model)
    except ConfigError:
        raise
    except Exception as error:  # transformers classes raise errors of any type
        logger.debug("%s cannot be described", name, exc_info=True)
        if OUTLINE in str(error):  # the class looks up its attention in a table of its own
            raise ConfigError(_NO_INTERFACE.format(name)) from error
        if "'Mask'" in str(error):
            raise ConfigError(
                f"{name} works on its attention mask itself, not through the attention interface"
            ) from error
        why = f"its code needs more than tokens and positions ({first_line(error)})"
        if "meta" in str(error):
            why = "its code reads the values of tensors"
        raise ConfigError(f"{name} cannot be described without weights: {why}") from error
    calls = _checked(name, config, recorder)
    quantization, stored = _formats(folder, overrides)
    outline = Outline.from_folder(folder, overrides)
    attends = next((call for call in calls if isinstance(call, Call)), None)
    return ModelSpec(
        architecture=name,
        family=str(config.model_type),
        hidden_size=model.get_input_embeddings().weight.shape[1],
        num_layers=len(calls),
        num_heads=0 if attends is None else attends.q.shape[1],
        num_kv_heads=0 if attends is None else attends.kv.num_kv_heads,
        head_dim=0 if attends is None else attends.kv.head_dim,
        intermediate_size=_intermediate_size(config),
        vocab_size=outline.vocab_size,
        max_position_embeddings=outline.max_position_embeddings,
        rms_norm_eps=0.0,
        rope=RopeSpec(),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=tuple(None if each is None else each.kv.window for each in calls),
        layer_kv=tuple(_shared(calls)),
        dtype=outline.dtype,
        eos_token_ids=outline.eos_token_ids,
        impl="transformers",
        quantization=quantization,
        stored=stored,
        towers=has_towers(read_json(folder / "config.json")),
        linears=tuple(
            (name, *size_of(each)) for name, each in linears.items() if name in recorder.linears
        ),
        num_experts=max((each.num_experts for each in experts_of(model).values()), default=0),
        own_states=recorder.mixed,
        num_parameters=sum(each.numel() for each in model.parameters()),
    )


def _formats(
    folder: Path, overrides: Mapping[str, Any]
) -> tuple[Quantization | None, StoredWeights | None]:
    """Returns the formats of weights that stay quantized and of weights that are dequantized."""
    config = overridden(read_json(folder / "config.json"), overrides)
    return weight_formats(native_text(config).get("quantization_config"))


def _linears(model: Any, config: Any) -> dict[str, nn.Module]:
    """Returns the linear layers within decoder layers, by name."""
    try:
        layers, _ = decoder_layers(model, _count(config))
    except ConfigError:  # the decoder layers were not found
        return {}
    found = linears_of(model)
    return {name: each for name, each in found.items() if name.startswith(f"{layers}.")}


def _count(config: Any) -> int:
    """Returns the number of decoder layers, 0 if the config does not state it."""
    names = ("decoder_layers", "num_hidden_layers")
    return int(next(filter(None, (getattr(config, name, None) for name in names)), 0))


def _checked(name: str, config: Any, recorder: CallRecorder) -> list[Call | StateCall | None]:
    """Returns the calls in the order of layers; None for layers that compute each token
    independently. Raises ConfigError unless every other layer attends once, in a way that the paged
    cache supports."""
    layers = _count(config)
    each = 1 + (config.model_type in BESIDE or config.model_type in INDEXERS)
    layers *= each
    if not recorder.calls:
        raise ConfigError(_NO_INTERFACE.format(name))
    kinds = getattr(config, "layer_types", None) or [""] * layers
    for layer in range(layers):
        optional = config.model_type in INDEXERS and layer % 2 == 0
        if (
            layer not in recorder.calls
            and not optional
            and kinds[layer // each] not in KEEP_NOTHING
        ):
            raise ConfigError(
                f"{name}: layer {layer} does not use transformers' attention interface"
            )
    calls = [recorder.calls.get(layer) for layer in range(layers)]
    if recorder.repeated or max(recorder.calls) >= layers:
        raise ConfigError(f"{name}: layers that attend more than once a token are not supported")
    for layer, call in enumerate(calls):
        if isinstance(call, Call) and call.style.mask.oddity:
            raise ConfigError(f"{name}: layer {layer}: {call.style.mask.oddity}")
        if isinstance(call, Call) and (window := call.style.mask.window) is not None and window < 1:
            raise ConfigError(f"{name}: layer {layer} attends to a window of {window} tokens")
    return calls


def _shared(calls: Sequence[Call | StateCall | None]) -> Iterator[LayerKV | int]:
    """Yields per layer the KV that it keeps; or the index of the first layer with the same keys, if
    it shares them; or its own index, if it keeps nothing."""
    owners: dict[int, int] = {}
    indexer: int | None = None
    for layer, call in enumerate(calls):
        if isinstance(call, StateCall) and not call.kv.state:
            indexer = layer
        if call is None:
            after = calls[layer + 1] if layer + 1 < len(calls) else None
            shares = isinstance(after, Call) and after.style.chosen is not None
            yield indexer if shares and indexer is not None else layer
            continue
        keys = call.k if isinstance(call, Call) else call
        owner = owners.setdefault(id(keys), layer)
        first = calls[owner]
        yield call.kv if owner == layer or first is None or first.kv != call.kv else owner


def _intermediate_size(config: Any) -> int:
    found = getattr(config, "intermediate_size", None)
    return found if isinstance(found, int) else 4 * config.hidden_size
