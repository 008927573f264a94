"""Tensor-parallel ranks compute the logits of one rank, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quantized_folder import Scheme, quantize_folder
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.all2all import make_all2all
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.parallel_state import ParallelState
from pdserve.common.model.device import choose_kernels
from pdserve.common.model.loader import load_model
from pdserve.common.model.sharding import Sharding
from ranks import Ranks
from thinned import only
from tiny_engine import CPU, new_cache, single_threaded_inference, some_tokens, step

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")

TABLE = [9, 3, 7, 1]
SCHEMES = {  # of llama-gqa
    "awq": Scheme("awq", group_size=16),
    "gptq": Scheme("gptq", bits=8, group_size=16),
}


def _logits(
    state: ParallelState | None, folder: str, dtype: torch.dtype, quantization: str | None
) -> bytes:
    """Returns those of a chunk of a prompt, of the next one beside another sequence, and of single
    tokens."""
    group = GroupCoordinator() if state is None else state.tp
    all2all = make_all2all("replicated", group if state is None else state.ep)
    sharding = Sharding(group, CPU, dtype, all2all, kernels=choose_kernels("native", CPU))
    config = ModelConfig(model=folder, quantization=quantization)
    spec = ModelSpec.from_folder(Path(folder))
    model = load_model(spec, config, sharding)
    cache, tokens = new_cache(model), some_tokens(40)
    steps = [
        [(tokens[:21], 0, TABLE)],
        [(tokens[21:38], 21, TABLE), (tokens[:5], 0, [2, 4])],
        [(tokens[38:39], 38, TABLE), (tokens[5:6], 5, [2, 4])],
    ]
    return b"".join(step(model, cache, each).numpy().tobytes() for each in steps)


@cache
def alone(folder: str, dtype: torch.dtype, quantization: str | None) -> bytes:
    with single_threaded_inference():
        return _logits(None, folder, dtype, quantization)


DENSE, MIXTURES = ("llama-gqa", "mistral", "qwen2", "qwen3"), ("mixtral", "qwen2-moe", "qwen3-moe")
KINDS = [
    *(
        (name, dtype, None)
        for name in DENSE + MIXTURES
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(("llama-gqa", dtype, "int8") for dtype in (torch.float32, torch.bfloat16)),
    *(("qwen2-moe", dtype, "int8") for dtype in (torch.float32, torch.bfloat16)),
    *((scheme, dtype, None) for scheme in SCHEMES for dtype in (torch.float32, torch.bfloat16)),
]
SIZES = [
    (2, 1, "auto"),
    (2, 2, "auto"),
    (4, 1, "auto"),
    (4, 2, "auto"),
    (4, 4, "auto"),
    (4, 1, "gloo"),
]
CASES = [(*kind, *size) for kind in KINDS for size in SIZES if size[1] == 1 or kind[0] in MIXTURES]
FEW = [
    ("llama-gqa", torch.bfloat16, None, 2, 1, "auto"),
    ("llama-gqa", torch.bfloat16, None, 4, 1, "gloo"),
    ("llama-gqa", torch.bfloat16, "int8", 4, 1, "auto"),
    ("qwen2-moe", torch.bfloat16, None, 4, 2, "auto"),
    ("qwen2-moe", torch.float32, None, 4, 1, "auto"),
    ("awq", torch.bfloat16, None, 2, 1, "auto"),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model, or of one in a scheme."""
    made = tmp_path_factory.mktemp("quantized")

    @cache
    def folder(name: str) -> Path:
        if name not in SCHEMES:
            return MODELS / name
        return quantize_folder(MODELS / "llama-gqa", made / name, SCHEMES[name])

    return folder


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "tp", "ep", "communicator"), only(CASES, FEW), ids=str
)
def test_ranks_compute_the_bits_of_one(
    name: str,
    dtype: torch.dtype,
    quantization: str | None,
    tp: int,
    ep: int,
    communicator: str,
    ranks: Ranks,
    folder_of: Callable[[str], Path],
) -> None:
    kind = (str(folder_of(name)), dtype, quantization)
    found: list[Any] = ranks.run(_logits, *kind, tp=tp, ep=ep, communicator=communicator)
    assert found == [alone(*kind)] * tp
