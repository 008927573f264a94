"""The draft model of a rank, which drafts tokens at the beginning of a step.

    StepDelta ─ drafting ─▶ k passes of the draft model ─▶ the same StepDelta, with its drafts

It has its own KV cache, with as many blocks as the model's, and its own block tables, which the
scheduler keeps (`common/engine/draft_model.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from pdserve.common.config.engine import EngineConfig
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.all2all import Replicated
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.engine.messages import StepDelta
from pdserve.common.model.decoder import Decoder
from pdserve.common.model.folder import ModelFolder
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from pdserve.common.worker.input_batch import InputBatch, StepBatch, StepSequence
from pdserve.common.worker.kv_cache import KVCache
from pdserve.common.worker.runner import ModelRunner


def load_draft_model(
    engine: EngineConfig, sharding: Sharding, folder: ModelFolder | None
) -> Decoder | None:
    """Loads this rank's part of the draft model, if there is one, from its folder; it has the
    model's TP size and is not quantized further. Raises ConfigError like `load_model`."""
    if folder is None:
        return None
    with folder.files() as path:
        spec = ModelSpec.from_folder(path)
    sharding = replace(sharding, all2all=Replicated(GroupCoordinator()))  # experts on all ranks
    config = replace(engine.model, model=str(folder.path), quantization=None)
    return load_model(spec, config, sharding, folder=folder)


class Drafter:
    """A rank's draft model with its cache and batch state."""

    def __init__(
        self, model: Decoder, cache: KVCache, device: torch.device, group: GroupCoordinator
    ) -> None:
        """`group`: the ranks that share the model; all of them sample."""
        self._cache = cache
        self._group = group
        self.runner = ModelRunner(model, cache.tensors, device, samples=True)
        vocab = model.spec.vocab_size
        self._batch = InputBatch(self.runner.block_size, vocab, device, samples=True)

    def complete(self, delta: StepDelta) -> StepDelta:
        """Returns the step with the drafts it asks for."""
        batch = self._batch.apply(StepDelta(delta.step, delta.drafting, delta.ended))
        if not batch.sequences:
            return delta
        drafts = self._draft(batch, {each.seq_id: each.num_drafts for each in delta.drafting})
        return replace(
            delta,
            sequences=tuple(
                replace(each, drafts=tuple(drafts[each.seq_id]))
                if each.num_drafts and not each.drafts
                else each
                for each in delta.sequences
            ),
        )

    def _draft(self, batch: StepBatch, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Returns seq_id → drafts, of the wanted numbers, equal on all ranks."""
        drafts: dict[int, list[int]] = {seq_id: [] for seq_id in wanted}
        sequences = batch.sequences
        while sequences:
            output = self.runner.run(StepBatch(batch.step, sequences))
            drawn = {seq_id: token.token_id for seq_id, token in output.tokens}
            for each in sequences:
                if each.sampling is not None:
                    # If sampling failed, any token will do: it is only a draft.
                    drafts[each.seq_id].append(drawn.get(each.seq_id, 0))
            sequences = tuple(
                _continued(each, drafts[each.seq_id][-1])
                for each in sequences
                if len(drafts[each.seq_id]) < wanted[each.seq_id]
            )
        return self._agreed(drafts)

    def _agreed(self, drafts: dict[int, list[int]]) -> dict[int, list[int]]:
        """Returns the first rank's drafts on all ranks: devices may round differently, and all
        ranks must compute the same tokens."""
        if self._group.size == 1:
            return drafts
        flat = [token for each in drafts.values() for token in each]
        tokens = iter(self._group.broadcast(torch.tensor(flat, device=self.runner.device)).tolist())
        return {seq_id: [next(tokens) for _ in each] for seq_id, each in drafts.items()}

    def close(self) -> None:
        self._cache.close()


def _continued(sequence: StepSequence, token: int) -> StepSequence:
    """Returns the sequence's next step, with the sampled token."""
    start = sequence.start + len(sequence.token_ids)
    return replace(sequence, token_ids=(token,), start=start)
