"""A block pool as of a model whose layers all attend to all tokens."""

from __future__ import annotations

from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.engine.kv_pool import KVPool


def one_group(num_blocks: int, block_size: int, prefix_caching: bool = True) -> KVPool:
    return KVPool([KVGroup((0,), 1, 1)], [num_blocks], block_size, prefix_caching)
