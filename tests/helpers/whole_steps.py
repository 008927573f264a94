"""Steps whose sequences are sent completely each time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.distributed.executor import Executor
from pdserve.common.engine.messages import NewSequence, SequenceDelta, StepDelta, StepOutput


def whole(
    seq_id: int,
    token_ids: Sequence[int],
    start: int,
    block_table: Sequence[int],
    sampling: SamplingParams | None,
) -> SequenceDelta:
    """Returns a complete sequence for a step; without `sampling` it samples no token."""
    new = NewSequence(
        sampling or SamplingParams(), num_prompt_tokens=start + len(token_ids), seed=0
    )
    tables = (tuple(block_table),)
    return SequenceDelta(seq_id, tuple(token_ids), start, (0,), tables, sampling is not None, new)


class Steps:
    """Runs an executor's steps, numbered from the first."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._numbers = itertools.count(1)

    async def run(self, *sequences: SequenceDelta) -> StepOutput:
        message = msgspec.msgpack.encode(StepDelta(next(self._numbers), sequences))
        return msgspec.msgpack.decode(await self._executor.step(message), type=StepOutput)

    async def drawn(self, *sequences: SequenceDelta) -> dict[int, SampledToken]:
        return dict((await self.run(*sequences)).tokens)
