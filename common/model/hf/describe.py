"""Describes a checkpoint of any decoder of transformers, from its `config.json` alone: its model is
built without memory and runs once, and each layer's attention says what it keeps."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from pdserve.common.core.config_values import CONFIG, MAX_LAYERS, check_values
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.generic_spec import Outline
from pdserve.common.core.kv_groups import LayerKV
from pdserve.common.core.model_spec import ModelSpec, RopeSpec, overridden, read_json
from pdserve.common.core.quantization import Quantization
from pdserve.common.core.stored_weights import StoredWeights, weight_formats
from pdserve.common.core.towers import WITH_TOWERS, has_towers, native_text
from pdserve.common.model.delta_net import StateInputs
from pdserve.common.model.hf.adapt import adapt, layers_of
from pdserve.common.model.hf.attention import OUTLINE, Answers, Mask, Style, answering
from pdserve.common.model.hf.delta_net import MODEL_TYPES
from pdserve.common.model.hf.experts import experts_of
from pdserve.common.model.hf.indexers import INDEXERS, IndexInputs
from pdserve.common.model.hf.linears import let_adapt, linears_of, size_of
from pdserve.common.model.hf.mixers import ALONE, BESIDE, MIXERS, Mixer
from pdserve.common.model.hf.own_attention import list_attentions
from pdserve.common.model.hf.pipeline import decoder_layers
from pdserve.common.model.hf.positions import takes_positions

logger = logging.getLogger(__name__)

NUM_TOKENS = 3  # of the run
MAX_REASON = 160  # characters of another library's error
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
"""Why layers of these types of transformers cannot run on the paged cache."""
KEEP_NOTHING = ("mlp", "moe")
"""Types of layers that see one token alone."""
_NO_INTERFACE = "{} does not use transformers' attention interface"


@dataclass(frozen=True, slots=True)
class Call:
    """How a layer attended; tensors are as `Answers.attend` has them."""

    q: Tensor
    k: Tensor
    v: Tensor
    style: Style

    @property
    def kv(self) -> LayerKV:
        mask, size = self.style.mask, max(self.k.shape[3], self.v.shape[3])
        return LayerKV(self.k.shape[1], size, mask.window, mask.chunked)


@dataclass(frozen=True, slots=True)
class StateCall:
    """How a layer with a state, or an indexer, was computed."""

    kv: LayerKV


@dataclass(slots=True)
class Recorder(Answers):
    positions: Tensor
    calls: dict[int, Call | StateCall] = field(default_factory=dict)
    linears: set[str] = field(default_factory=set)  # called ones of those that are asked for
    repeated: bool = False
    mixed: bool = False  # whether a layer has a state that its own code computes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style) -> Tensor:
        self.repeated |= layer in self.calls
        self.calls[layer] = Call(q, k, v, style)
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])

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
        self.linears = called  # its own ones see tokens otherwise than a step has them
        return torch.empty_like(hidden)

    def _note(self, layer: int, kv: LayerKV) -> None:
        self.repeated |= layer in self.calls
        self.calls[layer] = StateCall(kv)


def model_class(config: Any) -> type[PreTrainedModel]:
    """Returns transformers' class for a config of `read_config`. Raises ConfigError if there is
    none that fits."""
    name = name_of(config)
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder with a decoder: only decoders are served")
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise ConfigError(f"{name} takes images or audio and has no text model of its own")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = f"{name} (model type {config.model_type})"
        raise ConfigError(f"{kind} is not a causal language model of transformers")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def name_of(config: Any) -> str:
    """Returns the architecture that `config.json` names."""
    return str((config.architectures or [type(config).__name__])[0])


def _formats(
    folder: Path, overrides: Mapping[str, Any]
) -> tuple[Quantization | None, StoredWeights | None]:
    """Returns the format that weights keep in memory, and the one that is dequantized."""
    config = overridden(read_json(folder / "config.json"), overrides)
    return weight_formats(native_text(config).get("quantization_config"))


def first_line(error: Exception) -> str:
    """Returns the first line of another library's error in a bounded length, with the next one if
    it ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    found = " ".join(map(str.strip, lines[: 1 + lines[0].endswith(":")]))
    return found if len(found) <= MAX_REASON else f"{found[:MAX_REASON]} …"


def read_config(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """Reads `config.json` with `overrides` merged into it, of a model with towers (images, audio)
    the text model's part; never runs code of the checkpoint. Raises ConfigError."""
    config = overridden(read_json(folder / "config.json"), overrides)
    check_values(config, CONFIG)
    config.pop("quantization_config", None)  # `_formats` is what is known of it
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"transformers has no model type {kind!r}, which config.json names")
    try:
        known = CONFIG_MAPPING[kind]
        found = known.from_dict(known._decode_special_floats(config))  # infinity, as it writes
    except Exception as error:  # whatever a config class of transformers checks
        why = first_line(Exception(str(error.__cause__ or error).partition(". Errors:")[0]))
        raise ConfigError(f"transformers cannot read {folder}/config.json: {why}") from error
    return _text_of(found)


def _text_of(config: Any) -> Any:
    text = getattr(config, "text_config", None)
    if not isinstance(text, PretrainedConfig) or config.is_encoder_decoder:
        return config
    if config.model_type not in WITH_TOWERS:
        raise ConfigError(
            f"{name_of(config)} takes images or audio, and its text model alone does not say the "
            "same, or was not compared"
        )
    text.architectures = config.architectures
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def build(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns the model on the meta device, without memory, to be described."""
    list_attentions(config)
    config._experts_implementation = "batched_mm"  # without sizes that depend on the data
    with torch.device("meta"):
        kind, options = model_class(config), {"attn_implementation": OUTLINE, "dtype": dtype}
        model = kind._from_config(config, **options).eval()
    _pass_experts(model)
    if not adapt(model):
        raise ConfigError(
            f"{name_of(config)} takes no positions: it counts the tokens of one sequence, and a "
            "step has tokens of several"
        )
    return model


def _pass_experts(model: Any) -> None:
    """Lets mixtures whose code looks at where tokens go return tensors of the right sizes."""

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


def run_outline(model: Any) -> Recorder:
    """Runs a model that `build` has made, and returns how its layers attended. Raises whatever a
    class of transformers does."""
    recorder = Recorder(torch.arange(NUM_TOKENS, device="meta"))
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
    """Returns masks by the type of layer, for classes that would look at the values of a mask."""
    if config.model_type in ALONE:
        return None
    if not _has_states(config):
        return torch.ones_like(tokens)
    window = getattr(config, "sliding_window", None)
    masks = {"full_attention": Mask(), "sliding_attention": Mask(window)}
    return {**masks, "linear_attention": None, "conv": None}


def describe(folder: Path, overrides: Mapping[str, Any]) -> ModelSpec:
    """Raises ConfigError, which says why, for a model that cannot run on the paged cache."""
    config = read_config(folder, overrides)
    model_class(config)
    name = name_of(config)
    if (count := getattr(config, "num_hidden_layers", 0) or 0) > MAX_LAYERS:
        raise ConfigError(
            f"config.json: {name} has {count} layers, and no more than {MAX_LAYERS} are served"
        )
    for layer, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        known = ("hybrid",) if config.model_type in BESIDE else ("conv", "linear_attention")
        served = layer_type in known and _has_states(config)
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
    except Exception as error:  # whatever a class of transformers does
        logger.debug("%s cannot be described", name, exc_info=True)
        if OUTLINE in str(error):  # its table of attentions of its own has no such one
            raise ConfigError(_NO_INTERFACE.format(name)) from error
        if "'Mask'" in str(error):
            raise ConfigError(
                f"{name} works on its attention mask itself, not through the attention interface"
            ) from error
        why = f"its code needs more than tokens and positions ({first_line(error)})"
        if "meta" in str(error):
            why = "its code looks at the values of tensors"
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


def _linears(model: Any, config: Any) -> dict[str, nn.Module]:
    """Returns the linear layers within decoder layers, by name."""
    try:
        layers, _ = decoder_layers(model, _count(config))
    except ConfigError:  # none is known
        return {}
    found = linears_of(model)
    return {name: each for name, each in found.items() if name.startswith(f"{layers}.")}


def _count(config: Any) -> int:
    """Returns the number of decoder layers."""
    return int(getattr(config, "decoder_layers", None) or config.num_hidden_layers)


def _has_states(config: Any) -> bool:
    return config.model_type in MODEL_TYPES or config.model_type in MIXERS


def _checked(name: str, config: Any, recorder: Recorder) -> list[Call | StateCall | None]:
    """Returns the calls in order of layers; None: of layers that see one token alone. Raises
    ConfigError unless every other layer attends once, and in a way that the paged cache can
    answer."""
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
    return calls


def _shared(calls: Sequence[Call | StateCall | None]) -> Iterator[LayerKV | int]:
    """Yields what each layer keeps; the first layer that has its keys, if that is another one; its
    own number, if it keeps nothing."""
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
