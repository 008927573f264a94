"""Weights that only the first of several processes can read: each rank has what it would have read
itself, and what goes wrong ends all of them with one sentence."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gguf_files import tiny_folder, write_gguf
from paths import MODELS
from pdserve.common.config.engine import EngineConfig, ModelConfig
from pdserve.common.config.speculation import SpeculationOptions
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.parallel_state import ParallelState
from pdserve.common.model import broadcast
from pdserve.common.model.broadcast import BroadcastFolder
from pdserve.common.model.folder import ModelFolder
from pdserve.common.model.implementation import load_decoder, read_spec
from pdserve.common.model.sharding import Shard, Sharding
from pdserve.common.model.stages import pipeline_stages
from pdserve.common.worker.folders import open_folders
from pdserve.demo_model.embedded import resolve_model
from ranks import Ranks
from stored_folders import SCALED, folders, scaled
from tiny_engine import CPU

NOWHERE = "/no/such/folder"
LLAMA = MODELS / "llama-gqa"
ODD = 700  # numbers of a chunk: a few rows, and a last one of fewer


def tensors_of(model: Any) -> dict[str, Tensor]:
    if hasattr(model, "shards"):
        return {f"{n} {shard.name}": shard.target for n, shard in enumerate(model.shards())}
    from pdserve.common.model.hf.probe import probe  # to import it takes seconds

    with torch.inference_mode():  # of a graph, which has its weights in its calls: what they make
        return {str(n): each for n, each in enumerate(probe(model, model.group))}


def _load(state: ParallelState, folder: ModelFolder, config: ModelConfig) -> dict[str, Tensor]:
    with folder.files() as files:
        spec = read_spec(files, config.model_impl, {})
    stage = pipeline_stages(spec.num_layers, state.pp.size)[state.pp.rank]
    sharding = Sharding(state.tp, CPU, torch.float32)
    return tensors_of(load_decoder(spec, config, sharding, stage, folder=folder))


def _both_ways(state: ParallelState, path: Path, config: ModelConfig) -> list[str]:
    """Returns the names of the tensors that differ."""
    broadcast.CHUNK_NUMBERS = ODD
    src = state.world.size - 1
    mine = replace(config, model=str(path) if state.world.rank == src else NOWHERE)
    made = BroadcastFolder(mine.model or "", state.world, src)
    found, expected = _load(state, made, mine), _load(state, ModelFolder(path), config)
    assert expected and found.keys() == expected.keys()
    return [name for name, each in expected.items() if not torch.equal(found[name], each)]


def check(ranks: Ranks, path: Path, config: ModelConfig | None = None, **layout: Any) -> None:
    config = config or ModelConfig()
    config = replace(config, model=str(path))
    assert not any(ranks.run(_both_ways, path, config, **layout))


def test_every_rank_has_its_part(ranks: Ranks) -> None:
    check(ranks, LLAMA, tp=2, communicator="gloo")  # as between hosts
    check(ranks, MODELS / "mistral", pp=2)  # in several files
    check(ranks, LLAMA, ModelConfig(quantization="int8"), tp=2)
    check(ranks, LLAMA, ModelConfig(load_format="dummy"), tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "pp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2"])
def test_every_layout(ranks: Ranks, name: str, layout: dict[str, int]) -> None:
    check(ranks, MODELS / name, **layout)


def test_weights_that_are_dequantized(ranks: Ranks, tmp_path: Path) -> None:
    target = tmp_path / "fp8"
    folders(LLAMA, target, SCALED["blocks"], lambda matrix, _: scaled(matrix, "blocks"))
    check(ranks, target, tp=2)


def test_a_gguf_file(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    file = write_gguf(MODELS / "qwen2", tmp_path / "tiny.gguf", lambda name: "Q8_0")
    made = resolve_model(ModelConfig(model=str(file)))
    check(ranks, Path(made.model or ""), tp=2)


@pytest.mark.slow  # to import it takes seconds
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "mixtral"])  # the last one is converted
def test_through_transformers(
    ranks: Ranks, name: str, layout: dict[str, int], tmp_path: Path
) -> None:
    from transformers import CONFIG_MAPPING

    from sweep import SIZES

    tiny_folder(tmp_path / "tiny", CONFIG_MAPPING[name](**SIZES))
    check(ranks, tmp_path / "tiny", ModelConfig(model_impl="transformers"), **layout)


def _held(state: ParallelState, path: Path) -> int:
    """Returns the most tensors for which there are parts at a time."""
    made = BroadcastFolder(path if state.world.rank == 0 else NOWHERE, state.world, 0)
    alive: dict[str, list[Any]] = {}
    most = 0
    with made.weights(lambda checkpoint: checkpoint) as weights:
        shards = [
            Shard(name, tuple(stored.get_shape()), (slice(None),), torch.empty(0))
            for name, stored in weights.tensors.items()
        ]
        for shard, part in weights.read(shards * 2):  # as of int8 weights
            alive.setdefault(shard.name, []).append(weakref.ref(part))
            del part
            most = max(most, sum(any(each() is not None for each in a) for a in alive.values()))
    assert len(alive) == len(shards)
    return most


def test_parts_do_not_pile_up(ranks: Ranks) -> None:
    assert max(ranks.run(_held, LLAMA, tp=2)) <= 1


# ---- files beside weights ----


def _files(state: ParallelState, path: Path, home: Path) -> None:
    broadcast.CHUNK_BYTES = 64  # tokenizer.json comes in many parts, one file in whole ones
    made = BroadcastFolder(path if state.world.rank == 0 else NOWHERE, state.world, 0)
    tempfile.tempdir = str(home)
    with made.files() as folder:
        assert (folder == path) == (state.world.rank == 0)
        names = {each.name for each in folder.iterdir()}
        for each in path.iterdir():
            if each.suffix == ".safetensors":
                assert each.name not in names or state.world.rank == 0
            else:
                assert (folder / each.name).read_bytes() == each.read_bytes()
    state.world.barrier()
    assert not any(home.iterdir())


def test_small_files_are_there_while_they_are_read(ranks: Ranks, tmp_path: Path) -> None:
    path, home = tmp_path / "model", tmp_path / "home"
    shutil.copytree(LLAMA, path)
    (path / "chat_template.jinja").write_bytes(b"x" * 128)
    (path / "merges.txt").touch()
    home.mkdir()
    ranks.run(_files, path, home, tp=2)


def _opened(state: ParallelState, paths: dict[int, dict[str, str]]) -> tuple[str, list[str]]:
    mine = paths[state.world.rank]
    draft = {"model": mine["draft"], "num_speculative_tokens": 2}
    engine = EngineConfig(
        model=ModelConfig(
            model=mine["model"], tokenizer=mine["tokenizer"], load_broadcast=True, dtype="float32"
        ),
        speculation=SpeculationOptions(speculative_config=draft),
    )
    try:
        opened = open_folders(engine, state.world)
    except ConfigError as error:
        return error.message, []
    spec, _ = opened.read_model()
    assert opened.read_grammar_tokens(spec)
    found = []
    for folder in (opened.draft, opened.tokenizer):
        assert folder is not None
        with folder.files() as files:
            found.append(ModelSpec.from_folder(files).architecture)
    return spec.architecture, found


def test_the_first_rank_that_has_all_folders_reads(ranks: Ranks) -> None:
    right = {
        "model": str(LLAMA),
        "tokenizer": str(MODELS / "qwen3"),
        "draft": str(MODELS / "qwen2"),
    }
    partly, nothing = {**right, "draft": NOWHERE}, dict.fromkeys(right, NOWHERE)
    expected = ("LlamaForCausalLM", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
    assert ranks.run(_opened, {0: partly, 1: right}, tp=2) == [expected] * 2
    for message, _ in ranks.run(_opened, {0: partly, 1: nothing}, tp=2):
        assert f"lacks {NOWHERE}" in message and "none has" in message


# ---- failures ----


def _failure(state: ParallelState, path: Path) -> str:
    where = path if state.world.rank == 0 else NOWHERE
    try:
        _load(state, BroadcastFolder(where, state.world, 0), ModelConfig(model=str(where)))
    except ConfigError as error:
        return error.message
    return ""


def truncate(folder: Path) -> None:
    """Beyond what its header says."""
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def drop(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)


def lose_index(folder: Path) -> None:
    listed = {"weight_map": {"model.norm.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))


def lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (truncate, "model.safetensors is not a safetensors file"),
        (drop, "missing: model.layers.1.mlp.up_proj.weight"),
        (lose_index, "lacks model-2.safetensors"),
        (lose_config, "has no config.json"),
    ],
)
def test_a_checkpoint_that_cannot_be_read(
    ranks: Ranks, spoil: Callable[[Path], None], sentence: str, tmp_path: Path
) -> None:
    shutil.copytree(LLAMA, tmp_path / "model")
    spoil(tmp_path / "model")
    first, second = ranks.run(_failure, tmp_path / "model", tp=2)
    assert sentence in first and sentence in second


def _spoilt_reading(state: ParallelState, path: Path) -> str:
    """One tensor cannot be read, the others can."""
    opened = broadcast.open_checkpoint

    class Broken:
        def get_shape(self) -> list[int]:
            return [128]

        def get_dtype(self) -> str:
            return "F32"

        def __getitem__(self, index: Any) -> Tensor:
            raise OSError("the disk is gone")

    def spoilt(*given: Any) -> Any:
        found: dict[str, Any] = dict(opened(*given))
        name = next(n for n in found if found[n].get_shape() == [128])
        return {**found, name: Broken()}

    broadcast.open_checkpoint = spoilt
    try:
        return _failure(state, path)
    finally:
        broadcast.open_checkpoint = opened


def test_a_disk_that_fails_in_the_middle(ranks: Ranks) -> None:
    for message in ranks.run(_spoilt_reading, LLAMA, tp=2):
        assert message == "the checkpoint cannot be read: the disk is gone"


def _flipped(state: ParallelState, path: Path) -> str:
    """A bit of what the second rank receives changes on the way."""
    group, given = state.world, state.world.broadcast

    def flipping(tensor: Tensor, src: int = 0) -> Tensor:
        given(tensor, src)
        if tensor.is_floating_point() and group.rank == 1:
            tensor.view(torch.uint8).view(-1)[1] ^= 4
        return tensor

    group.broadcast = flipping  # type: ignore[method-assign]
    try:
        return _failure(state, path)
    except NodeError as error:
        return error.message
    finally:
        group.close()


def test_a_bit_that_flips_on_the_way(tmp_path: Path) -> None:
    processes = Ranks(2, tmp_path)
    try:
        lost, wrong = processes.run(_flipped, LLAMA, tp=2)
    finally:
        processes.close()
    assert "rank 1 received other bytes of model.embed_tokens.weight" in wrong
    assert "rank 1 is gone" in lost
