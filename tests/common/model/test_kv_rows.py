"""KV of 8 bits: what is written is what torch would round to, and what is read is exactly that."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from paths import MODELS
from pdserve.common.config.engine import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import kv_row
from pdserve.common.model.attention import AttentionBatch, AttentionShape
from pdserve.common.model.attention_native import NativeAttention
from pdserve.common.model.device import make_backend
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import TorchKernels
from pdserve.common.node.model_facts import ModelFacts
from tiny_engine import CPU

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here"),
]

KINDS = ["int8", "fp8_e4m3"]
MOST = {"int8": 127.0, "fp8_e4m3": 448.0}
BLOCK, BLOCKS = 16, 8


def rounded(rows: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The bytes of `[*, D]` and the scales `[*]`."""
    scales = rows.float().abs().amax(-1) / MOST[kind]
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    numbers = rows.float() * inverse[..., None]
    if kind == "int8":
        return numbers.round().to(torch.int8).view(torch.uint8), scales
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8), scales


def dense(stored: Tensor, kind: str) -> Tensor:
    """`[*, D + 4]` bytes as float32 `[*, D]`."""
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    numbers = stored[..., :-4].contiguous().view(dtype).float()
    return numbers * stored[..., -4:].contiguous().view(torch.float32)


class World:
    """One sequence, computed over an 8-bit cache and over a plain one."""

    def __init__(self, kind: str, dtype: torch.dtype, dim: int, length: int) -> None:
        self.kind, self.dtype, self.dim, self.length = kind, dtype, dim, length
        self.shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=dim)
        self.table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
        numbers, _ = kv_row(dim, "float32", kind)
        self.cache = torch.full((1, 2, BLOCKS, 2, BLOCK, numbers), 77, dtype=torch.uint8)
        self.backend = NativeAttention(self.shape, CPU, dtype, NativeKernels(), kind)

    def random(self, heads: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        spread = torch.randn(self.length, heads, self.dim, generator=generator).mul_(2).exp_()
        signs = torch.randn(self.length, heads, self.dim, generator=generator).sign_()
        return (spread * signs).to(self.dtype)

    def run(self, *cuts: int, k: Tensor | None = None) -> Tensor:
        q, v = self.random(6, 0), self.random(2, 2)
        k = self.random(2, 1) if k is None else k
        return torch.cat(
            [
                self.backend.forward(
                    0, q[a:b], k[a:b], v[a:b], self.cache, self.backend.prepare(self.batch(a, b))
                )
                for a, b in zip((0, *cuts), (*cuts, self.length), strict=True)
            ]
        )

    def batch(self, start: int, end: int) -> AttentionBatch:
        return AttentionBatch([end - start], [start], [self.table], BLOCK)

    def stored(self, plane: int) -> Tensor:
        """`[length, kv_heads, D + 4]`."""
        where = torch.tensor(self.table).repeat_interleave(BLOCK)[: self.length]
        slots = torch.arange(self.length) % BLOCK
        return self.cache[0, plane][where, :, slots]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 20])
def test_rows_are_rounded_as_torch_does(kind: str, dtype: torch.dtype, dim: int) -> None:
    world = World(kind, dtype, dim, length=37)
    world.run()
    for plane, rows in enumerate((world.random(2, 1), world.random(2, 2))):
        numbers, scales = rounded(rows, kind)
        found = world.stored(plane)
        assert torch.equal(found[..., -4:].contiguous().view(torch.float32)[..., 0], scales)
        assert torch.equal(found[..., :-4], numbers)
        error = (dense(found, kind) - rows.float()).abs() / rows.float().abs().amax(-1)[..., None]
        assert error.max() <= (0.5 / 127 if kind == "int8" else 1 / 28) * 1.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_over_what_is_stored(kind: str, dtype: torch.dtype) -> None:
    """To the last bit, however the prompt is cut: one token, few and many at a time."""
    world = World(kind, dtype, 64, length=100)
    out = world.run()
    k, v = (dense(world.stored(plane), kind).to(dtype) for plane in range(2))
    plain = NativeAttention(world.shape, CPU, dtype, NativeKernels())
    cache = torch.zeros(1, 2, BLOCKS, 2, BLOCK, 64, dtype=dtype)
    exact = plain.forward(0, world.random(6, 0), k, v, cache, plain.prepare(world.batch(0, 100)))
    assert torch.equal(out, exact)
    world.cache.fill_(77)
    assert torch.equal(world.run(1, 5, 40, 98, 99), out)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_at_the_edges(kind: str) -> None:
    """Zeros stay zeros, and what is not finite makes its own row so, and no other."""
    world = World(kind, torch.float32, 64, length=4)
    k = torch.zeros(4, 2, 64)
    k[1, 0, 3], k[2, 1, 60], k[3, 0] = float("nan"), float("-inf"), 1e-38
    world.run(k=k)
    found = dense(world.stored(0), kind)
    bad = found.isnan().any(-1)
    assert bad.nonzero().tolist() == [[1, 0], [2, 1]] and found[bad].isnan().all()
    assert not found[~bad].any()


# ---- what is refused ----


def test_eight_bit_kv_needs_the_native_kernels() -> None:
    shape = AttentionShape(4, 2, 16)
    for kernels, device in ((TorchKernels(), CPU), (None, torch.device("cuda"))):
        with pytest.raises(ConfigError, match="--kv-cache-dtype int8 needs the native kernels"):
            make_backend(shape, device, torch.float32, kernels, "int8")


def read(impl: str = "auto") -> ModelFacts:
    return ModelFacts.read(
        EngineConfig(
            model=ModelConfig(model=str(MODELS / "llama-gqa"), model_impl=impl),
            parallel=ParallelConfig(device="cpu"),
            cache=CacheConfig(kv_cache_dtype="int8"),
        )
    )


def test_models_through_transformers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype int8: .* runs through transformers"):
        read("transformers")
    assert read().kv_identity(16)["kv_cache_dtype"] == "int8"
