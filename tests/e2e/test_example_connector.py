"""The example connector, in a package that pdserve knows nothing of, serves a live cluster."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import reference
from warm import WarmCluster

CONNECTOR = "pdserve_file_connector.connector:FileConnector"
NUM_TOKENS = 24
TEXT = "the small fox walked over the hill and said to the bird that it was late "


def test_greedy_output_equals_transformers(tmp_path: Path) -> None:
    """Unequal tensor parallelism; one prompt at a time and all at once; nothing is left."""
    options = {
        "kv_connector": CONNECTOR,
        "kv_connector_config": json.dumps({"directory": str(tmp_path)}),
    }
    with WarmCluster("llama-gqa", 1, 0, **options) as cluster:
        cluster.start_node("decode", tensor_parallel_size=2)
        cluster.wait_nodes()
        ids = reference.encode(cluster.model, TEXT * 20)
        prompts = [tuple(ids[length : 2 * length]) for length in (1, 17, 64, 130)]

        def ask(prompt: tuple[int, ...]) -> str:
            answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
            return str(answer["choices"][0]["text"])

        expected = [
            reference.decode(cluster.model, reference.greedy(cluster.model, prompt, NUM_TOKENS))
            for prompt in prompts
        ]
        assert [ask(prompt) for prompt in prompts] == expected
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, prompts)) == expected
        cluster.wait_idle()
    assert not list(tmp_path.iterdir())
