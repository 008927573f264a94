"""Fills a model's weights from a checkpoint folder; each rank reads only the parts it keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import usable_cores
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.printable import some_of
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.checkpoint import Checkpoint
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.dequantize import model_view
from pdserve.common.model.folder import ModelFolder
from pdserve.common.model.sharding import Shard, Sharding
from pdserve.common.model.stages import Stage

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in total)

DUMMY_SCALE = 0.05
MAX_DRAWN = 8  # dummy tensors at once, in float32


def load_model(
    spec: ModelSpec,
    config: ModelConfig,
    sharding: Sharding,
    stage: Stage | None = None,
    on_progress: OnProgress | None = None,
    folder: ModelFolder | None = None,
) -> CausalLM:
    """Loads this rank's part of `config.model`; without a `stage` all layers. `spec`: of a native
    model. `folder`: reads the weights, default: from this host's disk.

    Raises:
        ConfigError: the folder's tensors do not match `spec`; the message lists all differences.
    """
    spec = spec.quantized(config.quantization)
    if sharding.kernels.products is not None:
        spec = spec.on_gpus()
    if config.load_format == "dummy":
        check_dummy(spec)
        model = CausalLM(spec, sharding, stage)
        shards = list(model.shards())
        _copy(_dummy_parts(shards, config.seed), shards, on_progress)
        model.loaded()
        return model
    if config.model is None:
        raise ConfigError("--model must name a checkpoint folder")
    folder = folder or ModelFolder(config.model)
    with folder.weights(partial(_checked, spec)) as weights:  # check before allocating memory
        model = CausalLM(spec, sharding, stage)
        shards = list(model.shards())
        _copy(weights.read(shards), shards, on_progress)
    model.loaded()
    return model


def _checked(spec: ModelSpec, checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with the tensors that the model has. Raises ConfigError."""
    checkpoint = model_view(spec, checkpoint)
    _check(checkpoint, spec)
    return checkpoint


def _copy(
    parts: Iterable[tuple[Shard, Tensor]], shards: list[Shard], on_progress: OnProgress | None
) -> None:
    total, done = sum(shard.target.nbytes for shard in shards), 0
    for shard, part in parts:
        # Unpack and round on the target device: a GPU is faster at it.
        shard.target.copy_(shard.convert(part.to(shard.target.device)))
        done += shard.target.nbytes
        if on_progress is not None:
            on_progress(done, total)
    for shard in shards:
        shard.finish()


def _check(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Raises ConfigError unless the checkpoint's tensors are exactly the model's."""
    whole = CausalLM(spec, Sharding(GroupCoordinator(), torch.device("meta"), torch.float32))
    expected = {shard.name: list(shard.shape) for shard in whole.shards()}
    found = {name: part.get_shape() for name, part in checkpoint.items()}
    problems = {
        "missing": sorted(expected.keys() - found.keys()),
        "unexpected": sorted(
            name
            for name in found.keys() - expected.keys()
            if not _harmless(name, checkpoint[name], spec)
        ),
        "of another shape": [
            f"{name} {found[name]} ≠ {shape}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ],
    }
    listed = [f"{kind}: {some_of(names)}" for kind, names in problems.items() if names]
    if listed:
        raise ConfigError(f"weights do not fit {spec.architecture}; tensors " + "; ".join(listed))


def _harmless(name: str, part: Any, spec: ModelSpec) -> bool:
    """Returns whether a tensor is one that some checkpoints contain but no decoder needs."""
    extra = range(spec.num_layers, spec.num_layers + spec.num_extra_layers)
    if name.startswith(tuple(f"model.layers.{layer}." for layer in extra)):
        return True
    tied_head = spec.tie_word_embeddings and name == "lm_head.weight"
    shape = name.endswith(".weight_shape")  # of compressed-tensors
    unused = tied_head or shape or name.endswith("rotary_emb.inv_freq")
    return unused or _gptq_extra(name, part, spec)


def _gptq_extra(name: str, part: Any, spec: ModelSpec) -> bool:
    """Returns whether a tensor is one of AutoGPTQ's redundant group indices or zero biases."""
    if spec.quantization is None or spec.quantization.method != "gptq":
        return False
    if name.endswith(".g_idx"):
        return not spec.quantization.desc_act
    return name.endswith(".bias") and not part[:].any()


# ---- dummy ----


def check_dummy(spec: ModelSpec) -> None:
    kind = spec.quantization
    if kind is not None and not kind.rounds and not kind.scaled:
        raise ConfigError(
            f"--load-format dummy cannot make {kind.method} weights: remove quantization_config "
            "from config.json, and pass --quantization int8 for quantized weights"
        )


def _dummy_parts(shards: list[Shard], seed: int) -> Iterator[tuple[Shard, Tensor]]:
    """Yields small random matrices and biases, and norms of one. Draws whole tensors and cuts them,
    so that the model is the same for every number of ranks. Drawing uses one core per tensor, so
    several are drawn at a time: a large model would take minutes."""
    count = min(usable_cores(), MAX_DRAWN)
    with ThreadPoolExecutor(count, "dummy-weights") as pool:
        for start in range(0, len(shards), count):
            some = shards[start : start + count]
            yield from zip(some, pool.map(partial(_draw, seed), some), strict=True)


def _draw(seed: int, shard: Shard) -> Tensor:
    if shard.name.endswith("norm.weight"):
        return torch.ones(shard.shape)[shard.index]
    if shard.target.dtype == torch.uint8:  # FP8 or INT8: no number is e4m3's NaN
        return torch.randint(0, 120, shard.shape, dtype=torch.uint8)[shard.index]
    digest = hashlib.blake2b(f"{seed} {shard.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    whole = torch.empty(shard.shape).uniform_(-DUMMY_SCALE, DUMMY_SCALE, generator=generator)
    return whole[shard.index]
