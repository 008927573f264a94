"""The twelve families that `make test-all` takes through clusters (`e2e/test_every_class.py`), on
ranks of this process: real models, real caches, a hand-over between unequal layouts by tcp. After
some tokens the decode node is gone, and another one goes on with a second hand-over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import corrupt_connector
from connected_ranks import ConnectedRanks, make_sink, make_source
from crowd import Crowd
from kv_faults import Data
from pdserve.cli.models import known_models
from pdserve.common.config.engine import CacheConfig, EngineConfig, ModelConfig
from pdserve.common.core.errors import TransferError
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.implementation import load_decoder, read_spec
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import pipeline_stages
from pdserve.common.worker.input_batch import StepSequence
from pdserve.common.worker.kv_cache import KVCache, cache_shapes, resized
from pdserve.common.worker.runner import flatten
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.control.recv_transfer import GroupBlocks
from pdserve.kv_transfer.rank import group_connector
from sweep import SIZES, classes_of, difference, greedy, make
from windowed import make_windowed

CPU = torch.device("cpu")
BLOCK, BLOCKS, CHUNK = 16, 8, 30
PROMPT, DIES_AFTER, TOKENS = 60, 5, 10  # the window is 24, or a chunk of 32
GARBAGE = 1e4  # in blocks before KV arrives


class Node:
    """Ranks with weights: `tp` threads, of which each runs `pp` stages one after the other."""

    def __init__(self, folder: Path, tp: int = 1, pp: int = 1) -> None:
        self.spec = read_spec(folder, "auto", {})
        self.crowd = Crowd(tp)
        config = ModelConfig(model=str(folder), dtype="float32")
        self._engine = EngineConfig(model=config, cache=CacheConfig(block_size=BLOCK))
        self._stages = pipeline_stages(self.spec.num_layers, pp)

        def load(member: Any) -> Any:
            group = member if tp > 1 else GroupCoordinator()
            sharding = Sharding(group, CPU, torch.float32)
            models = [load_decoder(self.spec, config, sharding, each) for each in self._stages]
            return [(model, cache_shapes(model, self._engine, group)) for model in models]

        self._ranks: list[Any] = self.crowd.run(load)

    def caches(self) -> list[KVCache]:
        """Allocates the caches of all ranks, stage by stage, full of garbage."""
        made = []
        for stage in range(len(self._stages)):
            for rank in self._ranks:
                shapes = [resized(shape, BLOCKS) for shape in rank[stage][1]]
                made.append(KVCache.allocate(shapes, CPU))
                for tensor in made[-1].tensors:
                    tensor.fill_(GARBAGE)
        return made

    def compute(
        self, caches: list[KVCache], tables: Sequence[Sequence[int]], tokens: Any, start: int
    ) -> Any:
        """Computes the tokens from `start` on, in chunks; returns their logits."""
        size = len(self._ranks)

        def work(member: Any) -> Any:
            found = []
            for begin in range(start, len(tokens), CHUNK):
                ids = tuple(tokens[begin : begin + CHUNK].tolist())
                sequence = StepSequence(1, ids, begin, tables)
                batch = flatten((sequence,), BLOCK, self.spec.kv_groups)
                positions = torch.tensor(batch.positions)
                hidden = torch.tensor(batch.token_ids)
                for stage, (model, _) in enumerate(self._ranks[member.rank]):
                    cache = list(caches[stage * size + member.rank].tensors)
                    contexts = model.prepare(list(batch.attention))
                    hidden = model.forward(hidden, positions, contexts, cache, None)
                found.append(model.compute_logits(hidden))
            return torch.cat(found)

        return self.crowd.run(work)[-1]


def tables(groups: Sequence[KVGroup], shift: int) -> list[list[int]]:
    """Returns a block table for each KV group, no two alike."""
    return [
        [(shift + 3 * i + group) % BLOCKS for i in range(BLOCKS)] for group in range(len(groups))
    ]


async def hand_over(
    prefill: Node,
    decode: Node,
    tokens: Any,
    then: int,
    connector: str = "tcp",
    digests: bool = True,
    **options: Any,
) -> Any:
    """Computes `tokens` but for the last `then`, moves their KV, and computes those; returns the
    logits of all. `options`: of the sink's `connector`."""
    groups, end = prefill.spec.kv_groups, len(tokens) - then
    source_node = ConnectedRanks(connector, prefill.caches(), source=True, **options)
    sink_node = ConnectedRanks(connector, decode.caches(), source=False, **options)
    sink = make_sink(sink_node, BLOCK, digests)
    source = make_source(source_node, sink, BLOCK)
    ours, theirs = tables(groups, 0), tables(groups, 5)
    count = -(-end // BLOCK)
    firsts = [group.first_kept(end, BLOCK) for group in groups]
    try:
        wanted = [
            GroupBlocks(first, tuple(table[first:count]))
            for first, table in zip(firsts, theirs, strict=True)
        ]
        ticket, arrival = await sink.reserve(end, wanted, lambda: None)
        transfer = source.begin(ticket)
        prompt = prefill.compute(source_node.caches, ours, tokens[:end], 0)
        for group, (first, table) in enumerate(zip(firsts, ours, strict=True)):
            run = BlockRun(first, count - first)
            transfer.ready(run, table[first:count], last=True, group=group)
        await asyncio.gather(transfer.commit(0), arrival)
        answer = [
            decode.compute(sink_node.caches, theirs, tokens[: place + 1], place)
            for place in range(end, len(tokens))
        ]
    finally:
        await source.close()
        await sink.close()
        source_node.close()
        sink_node.close()
    return torch.cat((prompt, *answer))


TP, PP = ({"tp": 2}, {"tp": 1}), ({"pp": 2}, {"tp": 2})
LAYOUTS = {
    "gpt2": TP,
    "opt": PP,
    "gemma3_text": TP,
    "gpt_oss": PP,
    "phi3": TP,
    "glm4_moe": PP,
    "olmo3": PP,
    "cohere2": TP,
    "deepseek_v3": TP,
    "qwen3_next": PP,
    "llama4_text": TP,
    "mistral": PP,
}


@pytest.mark.parametrize("name", LAYOUTS)
async def test_a_family_is_handed_over_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "deepseek_v3":  # whose first three layers have no experts
        for size in ("num_hidden_layers", "n_layer"):
            monkeypatch.setitem(SIZES, size, 2)  # one of each kind
    with torch.inference_mode(False):
        model = make(*classes_of(name), tmp_path)
    tokens, expected = greedy(model, TOKENS)
    prefill, decode = (Node(tmp_path, **layout) for layout in LAYOUTS[name])
    assert prefill.spec.impl == known_models()[name]["path"]
    dies = PROMPT + DIES_AFTER
    found = await hand_over(prefill, decode, tokens[:dies], DIES_AFTER)
    assert not difference(found, expected[:dies])
    found = await hand_over(prefill, decode, tokens, TOKENS - DIES_AFTER)
    assert not difference(found, expected)


KINDS = {
    "window": "qwen3",
    "latent": "deepseek",
    "state": "qwen3-next",
    "indexer": "deepseek-v3.2",
}
"""Kind of KV → a model with a group of it."""
SPOILING = ("corrupt_way:SpoiltTCP", "corrupt_connector:CorruptShm")  # while it moves, when landed


def flip_bits(rng: random.Random, data: Data, before: Data) -> Any:
    """Flips a high bit of some of the numbers."""
    numbers = data.reshape(-1, 4)
    for _ in range(1 + len(numbers) // 4):
        numbers[rng.randrange(len(numbers)), 3] ^= 0x40
    return flip_bits


@pytest.mark.parametrize("connector", SPOILING)
@pytest.mark.parametrize("kind", KINDS)
async def test_flipped_bits_of_a_group_never_become_kv(
    kind: str, connector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hand-over fails however often it is tried; without digests the answer is wrong."""
    monkeypatch.setattr(group_connector, "SHORT_NBYTES", 0)  # as `corrupt_way` does for good
    monkeypatch.setattr(corrupt_connector, "spoil", flip_bits)
    node = Node(make_windowed(KINDS[kind], tmp_path))
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens, expected = greedy(model, 3)
    ledger = tmp_path / "ledger"
    spoils = {"kind": kind, "probability": 1.0, "seed": 0, "ledger": str(ledger)}
    with pytest.raises(TransferError) as error:
        await hand_over(node, node, tokens, 3, connector, **spoils)
    assert error.value.code == "DIGEST_MISMATCH"
    wrong = await hand_over(node, node, tokens, 3, connector, digests=False, **spoils)
    assert len(ledger.read_text().split()) > 1
    assert difference(wrong, expected)
    assert not difference(await hand_over(node, node, tokens, 3), expected)
