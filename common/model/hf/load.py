"""Loads a rank's part of a model of transformers."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging as hf_logging

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.printable import some_of
from pdserve.common.distributed.all2all import Replicated
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.decoder import sum_blocks
from pdserve.common.model.dequantize import model_view
from pdserve.common.model.folder import ModelFolder
from pdserve.common.model.hf.attention import NAME
from pdserve.common.model.hf.class_config import first_line, model_class, read_config
from pdserve.common.model.hf.layout import choose_layout, tie
from pdserve.common.model.hf.loading import Prepare, partial_class
from pdserve.common.model.hf.model import Differs, TransformersModel
from pdserve.common.model.hf.own_attention import list_attentions
from pdserve.common.model.hf.parallel import Cut
from pdserve.common.model.hf.pipeline import check_stage
from pdserve.common.model.hf.quantize import needs_graph
from pdserve.common.model.hf.trace import RecordedRanks
from pdserve.common.model.loader import check_dummy
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage

logger = logging.getLogger(__name__)

# Errors about a checkpoint's files and tensors; any other one is a defect and keeps its traceback.
_READ_ERRORS = (OSError, ValueError, LookupError, RuntimeError, SafetensorError)
_BUILDING = threading.Lock()  # transformers changes its own classes while it makes a model


def load_transformers_model(
    spec: ModelSpec,
    config: ModelConfig,
    sharding: Sharding,
    stage: Stage,
    folder: ModelFolder | None = None,
) -> TransformersModel:
    """Loads this rank's part of the model onto the sharding's device. `folder`: where to read it,
    default: the one in `config`.

    Raises:
        ConfigError: the model cannot be split this way, or the tensors do not match the class;
            the message lists differences.
    """
    assert config.model is not None
    spec = spec.quantized(config.quantization)
    if config.load_format == "dummy":
        check_dummy(spec)
    folder = folder or ModelFolder(config.model)
    with _BUILDING:
        model = _load(spec, config, sharding, stage, folder)
    try:
        model.record()
    except Differs as error:
        if model.rounds:
            raise needs_graph(spec.architecture, str(error)) from error
        if type(folder) is not ModelFolder:  # a broadcast can be read only once
            raise ConfigError(
                f"the graph of {spec.architecture} gives other results ({error}), and "
                "--load-broadcast can read weights only once: leave the option out"
            ) from error
        logger.warning("%s runs by its class's own code: %s", spec.architecture, error)
        with _BUILDING:
            model = _load(spec, config, sharding, stage, folder)
    return model


def _load(
    spec: ModelSpec, config: ModelConfig, sharding: Sharding, stage: Stage, folder: ModelFolder
) -> TransformersModel:
    check_stage(spec.architecture, spec.layer_kv, stage)
    with folder.files() as path:
        hf_config = read_config(path, config.overrides)
    ranks, spread = sharding.group, sharding.all2all.group.size
    if spread > 1 and not isinstance(sharding.all2all, Replicated):
        raise ConfigError(
            f"--all2all-backend: {spec.architecture} runs through transformers, which supports "
            "replicated only"
        )
    layout = choose_layout(spec, hf_config, ranks.size, stage, spread)

    def prepare(model: Any) -> dict[str, Cut]:
        model.cuts = layout.apply(model, RecordedRanks(ranks), stage)
        return dict(model.cuts)

    kind = model_class(hf_config)
    list_attentions(hf_config)
    packing = replace(
        sharding,
        group=GroupCoordinator(),
        quantization=spec.quantization,
        blocks=sum_blocks(spec),
    )
    if config.load_format == "dummy":
        torch.manual_seed(config.seed)
        made = kind._from_config(hf_config, attn_implementation=NAME, dtype=sharding.dtype)
        prepare(made)
        tie(made)
    else:
        made = _read(kind, prepare, folder, spec, hf_config, packing)
    return TransformersModel(spec, made.to(sharding.device).eval(), sharding, stage, layout)


def _read(
    kind: Any,
    prepare: Prepare,
    folder: ModelFolder,
    spec: ModelSpec,
    hf_config: Any,
    sharding: Sharding,
) -> Any:
    hf_logging.disable_progress_bar()
    with folder.weights(partial(model_view, spec)) as weights:
        try:
            model, info = partial_class(kind, prepare, weights, sharding).from_pretrained(
                None,
                config=hf_config,
                state_dict=dict(weights.tensors),  # lazy: parts are read when they are needed
                dtype=sharding.dtype,
                attn_implementation=NAME,
                ignore_mismatched_sizes=True,  # all of them are reported below
                output_loading_info=True,
            )
        except PdserveError:
            raise
        except _READ_ERRORS as error:
            why = first_line(error)
            if "allocate memory" in why:  # torch's, of many lines
                why = "config.json has sizes for which there is not enough memory"
            raise ConfigError(f"the weights in {folder.path} cannot be loaded: {why}") from error
    problems = [
        f"{what}: {some_of(sorted(map(_named, info[key])))}"
        for key, what in (("missing_keys", "missing"), ("mismatched_keys", "of another shape"))
        if info.get(key)
    ]
    if problems:
        raise ConfigError(f"weights do not fit {kind.__name__}; tensors {'; '.join(problems)}")
    return model


def _named(tensor: Any) -> str:
    """Describes a name, or a (name, shape, expected shape), as transformers reports tensors."""
    if isinstance(tensor, str):
        return tensor
    name, shape, expected = tensor
    return f"{name} {list(shape)} ≠ {list(expected)}"
