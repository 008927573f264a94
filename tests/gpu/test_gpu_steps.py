"""A step on a GPU: what it answers, and that its host waits no oftener than it must."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.sampling import SampledToken
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.attention import AttentionBatch
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.kernels.gpu.ops import TritonKernels
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from pdserve.common.worker.graphs import CudaCapture, DecodeGraphs
from pdserve.common.worker.sampler import sample
from pdserve.common.worker.token_feed import TokenFeed
from sampled_rows import PARAMS, VOCAB, sequences

CUDA = torch.device("cuda")
BLOCK_SIZE = 16


@contextmanager
def no_waiting() -> Iterator[None]:
    """torch raises where it would make the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("spoiled", [0.0, torch.nan, torch.inf, -torch.inf])
def test_tokens_are_those_of_a_cpu_and_the_host_waits_once(spoiled: float) -> None:
    logits = torch.randn(len(PARAMS), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    logits[2, 9] += spoiled
    expected = sample(logits, sequences(torch.device("cpu"))).results()
    on_device, rows = logits.cuda(), sequences(CUDA)
    with no_waiting():
        found = sample(on_device, rows).results()
    for ours, theirs in zip(found, expected, strict=True):
        if not isinstance(ours, SampledToken) or not isinstance(theirs, SampledToken):
            assert ours == theirs
            continue
        assert ours.token_id == theirs.token_id
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, rel=1e-4)
            assert [t for t, _ in ours.logprobs.top] == [t for t, _ in theirs.logprobs.top]


def test_tokens_reach_the_next_step_without_the_host() -> None:
    feed = TokenFeed(GroupCoordinator(device=CUDA))
    logits, rows = torch.randn(len(PARAMS), VOCAB, device=CUDA), sequences(CUDA)
    counts, token_ids = torch.zeros(VOCAB, device=CUDA), torch.zeros(3, dtype=torch.int64).cuda()
    with no_waiting():
        sampled = sample(logits, rows)
        feed.keep((row.seq_id for row in rows), sampled.tokens)
        feed.fill(token_ids, [(2, 1), (0, 5)])
        feed.count(5, counts)
    ids = [row.token_id if isinstance(row, SampledToken) else None for row in sampled.results()]
    assert token_ids.tolist() == [ids[5], 0, ids[1]]
    assert counts.nonzero().flatten().tolist() == [ids[5]]


# ---- CUDA graphs ----


@pytest.fixture
def model() -> CausalLM:
    """A random one, for which FlashInfer has kernels."""
    pytest.importorskip("flashinfer")
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "hidden_size": 512}
    spec = replace(ModelSpec.from_folder(MODELS / "llama-gqa"), **heads)
    sharding = Sharding(GroupCoordinator(), CUDA, torch.bfloat16, kernels=TritonKernels())
    return load_model(spec, ModelConfig(load_format="dummy"), sharding)


@torch.inference_mode()
def test_replayed_steps_are_those_computed_eagerly(model: CausalLM) -> None:
    shape = (model.spec.num_layers, 2, 41, 2, BLOCK_SIZE, 128)
    caches = [torch.randn(shape, dtype=torch.bfloat16, device=CUDA)] * 2
    caches[1] = caches[0].clone()
    graphs = DecodeGraphs(model, [caches[1]], (1, 4, 8), [4], CudaCapture())
    for seed, count in enumerate((1, 2, 4, 5, 8, 3)):
        chance = random.Random(seed)
        blocks = chance.sample(range(40), 4 * count)
        tables = [blocks[4 * i : 4 * i + 4] for i in range(count)]
        starts = [chance.randrange(4 * BLOCK_SIZE) for _ in range(count)]
        batch = AttentionBatch([1] * count, starts, tables, BLOCK_SIZE)
        ids = [chance.randrange(model.spec.vocab_size) for _ in range(count)]
        hidden = model.forward(
            torch.tensor(ids, device=CUDA),
            torch.tensor(starts, device=CUDA),
            model.prepare([batch]),
            [caches[0]],
        )
        expected = model.compute_logits(hidden)
        found = graphs.run(ids, starts, [batch], None)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(caches[1][:, :, :40], caches[0][:, :, :40], rtol=2e-2, atol=2e-2)
