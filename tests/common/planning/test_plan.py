"""`pdserve plan`: its arithmetic against what models, steps and nodes really take."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fake_card import FakeCard
from paths import ROOT
from pdserve.cli import topology
from pdserve.cli.main import main
from pdserve.cli.plan import _show, plan, setup
from pdserve.client.terminal import console_of
from pdserve.common.config.cluster import PlanConfig
from pdserve.common.config.engine import EngineConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.quantization import QUANTIZATIONS, Quantization
from pdserve.common.core.stored_weights import StoredWeights
from pdserve.common.distributed.all2all import Replicated
from pdserve.common.distributed.launch import make_executor
from pdserve.common.engine.messages import RankReady
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.implementation import read_spec
from pdserve.common.model.sharding import Sharding, ranges
from pdserve.common.model.stages import Stage, pipeline_stages
from pdserve.common.planning.footprint import Footprint, overhead
from pdserve.common.planning.role_plan import RolePlan
from pdserve.common.worker import kv_cache
from pdserve.common.worker.gpu_memory import GpuMemory
from pdserve.common.worker.runner import ModelRunner, num_dummy_blocks
from pdserve.common.worker.worker import WorkerConfig, worker_specs
from thinned import slow
from tiny_engine import single_threaded_inference
from windowed import FAMILIES, make_windowed

MODELS = ROOT / "tests" / "models"
NAMES = ("llama-gqa", "mistral", "qwen2", "qwen3")
SPARSE = ("mixtral", "qwen2-moe", "qwen3-moe")
CPU = torch.device("cpu")
GIB = 2**30
QWEN_14B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "intermediate_size": 13824,
    "vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "rope_theta": 1000000.0,
}  # fmt: skip


QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen") / "config.json"
    path.write_text(json.dumps(QWEN_14B))
    return path


def qwen_plan(qwen: Path, **options: Any) -> RolePlan:
    """Returns the plan of a decode node on 24 GiB cards."""
    fixed: dict[str, Any] = {"model": str(qwen), "gpu_memory": "24GiB", "max_model_len": 16384}
    return plan(PlanConfig(**{**fixed, **options}))[1]


# ---- Qwen2.5-14B on 24 GiB cards ----


def test_two_cards_hold_them_and_some_66_000_tokens(qwen: Path) -> None:
    found = qwen_plan(qwen, tensor_parallel_size=2)
    assert found.fits
    assert found.kv_per_token == 192 * 1024
    assert found.rank.kv_per_token == 96 * 1024
    assert found.rank.kv_per_sequence == 1.5 * GIB
    assert found.rank.left_for_kv == pytest.approx(6.1 * GIB, rel=0.01)
    assert found.num_tokens == pytest.approx(66_000, rel=0.05)
    assert found.max_concurrent_sequences == 4


def test_a_fix_fixes(qwen: Path) -> None:
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        assert qwen_plan(qwen, **{option: 2}).fits
    shorter = qwen_plan(qwen, quantization="int8", max_model_len=32768)
    assert not shorter.fits
    length = int(next(m for m in shorter.fixes if "max-model-len" in m).split()[1])
    assert qwen_plan(qwen, quantization="int8", max_model_len=length).fits
    assert not qwen_plan(qwen, quantization="int8", max_model_len=length + 1).fits


def test_kv_memory_beyond_what_is_left_does_not_fit(qwen: Path) -> None:
    assert qwen_plan(qwen, tensor_parallel_size=2, kv_cache_memory="6GiB").fits
    found = qwen_plan(qwen, tensor_parallel_size=2, kv_cache_memory="7GiB")
    assert not found.fits and "leave out --kv-cache-memory" in found.fixes


def test_roles_may_be_unequal(qwen: Path) -> None:
    config = PlanConfig(model=str(qwen), gpu_memory="24GiB", prefill_tp=4, decode_pp=2)
    prefill, decode = plan(config)
    assert (prefill.tensor_parallel_size, prefill.pipeline_partition) == (4, (48,))
    assert (decode.tensor_parallel_size, decode.pipeline_partition) == (1, (24, 24))
    assert (prefill.step_tokens, decode.step_tokens) == (2048, 256)


def test_a_mixture_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-30B-A3B: 30.5 B parameters, of which a token meets 3.3 B."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_30B))
    argv = ["plan", f"--model={path}", "--gpu-memory=80GiB", "--tp=4", "--ep=4", "--json"]
    assert main([*argv, "--prefill-ep=2"]) == 0
    prefill, decode = json.loads(capsys.readouterr().out)["roles"].values()
    assert (prefill["expert_parallel_size"], decode["expert_parallel_size"]) == (2, 4)
    assert prefill["rank"]["weights"] == decode["rank"]["weights"] < decode["weights"] / 3.9
    assert decode["parameters"] == pytest.approx(30.5e9, rel=0.01)
    assert decode["active_parameters"] == pytest.approx(3.35e9, rel=0.01)
    assert main(argv[:-1]) == 0
    text = capsys.readouterr().out
    assert "TP 4 × PP 1, EP 4" in text and "3.35 B" in text


# ---- stages ----


def test_stages_are_even_and_the_first_take_the_rest() -> None:
    assert [stage.num_layers for stage in pipeline_stages(30, 4)] == [8, 8, 7, 7]
    first, *middle, last = pipeline_stages(30, 4, (9, 8, 8, 5))
    assert first == Stage(0, 9, first=True, last=False)
    assert {(stage.first, stage.last) for stage in middle} == {(False, False)}
    assert last == Stage(25, 30, first=False, last=True)


@pytest.mark.parametrize(
    ("size", "partition"), [(5, None), (2, (3, 2)), (2, (4,)), (2, (4, 0)), (3, (2, 2))]
)
def test_stages_that_do_not_cut_the_model(size: int, partition: tuple[int, ...] | None) -> None:
    with pytest.raises(ConfigError, match="--pipeline-"):
        pipeline_stages(4, size, partition)


@pytest.mark.parametrize("name", [*NAMES, *SPARSE])
def test_stages_add_up_to_the_model(name: str) -> None:
    spec = tiny(name)
    whole, parts = Footprint(spec, "float16"), pipeline_stages(4, 2, (3, 1))
    head = 512 * spec.hidden_size * 2 if spec.tie_word_embeddings else 0  # held at both ends
    assert sum(map(whole.weights, parts)) == whole.weights(Stage.whole(4)) + head
    assert sum(map(whole.kv_per_token, parts)) == whole.kv_per_token(Stage.whole(4))


# ---- against models and steps ----


def tiny(name: str) -> ModelSpec:
    return ModelSpec.from_folder(MODELS / name)


# tp 4 has twice as many ranks as KV heads.
WEIGHTS = [
    *((tiny(name), tp, 1) for name in NAMES for tp in (1, 2, 4)),
    *((tiny(name), tp, ep) for name in SPARSE for tp in (1, 2, 4) for ep in (1, 2, 4) if ep <= tp),
    (replace(tiny("llama-gqa"), o_bias=True), 2, 1),
    (replace(tiny("llama-gqa"), mlp_bias=True), 2, 1),
    (replace(tiny("llama-gqa"), tie_word_embeddings=False, vocab_size=509), 2, 1),
    (replace(tiny("llama-gqa"), num_layers=3, intermediate_size=96, head_dim=16), 2, 1),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_a_model(dtype: str) -> None:
    for spec, tp, ep in WEIGHTS:
        assert_weights(spec, tp, dtype, ep)


def assert_weights(spec: ModelSpec, tp: int, dtype: str, ep: int = 1) -> None:
    """Compares those of rank 0."""
    group: Any = SimpleNamespace(rank=0, size=tp)
    owners: Any = SimpleNamespace(rank=0, size=ep)
    sharding = Sharding(group, CPU, getattr(torch, dtype), Replicated(owners))
    footprint, whole = Footprint(spec, dtype, tp, ep=ep), Stage.whole(spec.num_layers)
    assert footprint.weights(whole) == CausalLM(spec, sharding).weights_bytes, (spec, tp, ep)


KINDS = {
    "int8": QUANTIZATIONS["int8"],
    "int4, groups that ranks of 4 split": Quantization("awq", 4, group_size=64),
    "one group, some layers not": Quantization("gptq", 4, excluded=("0.mlp", "2.self_attn")),
    "8 bits": Quantization("gptq", 8, group_size=32),
    "desc_act": Quantization("gptq", 4, group_size=32, desc_act=True),
    "FP8": StoredWeights("FP8").kept,
    "FP8 in blocks": StoredWeights("FP8", (32, 32), excluded=("self_attn",)).kept,
    "INT8": StoredWeights("INT8", included=("down_proj",)).kept,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_a_quantized_model(kind: Quantization | None, dtype: str) -> None:
    for name in NAMES:
        for tp in (1, 2, 4):
            assert_weights(replace(tiny(name), quantization=kind), tp, dtype)
    for name, (tp, ep) in product(SPARSE, [(1, 1), (2, 1), (2, 2), (4, 2)]):
        assert_weights(replace(tiny(name), quantization=kind), tp, dtype, ep)


def test_a_plan_reads_what_a_checkpoint_says(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    path.write_text(json.dumps(QWEN_14B | {"quantization_config": awq}))
    found = qwen_plan(path)
    assert found.fits and found.quantization == "int4"
    assert found.parameters == 14_770_033_664
    assert found.weights == pytest.approx(10.0e9, rel=0.01)
    with pytest.raises(ConfigError, match="--quantization int8 needs an unquantized checkpoint"):
        qwen_plan(path, quantization="int8")


@pytest.mark.parametrize(("changed", "expected"), [({}, 16.4e9), ({"ignore": ["mlp"]}, 26.52e9)])
def test_a_plan_keeps_8_bits_of_fp8(
    changed: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    fp8 = {"quant_method": "modelopt", "quant_algo": "FP8", **changed}
    path.write_text(json.dumps(QWEN_14B | {"quantization_config": fp8}))
    found = qwen_plan(path)
    assert found.stored == "FP8, 8 bits stay in linear layers"
    assert found.weights == pytest.approx(expected, rel=0.02)
    rounded = qwen_plan(path, quantization="int8")
    assert rounded.stored == "FP8, dequantized while loaded" and rounded.quantization == "int8"


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made under it: the most that were alive at once."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        self.peak = max(self.peak, sum(self.alive.values()))
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known and key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key)


# (tp, ep) and the model's dtype; which part of the step decides: (tokens, sequences, sizes).
SPLITS = [(1, 1, "float32"), (2, 1, "float32"), (1, 1, "bfloat16"), (2, 1, "bfloat16")]
PARTS = {
    "mlp": (512, 4, {"intermediate_size": 320}),
    "attention": (512, 4, {"intermediate_size": 64}),
    "sampler": (64, 64, {"intermediate_size": 320, "vocab_size": 1024}),
}


@pytest.mark.parametrize(
    ("name", "part", "split"),
    [
        *product(["llama-gqa"], PARTS, SPLITS),
        *(slow(*case) for case in product(["qwen3"], PARTS, SPLITS)),
        *product(SPARSE, ["experts"], [(1, 1, "float32"), (2, 1, "float32"), (2, 2, "float32")]),
    ],
)
def test_activations_are_those_of_a_step(name: str, part: str, split: tuple[int, int, str]) -> None:
    """Within 2 % of the tensors that are alive at the peak of the step a node warms up with. With
    expert parallelism a step is planned to bring every token, from other ranks, to the rank in
    question; none came in this one."""
    tp, ep, dtype = split
    tokens, sequences, sizes = PARTS.get(part, (512, 4, {}))
    spec = replace(tiny(name), **sizes)  # type: ignore[arg-type]
    with single_threaded_inference():
        peak = peak_of_step(spec, dtype, tp, tokens, sequences, ep)
    whole = Stage.whole(spec.num_layers)
    found = Footprint(spec, dtype, tp, ep=ep).activations(whole, tokens, sequences)
    if ep == 1:
        assert found == pytest.approx(peak, rel=0.02)
    else:
        assert peak < found < 1.5 * peak


def peak_of_step(
    spec: ModelSpec, dtype: str, tp: int, tokens: int, sequences: int, ep: int = 1
) -> int:
    """On rank 0, the others' parts being copies of its own."""
    group: Any = SimpleNamespace(
        rank=0,
        size=tp,
        all_reduce=lambda tensor: tensor,
        all_gather=lambda tensor, dim: torch.cat([tensor] * tp, dim) if tp > 1 else tensor,
    )
    owners: Any = SimpleNamespace(rank=0, size=ep)
    model = CausalLM(spec, Sharding(group, CPU, getattr(torch, dtype), Replicated(owners)))
    blocks = num_dummy_blocks(tokens, sequences, block_size=16)
    shape = (spec.num_layers, 2, blocks, model.attentions[0].shape.num_kv_heads, 16, spec.head_dim)
    cache = torch.zeros(shape, dtype=model.dtype)
    with LiveBytes([cache, *(shard.target for shard in model.shards())]) as live:
        ModelRunner(model, [cache], CPU, samples=True).warm_up(tokens, sequences)
    return live.peak


@pytest.mark.parametrize(("name", "tp"), list(product(["llama-gqa", *SPARSE], [1, 2])))
def test_int8_counts_what_is_beside_weights_while_they_are_rounded(name: str, tp: int) -> None:
    """Within 2 % of the tensors that are alive at the peak, with what is read."""
    spec = replace(tiny(name), quantization=QUANTIZATIONS["int8"], vocab_size=4096)
    group: Any = SimpleNamespace(rank=0, size=tp)
    shards = list(CausalLM(spec, Sharding(group, CPU, torch.bfloat16)).shards())
    with LiveBytes([shard.target for shard in shards]) as live:
        for shard in shards:
            shape = [end - start for start, end in ranges(shard.index, shard.shape)]
            read = torch.ones(shape, dtype=getattr(torch, spec.dtype))
            shard.target.copy_(shard.convert(read))
            del read
    found = Footprint(spec, "bfloat16", tp).loading(Stage.whole(spec.num_layers))
    assert found == pytest.approx(live.peak, rel=0.02)


def test_a_class_is_rounded_once_all_of_it_is_loaded(tmp_path: Path) -> None:
    """Then a GPU holds no less than the weights in their dtype."""
    config = {**QWEN_14B, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    few = {"num_hidden_layers": 8, "head_dim": 128}  # a plan runs the code of each layer
    (tmp_path / "config.json").write_text(json.dumps({**config, **few}))
    options: dict[str, Any] = {"gpu_memory": "12GiB", "quantization": "int8"}
    given = PlanConfig(model=str(tmp_path), max_model_len=4096, **options)
    assert plan(given)[1].fits
    found = plan(replace(given, model_impl="transformers"))[1]
    assert found.rank.weights + found.rank.loading > 2 * found.parameters
    assert not found.fits and "while they are rounded" in found.reason
    assert plan(replace(given, model_impl="transformers", tensor_parallel_size=2))[1].fits


# ---- against nodes ----


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("llama-gqa", {}),
        *(slow(name, {"tensor_parallel_size": tp}) for name in NAMES for tp in (1, 2)),
        slow("qwen2-moe", {}),
        ("qwen2-moe", {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
        ("mistral", {"pipeline_parallel_size": 2, "pipeline_partition": "1,3"}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("forked_ranks")
async def test_blocks_are_those_of_a_node(
    name: str, parallel: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The stage of a pipeline with the most layers decides."""
    caplog.set_level("INFO")
    fixed = {"max_model_len": 256, "kv_cache_memory": "3000KiB", "dtype": "float32"}
    config = PlanConfig(model=str(MODELS / name), gpu_memory="4GiB", **fixed, **parallel)
    decode = plan(config)[1]
    ranks = await start_node(setup(config, tiny(name), "decode").engine)
    assert decode.fits
    assert {cache.num_blocks for rank in ranks for cache in rank.caches} == {decode.rank.num_blocks}
    assert ranks[-1].weights_bytes == decode.rank.weights
    layers = [cache.layer_end - cache.layer_start for rank in ranks for cache in rank.caches]
    assert (decode.rank.stage, layers) == (
        (1, [1, 3]) if "pipeline_partition" in parallel else (0, [4] * len(ranks))
    )
    if not parallel.get("tensor_parallel_size", 1) > 1:  # others log in processes of their own
        line = f"# KV blocks: {decode.rank.num_blocks} (= {decode.num_tokens} tokens"
        assert line in caplog.text or "pipeline_partition" in parallel


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
async def test_groups_are_those_of_a_node(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    kv_cache_dtype: str,
) -> None:
    """Two layers with windows of 24 tokens, of which eight sequences hold 8 blocks each."""
    caplog.set_level("INFO")
    folder = make_windowed("qwen3", tmp_path)
    options = {"max_model_len": 1024, "kv_cache_memory": "8MiB", "dtype": "float32"}
    options |= {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    options |= {"kv_cache_dtype": kv_cache_dtype}
    config = PlanConfig(model=str(folder), gpu_memory="4GiB", **options)
    decode = plan(config)[1]
    (rank,) = await start_node(setup(config, ModelSpec.from_folder(folder), "decode").engine, 1024)
    full, window = decode.rank.groups
    assert [full.num_blocks, window.num_blocks] == [cache.num_blocks for cache in rank.caches]
    assert (window.name, window.num_layers, window.num_blocks) == ("windows of 24 tokens", 2, 64)
    assert full.num_blocks == (8 * 2**20 - window.nbytes) // full.block_bytes
    assert decode.max_concurrent_sequences == min(8, full.num_blocks // 64)
    assert decode.rank.kv_per_sequence == 64 * full.block_bytes + 8 * window.block_bytes
    for group in decode.rank.groups:
        assert f"# KV blocks of {group.name}: {group.num_blocks} (=" in caplog.text
    argv = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    assert main(["plan", f"--model={folder}", "--gpu-memory=4GiB", *argv]) == 0
    rows = {
        cells[0]: cells[1] for cells in map(cells_of, capsys.readouterr().out.splitlines()) if cells
    }
    assert rows["windows of 24 tokens"].startswith("64 blocks × 2 layers")


@pytest.mark.parametrize(
    "name", [slow(name) for name in FAMILIES if name != "gpt-oss"] + ["gpt-oss"]
)
async def test_bytes_are_those_of_a_node_of_each_family(name: str, tmp_path: Path) -> None:
    """Weights as loaded, and the bytes and number of each KV group's blocks."""
    folder = make_windowed(name, tmp_path)
    options = {"max_model_len": 512, "kv_cache_memory": "8MiB", "dtype": "float32"}
    config = PlanConfig(model=str(folder), gpu_memory="4GiB", **options)
    planned = plan(config)[1].rank
    node = setup(config, read_spec(folder, "auto", {}), "decode")
    (rank,) = await start_node(node.engine, 512)
    assert planned.weights == rank.weights_bytes
    assert [(group.block_bytes, group.num_blocks) for group in planned.groups] == [
        (kv_cache.cache_bytes(kv_cache.resized(cache, 1)), cache.num_blocks)
        for cache in rank.caches
    ]


async def test_states_alone_are_counted_in_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sequence of Mamba takes four states, however long it is."""
    folder = make_windowed("mamba", tmp_path)
    options = {"max_model_len": 1024, "kv_cache_memory": "2MiB", "dtype": "float32"}
    config = PlanConfig(model=str(folder), gpu_memory="4GiB", **options)
    node = setup(config, read_spec(folder, "auto", {}), "decode")
    (rank,) = await start_node(node.engine, 1024)
    (cache,) = rank.caches
    argv = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    assert main(["plan", f"--model={folder}", "--gpu-memory=4GiB", *argv]) == 0
    rows = {
        cells[0]: cells[1] for cells in map(cells_of, capsys.readouterr().out.splitlines()) if cells
    }
    sequences = cache.num_blocks // 4
    assert rows["state blocks"] == f"{cache.num_blocks}, for {sequences} sequences"
    assert rows["longest sequences at once"] == str(sequences)
    assert not any("token, " in name or name.startswith("KV") for name in rows)
    argv[1] = "--kv-cache-memory=60KiB"
    assert main(["plan", f"--model={folder}", "--gpu-memory=4GiB", *argv]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "2 blocks fit into --kv-cache-memory 60KiB, but one sequence of 1024 tokens" in said


async def start_node(engine: EngineConfig, max_model_len: int = 256) -> list[RankReady]:
    """Returns what its ranks report once their caches are allocated."""
    parallel = replace(engine.parallel, device="cpu", cpu_threads=1)
    model = replace(engine.model, max_model_len=max_model_len)
    executor = make_executor(
        worker_specs(WorkerConfig(replace(engine, parallel=parallel, model=model)))
    )
    try:
        return [msgspec.msgpack.decode(ready, type=RankReady) for ready in await executor.start()]
    finally:
        await executor.shutdown(5.0)


@pytest.mark.parametrize("enable_lora", [False, True])
def test_a_gpu_gives_nodes_what_the_plan_says(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, enable_lora: bool
) -> None:
    """A made-up card of 24 GiB, on which the driver holds the expected overhead and a step's
    peak is the expected one."""
    found = qwen_plan(qwen, tensor_parallel_size=2, enable_lora=enable_lora)
    options = {"tensor_parallel_size": 2, "enable_lora": enable_lora}
    spec = ModelSpec.from_file(qwen)
    config = PlanConfig(gpu_memory="24GiB", max_model_len=16384, **options)
    engine = setup(config, spec, "decode").engine
    reserved = found.rank.weights + found.rank.activations + 2**28  # torch keeps some unused
    card = FakeCard(24 * GIB, context=overhead(world_size=2))
    card.install(monkeypatch)
    memory = GpuMemory.enter(cuda := torch.device("cuda", 0))
    card.inside = reserved
    peak = found.rank.weights + found.rank.activations
    monkeypatch.setattr(kv_cache, "_peak_of_largest_step", lambda *args: peak)
    unused: Any = None
    stage = Stage.whole(spec.num_layers)
    model: Any = SimpleNamespace(spec=spec, dtype=torch.bfloat16, stage=stage)
    room = kv_cache.available_bytes(engine, model, unused, unused, 16384, cuda, unused, memory)
    assert room == found.rank.left_for_kv


# ---- the command ----


def test_the_table(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", f"--model={qwen}", "--gpu-memory=24GiB", "--max-model-len=16384"]
    assert main([*argv, "--tp", "2", "--prefill-pp", "2", "--dtype", "float16"]) == 0
    text = capsys.readouterr().out
    rows = {cells[0]: cells[1:] for cells in map(cells_of, text.splitlines()) if cells}
    assert rows["weights of the model"] == ["27.51 GiB = 29.54 GB"] * 2
    assert rows["layers"] == ["24 + 24 (below: stage 2)", "48"]
    assert rows["KV per token, model"] == ["192 KiB", "192 KiB"]
    assert rows["KV per token, GPU"] == ["48 KiB", "96 KiB"]
    assert rows["all-reduce per token"] == ["960 KiB", "960 KiB"]
    assert "decode: fits" in text and "− LoRA adapters" not in rows
    lora = ["--enable-lora", "--max-lora-rank", "64", "--max-loras", "4"]
    assert main([*argv, "--tp", "2", *lora]) == 0
    rows = dict(cells_of(line)[:2] for line in capsys.readouterr().out.splitlines() if "│" in line)
    # In each layer rank × (A's inputs and B's outputs) of q, k, v, o, gate, up and down, of which
    # two ranks share B's outputs, or A's inputs in o and down; and a step's 5120 + 3 × 64 numbers.
    widths = 3 * 5120 + 3 * 3584 + 5120 + 2560 + 2 * 5120 + 2 * 13824 + 5120 + 6912
    expected = 2 * (4 * 64 * 48 * widths + 2048 * (5120 + 3 * 64))
    assert rows["− LoRA adapters"] == f"{expected / GIB:.2f} GiB"


def test_a_row_of_one_role_alone(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode = plan(PlanConfig(model=str(qwen), gpu_memory="80GiB"))
    beside = replace(decode, rank=replace(decode.rank, adapters=1 << 30))
    _show(console_of(), [prefill, beside], None)
    table = [cells_of(line) for line in capsys.readouterr().out.splitlines()]
    assert ["− LoRA adapters", "none", "1.00 GiB"] in table


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")] if "│" in line else []


def test_overrides_of_config_json_are_planned_with(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = '--rope-scaling={"rope_type": "yarn", "factor": 4.0}'
    longer = '--hf-overrides={"max_position_embeddings": 4096}'
    assert main(["plan", f"--model={qwen}", "--gpu-memory=80GiB", rope, longer]) == 0
    rows = dict(cells_of(line)[:2] for line in capsys.readouterr().out.splitlines() if "│" in line)
    assert rows["KV of longest sequence, GPU"] == "3.00 GiB"  # 4 × 4096 tokens of 192 KiB


def test_a_plan_that_does_not_fit_exits_with_1(
    qwen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--model={qwen}", "--gpu-memory=24GiB", "--max-model-len=16384"]) == 1
    text = capsys.readouterr().out
    assert "prefill: does not fit" in text
    assert "fix: --tp 2; or --pp 2; or --quantization int8" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "--model must name"),
        ("--model={qwen}", "--gpu-memory must say"),
        ("--model={qwen} --gpu-memory=lots", "--gpu-memory 'lots' is not a size"),
        ("--model=/nowhere --gpu-memory=1GiB", "the folder /nowhere does not exist"),
        ("--model=README.md --gpu-memory=1GiB", "README.md is not JSON"),
        ("--model={qwen} --gpu-memory=1GiB --tp=3", "does not divide"),
        ("--model={qwen} --gpu-memory=1GiB --tp=2 --ep=2", "has no experts"),
        ("--model={qwen} --gpu-memory=1GiB --pp=49", "exceeds the model's 48 layers"),
        ("--model={qwen} --gpu-memory=1GiB --pipeline-partition=a,b", "is not a list such as"),
        ("--model={qwen} --gpu-memory=1GiB --max-model-len=40000", "32768 positions"),
        (
            "--model={qwen} --gpu-memory=1GiB --max-num-seqs=9 --max-num-batched-tokens=8",
            "is less than",
        ),
    ],
)
def test_wrong_options(
    argv: str, message: str, qwen: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(ROOT)
    assert main(["plan", *argv.format(qwen=qwen).split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pdserve plan: error: ")
    assert message in error


def test_plan_needs_no_torch(qwen: Path) -> None:
    code = (
        "import sys; from pdserve.cli.main import main; "
        f"main(['plan', '--model={qwen}', '--gpu-memory=80GiB', '--topology']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


# ---- topology: pynvml's functions over made-up GPUs; none of it has seen a driver ----


class FakeNvml:
    """`gpus` GPUs; `nvlink`: pairs with NVLink; `level`: what every PCIe path crosses."""

    def __init__(
        self, gpus: int, nvlink: set[tuple[int, int]] | None, level: int = 10, driver: bool = True
    ) -> None:
        self.gpus, self.nvlink, self.level, self.driver = gpus, nvlink, level, driver
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)  # its constants and errors

    def nvmlInit(self) -> None:
        if not self.driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA L4"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=24 * GIB)

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        assert index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        if self.nvlink is None:
            raise pynvml.NVMLError_NotSupported
        return pynvml.NVML_P2P_STATUS_OK if (one, other) in self.nvlink else 3

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return self.level


def test_two_pairs_with_nvlink() -> None:
    nvml = FakeNvml(4, {(0, 1), (2, 3)}, level=40)
    found = topology.read_topology(nvml)
    assert found.nvlink_groups == ((0, 1), (2, 3))
    assert "--tp up to 2" in found.advice
    assert "PP across" in found.advice
    kinds = {link.gpus: link.kind for link in found.links}
    assert kinds[0, 1] == topology.NVLINK
    assert kinds[1, 2] == "PCIe host bridge"
    assert found.gpus[3] == topology.Gpu(3, "NVIDIA L4", 24 * GIB)
    assert nvml.open == 0
    ring = FakeNvml(4, {(0, 1), (1, 2), (2, 3), (0, 3)})  # a group needs it between all
    assert topology.read_topology(ring).nvlink_groups == ((0, 1), (2, 3))


@pytest.mark.parametrize(("level", "kind"), [(10, "PCIe switch"), (50, "between CPU sockets")])
def test_cards_without_nvlink(level: int, kind: str) -> None:
    found = topology.read_topology(FakeNvml(2, nvlink=None, level=level))
    assert [link.kind for link in found.links] == [kind]
    assert "no NVLink" in found.advice


def test_one_gpu_and_none() -> None:
    assert "one GPU" in topology.read_topology(FakeNvml(1, set())).advice
    for nvml in (FakeNvml(0, set()), FakeNvml(2, set(), driver=False)):
        found = topology.read_topology(nvml)
        assert found.gpus == () and "no GPU" in found.advice


def test_topology_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everyone = {(a, b) for a in range(4) for b in range(a + 1, 4)}
    found = topology.read_topology(FakeNvml(4, everyone))
    monkeypatch.setattr("pdserve.cli.plan.read_topology", lambda: found)
    assert main(["plan", "--topology"]) == 0
    assert "GPU 0 – GPU 3: NVLink" in capsys.readouterr().out
    assert main(["plan", "--topology", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["topology"]["nvlink_groups"] == [[0, 1, 2, 3]]
