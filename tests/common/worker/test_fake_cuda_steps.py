"""Whole steps on a fake GPU: nothing mixes devices, and the host waits for no value before the
results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from fake_cuda import CUDA, NO_CUDA, fake_cuda
from paths import MODELS
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.engine.messages import DRAWN
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.kernels.gpu.activation import silu_and_mul
from pdserve.common.model.kernels.gpu.launch import launch
from pdserve.common.model.sharding import Sharding
from pdserve.common.worker.graphs import Compute
from pdserve.common.worker.input_batch import StepBatch, StepSequence
from pdserve.common.worker.runner import ModelRunner, dummy_batch
from pdserve.common.worker.sampler import sample
from pdserve.common.worker.token_feed import TokenFeed
from sampled_rows import PARAMS, VOCAB, sequences

pytestmark = [NO_CUDA, pytest.mark.usefixtures("on_fake_cuda")]

BLOCK_SIZE = 16
PARAMETERS = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, logprobs=2)


@pytest.fixture
def on_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # torch's attention
    with fake_cuda(monkeypatch), torch.inference_mode():
        yield


def test_a_wait_for_a_value_raises() -> None:
    """Else the other tests show nothing."""
    found = torch.zeros(3, device=CUDA)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        bool((found > 0).any())
    with pytest.raises(Exception, match="nonzero"):
        found[found > 0]
    with pytest.raises(Exception, match="device"):
        found + torch.zeros(3)


def test_a_kernel_on_a_fake_gpu_gets_no_tensor_of_the_host() -> None:
    there = torch.zeros(3, 8, device=CUDA)
    launch("a kernel", (3,), there, 8)
    with pytest.raises(AssertionError, match="with values"):
        launch("a kernel", (3,), there, torch.zeros(3))
    with pytest.raises(AssertionError, match="stride"):
        launch("a kernel", (3,), there[:, :4], 4)
    assert silu_and_mul(there).shape == (3, 4)


def test_the_sampler_waits_for_no_value_of_a_fake_gpu() -> None:
    feed = TokenFeed(GroupCoordinator(device=CUDA))
    rows = sequences(CUDA)
    sampled = sample(torch.zeros(len(PARAMS), VOCAB, device=CUDA), rows)
    feed.keep((row.seq_id for row in rows), sampled.tokens)
    token_ids = torch.zeros(3, dtype=torch.int64, device=CUDA)
    feed.fill(token_ids, [(2, 1), (0, 5)])
    feed.count(5, torch.zeros(VOCAB, device=CUDA))
    assert sampled.tokens.device == CUDA and len(sampled.tokens) == len(PARAMS)


def capture(compute: Compute) -> Callable[[], object]:
    compute()
    return lambda: None


def sequence(seq_id: int, tokens: tuple[int, ...], start: int) -> StepSequence:
    return StepSequence(seq_id, tokens, start, ((2 * seq_id, 2 * seq_id + 1),), PARAMETERS)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "mixtral", "qwen3-moe"])
def test_steps_wait_for_no_value_of_a_fake_gpu(name: str) -> None:
    spec, group = ModelSpec.from_folder(MODELS / name), GroupCoordinator(device=CUDA)
    kernels = choose_kernels("auto", CUDA)
    assert kernels.name == "triton"
    model = CausalLM(spec, Sharding(group, CUDA, torch.bfloat16, kernels=kernels))
    shape = spec.num_layers, 2, 20, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device=CUDA)]
    runner = ModelRunner(model, caches, CUDA, True, feed=TokenFeed(group))
    for rows in (
        dummy_batch(64, 4, BLOCK_SIZE, spec.kv_groups).sequences,
        tuple(sequence(i, (5,) * (9 + i), 0) for i in range(3)),
        tuple(sequence(i, (DRAWN,), 9 + i) for i in range(3)),
        (sequence(0, (DRAWN,), 10), sequence(3, (5,) * 20, 0)),
    ):
        assert callable(runner.begin(StepBatch(1, rows)))
