"""The tokens of the last step, kept on the device for the step after it.

    step n:      logits ─ sample ─▶ tokens ─┬─ copy ─▶ host
    step n + 1:  token ids, DRAWN among them ◀┘ one gather; no host waits

With --async-scheduling a step may ask for tokens that the host does not know yet (`DRAWN`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.staging import upload


class TokenFeed:
    """Holds the tokens of one rank's last step."""

    def __init__(self, group: GroupCoordinator) -> None:
        """`group`: the ranks of a stage, of which the first samples."""
        self._group = group
        self._places: dict[int, int] = {}  # seq_id → index in `_tokens`
        self._tokens = torch.empty(0, dtype=torch.int64, device=group.device)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._places

    def keep(self, seq_ids: Iterable[int], tokens: Tensor | None = None) -> None:
        """Keeps a step's tokens, int64 `[B]`; without `tokens` on a rank that does not sample. A
        sequence that failed has any token of the vocabulary: its further results are not used."""
        self._places = {seq_id: place for place, seq_id in enumerate(seq_ids)}
        if tokens is None:
            tokens = self._tokens.new_zeros(len(self._places))
        self._tokens = tokens

    def fill(self, token_ids: Tensor, drawn: Sequence[tuple[int, int]]) -> None:
        """Writes tokens into `token_ids`; `drawn`: (place there, seq_id). All ranks of the group
        call this together."""
        self._tokens = self._group.broadcast(self._tokens)
        pairs = torch.tensor([(at, self._places[seq_id]) for at, seq_id in drawn]).T.contiguous()
        to, of = upload(pairs, self._tokens.device)
        token_ids.index_copy_(0, to, self._tokens.index_select(0, of))

    def count(self, seq_id: int, counts: Tensor) -> None:
        """Adds one to the sequence's token in `counts`, on a rank that samples."""
        token = self._tokens.narrow(0, self._places[seq_id], 1)
        counts.scatter_add_(0, token, torch.ones_like(token, dtype=counts.dtype))
