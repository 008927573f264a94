"""Compares the results of two implementations of a model for a few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.decoder import Decoder

PROBE_BLOCK = 16  # tokens; the probe's cache has one block
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest allowed difference between a graph and its class, relative to the largest element."""


def probe(model: Decoder, group: GroupCoordinator) -> list[Tensor]:
    """Returns a model's results for some fixed inputs, over caches of its own. `group`: its
    tensor-parallel ranks."""
    chance = torch.Generator().manual_seed(0)
    found = []
    for count in (1, 7):
        positions = torch.arange(count)
        if model.stage.first:
            inputs = torch.randint(model.spec.vocab_size, (count,), generator=chance)
        else:
            inputs = torch.randn(count, model.spec.hidden_size, generator=chance).to(model.dtype)
        caches = [_small_cache(model, group, kv) for kv in model.spec.kv_groups]
        batch = AttentionBatch([count], [0], [[0]], PROBE_BLOCK)
        contexts = model.prepare([batch] * len(caches))
        given = inputs.to(model.device), positions.to(model.device)
        hidden = model.forward(*given, contexts, caches)
        found += [hidden, *caches]
        if model.stage.last:
            found.append(model.compute_logits(hidden))
    return found


def _small_cache(model: Decoder, group: GroupCoordinator, kv: KVGroup) -> Tensor:
    start, end = kv.head_range(group.rank, group.size)
    first, last = kv.layers_between(model.stage.start, model.stage.end)
    slots, _ = kv.page(PROBE_BLOCK)
    size = (last - first, kv.planes, 1, end - start, slots, kv.head_dim)
    dtype = torch.float32 if kv.state else model.dtype
    return torch.zeros(size, dtype=dtype, device=model.device)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Describes the difference of two `probe` results; "" if it is only rounding."""
    for ours, theirs in zip(found, expected, strict=True):
        if not theirs.numel():  # layers of other stages
            continue
        off = (ours.float() - theirs.float()).abs().max().item()
        off /= max(1e-6, theirs.abs().max().item())
        if not off < TOLERANCE[found[0].dtype]:
            return f"a step differs by {off:.2g} of its largest number"
    return ""
