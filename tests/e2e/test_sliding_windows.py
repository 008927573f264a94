"""Sliding windows beyond the window, in clusters (cases: `tests/common/node/test_windows.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

import reference
from exact import Asker, check_prompt_logprobs
from tiny_engine import some_tokens
from warm import WarmCluster, run_roles
from windowed import make_windowed

PROMPTS = [tuple(some_tokens(length, seed=length)) for length in (30, 90, 150, 220, 300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_windowed("qwen3", tmp_path_factory.mktemp("qwen3"))


def test_a_node_of_both_roles_serves_the_full_context(model: Path) -> None:
    with WarmCluster(model, 0, 0, max_model_len=1024) as cluster:
        cluster.start_node("both", tensor_parallel_size=2)
        cluster.wait_nodes()
        asker = Asker(cluster)
        for prompt in PROMPTS * 2:  # cold and from the cache
            assert tuple(asker.ids(prompt)) == reference.greedy(model, prompt, 17)
        check_prompt_logprobs(cluster, PROMPTS[2], n=2)


def test_a_hand_over_beyond_the_window_is_refused_at_start(model: Path, tmp_path: Path) -> None:
    flags = ("--model", str(model), "--router", "127.0.0.1:9", "--device", "cpu")
    ended = run_roles(tmp_path, [("prefill_node", *flags), ("decode_node", *flags)])
    for code, text in ended:
        assert code == 2 and "sliding windows (24 tokens) cannot be handed over" in text
