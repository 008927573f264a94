"""The CPU's attention backends against float64, over caches whose unused slots hold NaN."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from lent_core import lent_core
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBackend, AttentionBatch, AttentionShape
from pdserve.common.model.attention_native import NativeAttention
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.device import make_backend
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import TorchKernels
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.rotary import apply_rotary
from pdserve.common.model.sharding import Sharding
from thinned import only, slow
from tiny_engine import CPU

pytestmark = pytest.mark.usefixtures("inference")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")
KINDS = ["torch", pytest.param("native", marks=needs_compiler)]


native_kernels = functools.cache(NativeKernels)


def backend(kind: str, shape: AttentionShape, dtype: torch.dtype) -> AttentionBackend:
    kernels = native_kernels() if kind == "native" else TorchKernels()
    return make_backend(shape, CPU, dtype, kernels)


@dataclass(frozen=True)
class Step:
    """Sequences of (queries, tokens in the cache before them), and all their keys and values."""

    shape: AttentionShape
    dtype: torch.dtype
    block_size: int
    sequences: Sequence[tuple[int, int]]

    def random(self, *size: int, seed: int) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    @property
    def lengths(self) -> list[int]:
        return [queries + start for queries, start in self.sequences]

    @property
    def tables(self) -> list[np.ndarray]:
        """Blocks in no order, and one more than is needed."""
        counts = [-(-length // self.block_size) + 1 for length in self.lengths]
        ids = np.random.default_rng(0).permutation(sum(counts))
        return np.split(ids, np.cumsum(counts)[:-1])

    @property
    def batch(self) -> AttentionBatch:
        """The blocks before a window may be another sequence's by now."""
        queries, starts = zip(*self.sequences, strict=True)
        firsts = [self.first_block(start) for start in starts]
        return AttentionBatch(
            queries,
            [start - first * self.block_size for start, first in zip(starts, firsts, strict=True)],
            [table[first:] for table, first in zip(self.tables, firsts, strict=True)],
            self.block_size,
            [first * self.block_size for first in firsts],
        )

    def first_block(self, start: int) -> int:
        shape = self.shape
        group = KVGroup(
            (0,), shape.num_kv_heads, shape.head_dim, shape.window, chunked=shape.chunked
        )
        return group.first_block(start, self.block_size)

    def keys_and_values(self, index: int) -> Tensor:
        """[2, length, kv_heads, D] of a sequence."""
        shape = self.shape
        return self.random(2, self.lengths[index], shape.num_kv_heads, shape.head_dim, seed=index)

    def queries(self) -> Tensor:
        tokens = sum(queries for queries, _ in self.sequences)
        return self.random(tokens, self.shape.num_heads, self.shape.head_dim, seed=99)

    def cache(self) -> Tensor:
        """Returns one layer's cache before the step: NaN where nothing was written."""
        count, heads = sum(map(len, self.tables)), self.shape.num_kv_heads
        size = (1, 2, count, heads, self.block_size, self.shape.head_dim)
        cache = torch.full(size, float("nan"), dtype=self.dtype)
        for i, (_, start) in enumerate(self.sequences):
            if start % self.block_size:  # zeroed when its first slot was written
                cache[0, :, self.tables[i][start // self.block_size]] = 0
            self.write(cache, i, self.first_block(start) * self.block_size, start)
        return cache

    def write(self, cache: Tensor, index: int, start: int, end: int) -> None:
        known, table = self.keys_and_values(index), torch.tensor(self.tables[index])
        positions = torch.arange(start, end)
        blocks, slots = table[positions // self.block_size], positions % self.block_size
        for part in range(2):
            cache[0, part][blocks, :, slots] = known[part, start:end]

    def new(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the step's tokens."""
        parts = [self.keys_and_values(i)[:, start:] for i, (_, start) in enumerate(self.sequences)]
        keys, values = torch.cat(parts, dim=1)
        return keys, values

    def exact(self) -> Tensor:
        queries, parts = self.queries().double(), []
        for i, (count, start) in enumerate(self.sequences):
            own, queries = queries[:count], queries[count:]
            group = self.shape.num_heads // self.shape.num_kv_heads
            keys, values = self.keys_and_values(i).double().repeat_interleave(group, dim=2)
            scores = torch.einsum("qhd,khd->hqk", own, keys) * self.shape.scale
            distances = torch.arange(start, start + count)[:, None] - torch.arange(len(keys))
            hidden = (distances < 0) | (distances >= (self.shape.window or len(keys)))
            if self.shape.chunked:
                chunks = torch.arange(len(keys)) // (self.shape.window or len(keys))
                hidden |= chunks < chunks[start : start + count, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(parts)

    def check(self, kind: str) -> None:
        attention, cache = backend(kind, self.shape, self.dtype), self.cache()
        keys, values = self.new()
        out = attention.forward(
            0, self.queries(), keys, values, cache, attention.prepare(self.batch)
        )
        limit = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.double(), self.exact(), rtol=limit, atol=limit)
        expected = self.cache()
        for i, (_, start) in enumerate(self.sequences):
            size = self.block_size
            first, behind = -(-start // size), -(-self.lengths[i] // size)
            expected[0, :, self.tables[i][first:behind]] = 0
            self.write(expected, i, start, self.lengths[i])
        assert torch.equal(cache.nan_to_num(7), expected.nan_to_num(7)), "what the step wrote"


DECODES = [(1, 0), (1, 1), (1, 14), (1, 15), (1, 16), (1, 63), (1, 64), (1, 301)]
CHUNKS = [(5, 0), (1, 7), (70, 0), (33, 30), (64, 64), (2, 311), (1, 100)]
GROUPS = [(4, 4), (9, 3), (14, 2), (8, 1), (20, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [DECODES, CHUNKS], ids=["decodes", "chunks"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", only([8, 48, 64, 80, 96, 128, 256], [8, 80, 128]))
def test_head_sizes(
    kind: str, sequences: list[tuple[int, int]], dtype: torch.dtype, dim: int
) -> None:
    Step(AttentionShape(6, 2, dim), dtype, 16, sequences).check(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [DECODES, CHUNKS], ids=["decodes", "chunks"])
@pytest.mark.parametrize("heads", GROUPS, ids=str)
def test_heads_that_share(
    kind: str, sequences: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    Step(AttentionShape(*heads, 64), torch.bfloat16, 16, sequences).check(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 5, 8, 64])
def test_block_sizes(kind: str, block_size: int) -> None:
    Step(AttentionShape(4, 2, 32), torch.float32, block_size, DECODES + CHUNKS).check(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [DECODES, CHUNKS], ids=["decodes", "chunks"])
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize("window", only([1, 15, 16, 64, 1000], [1, 64]))
def test_windows(kind: str, sequences: list[tuple[int, int]], block_size: int, window: int) -> None:
    more = [*sequences, (500, 0), (500, 70), (3, 1000)]
    Step(AttentionShape(6, 2, 32, window), torch.float32, block_size, more).check(kind)


@needs_compiler
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_long_context_is_split_between_threads(dtype: torch.dtype, window: int | None) -> None:
    for threads in (2, 5):
        torch.set_num_threads(threads)
        step = Step(
            AttentionShape(4, 2, 64, window), dtype, 16, [(1, 1000), (1, 0), (1, 3), (1, 3000)]
        )
        step.check("native")


@needs_compiler
def test_heads_of_sizes_that_the_kernels_do_not_take_are_torch_s() -> None:
    for dim, kind in ((7, TorchAttention), (256, NativeAttention), (512, NativeAttention)):
        assert type(backend("native", AttentionShape(1, 1, dim), torch.float32)) is kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [16, 64, 112])
def test_chunks_of_tokens(kind: str, window: int) -> None:
    shape = AttentionShape(4, 2, 32, window, chunked=True)
    Step(shape, torch.float32, 16, DECODES + CHUNKS).check(kind)


LENGTH = 640  # tokens: more than one of the parts that are summed by themselves
CUTS = {
    "one by one": [490, *[1] * 50, 100],
    "drafts": [400, *[3] * 50, 90],
    "chunks": [64] * 10,
    "odd chunks": [37] * 17 + [11],
    "a prompt and its answer": [600, *[1] * 40],
}


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "dtype", "window", "chunked"),
    [
        slow((4, 4), torch.float32, None, False),
        ((9, 3), torch.bfloat16, None, False),
        slow((14, 2), torch.bfloat16, 100, False),
        slow((20, 2), torch.float16, 600, False),
        ((14, 2), torch.float32, 192, True),
    ],
)
def test_a_token_has_the_same_bits_however_the_tokens_before_it_were_computed(
    heads: tuple[int, int], dtype: torch.dtype, window: int | None, chunked: bool
) -> None:
    """In steps of any size, alone and beside another sequence, on one thread, on two and with a
    lent core, with the blocks before its window and without them."""
    shape = AttentionShape(*heads, 32, window, chunked)
    attention, size = backend("native", shape, dtype), 16
    group = KVGroup((0,), heads[1], 32, window, chunked=chunked)
    torch.manual_seed(0)
    q, kv = torch.randn(LENGTH, heads[0], 32), torch.randn(2, LENGTH, heads[1], 32)
    q, kv = q.to(dtype), kv.to(dtype)
    table, other = np.split(np.random.default_rng(0).permutation(2 * (LENGTH // size + 1)), 2)

    def compute(counts: list[int], beside: bool, trimmed: bool) -> Tensor:
        cache = torch.zeros(1, 2, len(table) + len(other), heads[1], size, 32, dtype=dtype)
        outs, start = [], 0
        for count in counts:
            skip = size * group.first_block(start, size) if trimmed else 0
            rows = [slice(start, start + count)] * (1 + beside)
            batch = AttentionBatch(
                [count] * len(rows),
                [start - skip] * len(rows),
                [each[skip // size :] for each in (table, other)[: len(rows)]],
                size,
                [skip] * len(rows),
            )
            parts = [torch.cat([x[row] for row in rows]) for x in (q, *kv)]
            out = attention.forward(0, *parts, cache, attention.prepare(batch))
            outs.append(out[-count:])
            start += count
        return torch.cat(outs)

    whole = compute([LENGTH], beside=False, trimmed=False)
    for index, (name, counts) in enumerate(CUTS.items()):
        with team(index % 3):
            found = compute(counts, beside=index % 2 == 0, trimmed=True)
        assert torch.equal(found, whole), name


@contextmanager
def team(index: int) -> Iterator[None]:
    """One thread, two, or one with a core that is lent."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if index == 1 else 1)
    with lent_core(native_kernels()) if index == 2 else nullcontext():
        yield
    torch.set_num_threads(before)


@needs_compiler
def test_a_poisoned_query_spoils_its_own_row_only() -> None:
    step = Step(AttentionShape(4, 2, 32), torch.float32, 16, [(1, 40), (1, 41), (1, 42)])
    attention, queries = backend("native", step.shape, step.dtype), step.queries()
    queries[1, 2, 5] = float("nan")
    context = attention.prepare(step.batch)
    out = attention.forward(0, queries, *step.new(), step.cache(), context)
    spoiled = torch.zeros(3, 4, dtype=torch.bool)
    spoiled[1, 2] = True
    assert torch.equal(out.isnan().any(-1), spoiled)
    assert torch.equal(out.isnan().all(-1), spoiled)


# ---- positions and norms ----


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "head norms"])
@pytest.mark.parametrize("dim", [6, 64, 80])
def test_native_heads_are_turned_as_torch_s(dtype: torch.dtype, normed: bool, dim: int) -> None:
    """From projected heads to attention, with every rounding where torch has it."""
    step = Step(AttentionShape(6, 2, dim), dtype, 16, [(1, 5), (40, 0), (1, 31)])
    tokens = len(step.queries())
    qkv = torch.cat((step.queries(), *step.new()), dim=1)
    angles = step.random(2, tokens, 1, dim // 2, seed=5).clamp(-1, 1).unbind()
    sharding = Sharding(GroupCoordinator(), CPU, dtype)
    norms = (RMSNorm("q", dim, 1e-6, sharding), RMSNorm("k", dim, 1e-6, sharding))
    for seed, norm in enumerate(norms):
        norm.weight += step.random(dim, seed=seed)
    results = []
    for kind in ("torch", "native"):
        cache, attention = step.cache(), backend(kind, step.shape, dtype)
        context = attention.prepare(step.batch)
        chosen = norms if normed else None
        out = attention.attend(0, qkv.clone(), chosen, (angles[0], angles[1]), cache, context)
        results.append((out, cache))
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(*(out for out, _ in results), rtol=limit, atol=limit)
    torch.testing.assert_close(
        *(cache for _, cache in results), rtol=limit / 10, atol=limit / 10, equal_nan=True
    )
    if dtype != torch.float32 and not normed:
        assert torch.equal(*(cache.nan_to_num(7) for _, cache in results))


def test_rotation_keeps_lengths() -> None:
    angle = torch.rand(3, 1, 4)
    x = torch.randn(3, 2, 8)
    turned = apply_rotary(x, (angle.cos(), angle.sin()))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
