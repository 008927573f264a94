"""Makes the KV pool of a model with full attention in all layers."""

from __future__ import annotations

from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.engine.kv_pool import KVPool


def one_group(num_blocks: int, block_size: int, prefix_caching: bool = True) -> KVPool:
    return KVPool([KVGroup((0,), 1, 1)], [num_blocks], block_size, prefix_caching)
