"""The draft model of a rank: guesses of tokens, made at the beginning of a step.

    StepDelta ─ drafting ─▶ k passes over the draft model ─▶ the same StepDelta, with its drafts

It has a KV cache of its own, of as many blocks as the model's, with block tables of its own, which
the scheduler keeps as it keeps the others (`DraftModel` of `draft_model.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from pdserve.common.config.node import EngineConfig
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.all2all import Replicated
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.engine.messages import StepDelta
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from pdserve.common.worker.input_batch import InputBatch, StepBatch, StepSequence
from pdserve.common.worker.kv_cache import KVCache
from pdserve.common.worker.runner import ModelRunner


def load_draft_model(engine: EngineConfig, sharding: Sharding) -> CausalLM | None:
    """This rank's part of the draft model, if the options name one: as wide as the model's, not
    quantized further. Raises ConfigError as `load_model`."""
    config = engine.speculation.speculation
    if config is None or config.model is None:
        return None
    spec = ModelSpec.from_folder(config.model)
    sharding = replace(sharding, all2all=Replicated(GroupCoordinator()))  # experts on all ranks
    return load_model(spec, replace(engine.model, model=config.model, quantization=None), sharding)


class Drafter:
    """A rank's draft model at work."""

    def __init__(
        self, model: CausalLM, cache: KVCache, device: torch.device, group: GroupCoordinator
    ) -> None:
        """`group`: the ranks that share the model; all draw."""
        self._cache = cache
        self._group = group
        self.runner = ModelRunner(model, cache.tensor, device, samples=True)
        vocab = model.spec.vocab_size
        self._batch = InputBatch(cache.shape.block_size, vocab, device, samples=True)

    def complete(self, delta: StepDelta) -> StepDelta:
        """The step with the guesses it asks for."""
        batch = self._batch.apply(StepDelta(delta.step, delta.drafting, delta.ended))
        if not batch.sequences:
            return delta
        guesses = self._guess(batch, {each.seq_id: each.num_drafts for each in delta.drafting})
        return replace(
            delta,
            sequences=tuple(
                replace(each, drafts=tuple(guesses[each.seq_id]))
                if each.num_drafts and not each.drafts
                else each
                for each in delta.sequences
            ),
        )

    def _guess(self, batch: StepBatch, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """So many guesses for each sequence, equal on all ranks."""
        guesses: dict[int, list[int]] = {seq_id: [] for seq_id in wanted}
        sequences = batch.sequences
        while sequences:
            output = self.runner.run(StepBatch(batch.step, sequences))
            drawn = {seq_id: token.token_id for seq_id, token in output.tokens}
            for each in sequences:
                if each.sampling is not None:
                    # Where it has none to offer, any other is as good.
                    guesses[each.seq_id].append(drawn.get(each.seq_id, 0))
            sequences = tuple(
                _continued(each, guesses[each.seq_id][-1])
                for each in sequences
                if len(guesses[each.seq_id]) < wanted[each.seq_id]
            )
        return self._agreed(guesses)

    def _agreed(self, guesses: dict[int, list[int]]) -> dict[int, list[int]]:
        """The first rank's: a step must be of the same tokens everywhere, be it that a device
        rounds otherwise."""
        if self._group.size == 1:
            return guesses
        flat = [token for each in guesses.values() for token in each]
        tokens = iter(self._group.broadcast(torch.tensor(flat, device=self.runner.device)).tolist())
        return {seq_id: [next(tokens) for _ in each] for seq_id, each in guesses.items()}

    def close(self) -> None:
        self._cache.close()


def _continued(sequence: StepSequence, token: int) -> StepSequence:
    """By a token that it has drawn."""
    start = sequence.start + len(sequence.token_ids)
    return replace(sequence, token_ids=(token,), start=start)
