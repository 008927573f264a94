"""The facts about a node's model that are known before weights are read, and the check of jobs."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pdserve.common.config.engine import AUTO, EngineConfig
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.core.kv_groups import KV_AUTO, MAX_PART_LENGTH
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.parameters import MAX_CHOICES, check_range, check_token_ids
from pdserve.common.core.prompt_logprobs import check_size
from pdserve.common.core.request import GenerateJob
from pdserve.common.core.sampling import check_sampling
from pdserve.common.model.checkpoint import weights_revision
from pdserve.common.model.device import choose_dtype, device_type, dtype_name
from pdserve.common.model.implementation import read_spec
from pdserve.common.model.stages import stages_of
from pdserve.common.planning.kv_budget import fit_context

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    spec: ModelSpec
    max_model_len: int  # with auto the model's, until `within` limits it
    revision: str
    dtype: str
    device: str  # "cpu" or "cuda", of all ranks
    draft: ModelSpec | None = None  # of speculative decoding
    kv_cache_dtype: str = KV_AUTO

    @classmethod
    def read(cls, engine: EngineConfig) -> ModelFacts:
        """Reads the facts. Raises ConfigError if the node cannot serve the model like this."""
        config = engine.model
        assert config.model is not None, "call resolve_model first"
        folder = Path(config.model)
        spec = read_spec(folder, config.model_impl, config.overrides)
        spec = spec.quantized(config.quantization)
        max_model_len = config.context(spec.max_position_embeddings)
        spec.check_max_model_len(max_model_len)
        parallel = engine.parallel
        spec.validate_tensor_parallel(parallel.tensor_parallel_size)
        spec.validate_expert_parallel(parallel.tensor_parallel_size, parallel.expert_parallel_size)
        spec.check_kv_cache_dtype(engine.cache.kv_cache_dtype)
        stages_of(spec, parallel)
        if any(group.state for group in spec.kv_groups):
            _check_state(spec, engine)
        device = device_type(parallel.device)
        dtype = choose_dtype(config.dtype, spec.dtype, torch.device(device))
        return cls(
            name=config.served_name,
            spec=spec,
            max_model_len=max_model_len,
            revision=weights_revision(folder, config.load_format, config.seed, config.overrides),
            dtype=dtype_name(dtype),
            device=device,
            draft=_draft(engine, spec),
            kv_cache_dtype=engine.cache.kv_cache_dtype,
        )

    def within(self, engine: EngineConfig, num_blocks: int) -> ModelFacts:
        """Returns the facts with the context window of a cache that has `num_blocks` of the first
        KV group."""
        fitting = fit_context(engine, self.spec.kv_groups, num_blocks, self.max_model_len)
        if engine.model.max_model_len == AUTO:
            logger.info(
                "--max-model-len auto: %d tokens of the model's %d; the cache has %d blocks of %d",
                fitting, self.max_model_len, num_blocks, engine.cache.block_size,
            )  # fmt: skip
        return replace(self, max_model_len=fitting)

    def kv_identity(self, block_size: int) -> dict[str, str]:
        """Returns the properties that two nodes must share to exchange KV."""
        return {
            "weights": self.revision,
            "impl": self.spec.impl,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "quantization": kind.method if (kind := self.spec.quantization) else "none",
            "block_size": str(block_size),
            "layers": str(self.spec.num_layers),
            "kv_groups": "; ".join(map(str, self.spec.kv_groups)),
        }


def told(part: str) -> str:
    """Returns a part of `kv_identity` as routers are told of it: they accept no longer one. A long
    one ends in its hash, so that unequal parts stay unequal."""
    if len(part) <= MAX_PART_LENGTH:
        return part
    digest = hashlib.blake2b(part.encode(), digest_size=8).hexdigest()
    return f"{part[: MAX_PART_LENGTH - len(digest) - 2]}… {digest}"


def _check_state(spec: ModelSpec, engine: EngineConfig) -> None:
    """Raises ConfigError for options that need to roll back a recurrent state."""
    if engine.speculation.speculation is not None:
        raise ConfigError(
            f"--speculative-config: {spec.architecture} has linear attention, whose state does not "
            "roll back after a rejected draft; leave the option out"
        )


def _draft(engine: EngineConfig, spec: ModelSpec) -> ModelSpec | None:
    """Reads the draft model, if there is one. Raises ConfigError when it does not fit."""
    config, parallel = engine.speculation.speculation, engine.parallel
    if config is None or config.model is None:
        return None
    what = f"--speculative-config: draft model {config.model}"
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{what} needs one pipeline stage, since the first stage must know its drafts: with "
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size} use method ngram"
        )
    try:
        draft = ModelSpec.from_folder(config.model)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    if draft.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"{what} has a vocabulary of {draft.vocab_size} tokens, the model one of "
            f"{spec.vocab_size}: both must be made for one tokenizer"
        )
    try:
        draft.validate_tensor_parallel(parallel.tensor_parallel_size)
        draft.validate_expert_parallel(parallel.tensor_parallel_size, 1)
        draft.check_kv_cache_dtype(engine.cache.kv_cache_dtype)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error.message}") from None
    return draft


def check_job(job: GenerateJob, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest for a job that this node cannot do, though the router checked it."""
    longest = max(len(choice.output_token_ids) for choice in job.choices)
    if len(job.prompt_token_ids) + longest >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {len(job.prompt_token_ids)} tokens; this node's maximum context "
            f"length is {max_model_len} tokens, prompt and completion together",
            param="prompt",
        )
    if len(job.choices) > MAX_CHOICES:
        raise InvalidRequest(f"{len(job.choices)} choices are more than {MAX_CHOICES}", param="n")
    check_sampling(job.sampling, vocab_size)
    if job.sampling.prompt_logprobs is not None:
        check_size(len(job.prompt_token_ids), job.sampling.prompt_logprobs)
    check_token_ids(job.prompt_token_ids, vocab_size, "prompt")
    for choice in job.choices:
        check_range("choice", choice.index, 0, MAX_CHOICES - 1)
        check_token_ids(choice.output_token_ids, vocab_size, "prompt")
