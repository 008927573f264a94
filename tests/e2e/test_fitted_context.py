"""--max-model-len auto: each node takes the context that its KV cache holds, the router the least
of them."""

from __future__ import annotations

import reference
from cluster import MODELS
from pdserve.router.api.app_state import SMALL
from tiny_engine import some_tokens
from warm import WarmCluster

MODEL = MODELS / "llama-gqa"
WINDOW = 10 * 16


def test_the_least_of_the_nodes_is_the_window() -> None:
    auto = {"max_model_len": "auto"}
    with WarmCluster(MODEL, 0, 0, router=auto) as cluster:
        cluster.start_node("prefill", **auto, num_gpu_blocks_override=12)
        small = cluster.start_node("decode", **auto, num_gpu_blocks_override=10)
        cluster.wait_nodes()
        windows = {node["role"]: node["max_model_len"] for node in cluster.nodes()}
        assert windows == {"prefill": 12 * 16, "decode": WINDOW}
        assert f"--max-model-len auto: {WINDOW} tokens of the model's" in cluster.log()
        assert window(cluster) == WINDOW

        prompt = tuple(some_tokens(WINDOW - 20, seed=1))
        answer = cluster.complete(list(prompt), max_tokens=20, ignore_eos=True)
        expected = reference.greedy(MODEL, prompt, 20)
        assert answer["choices"][0]["text"] == reference.decode(MODEL, expected)

        refused = cluster.post("/v1/completions", prompt=list(prompt), max_tokens=21)
        assert refused.status_code == 400
        assert f"maximum context length is {WINDOW} tokens" in refused.json()["error"]["message"]

        # A body of this size is prepared in another process, which must know the window too.
        fields = {"truncate_prompt_tokens": -1, "max_tokens": 20, "ignore_eos": True}
        long = list(prompt) * (SMALL // len(prompt))
        answer = cluster.complete(long, **fields)
        assert answer["usage"]["prompt_tokens"] == WINDOW - 20

        cluster.drain(small)
        large = cluster.start_node("decode", **auto, num_gpu_blocks_override=14)
        cluster.wait_for(lambda: window(cluster) == 12 * 16)

        cluster.start_node("decode", **auto, num_gpu_blocks_override=3)
        cluster.wait_for(lambda: len(cluster.nodes("decode")) == 2)
        assert window(cluster) == 12 * 16, "one tiny node does not count"
        for _ in range(4):  # it is idle as often as the other one
            answer = cluster.complete(list(prompt), max_tokens=20, ignore_eos=True)
            assert answer["choices"][0]["text"] == reference.decode(MODEL, expected)
        cluster.drain(large)
        cluster.wait_for(lambda: window(cluster) == 3 * 16)
        cluster.wait_idle()


def window(cluster: WarmCluster) -> int:
    found: int = cluster.get("/v1/models").json()["data"][0]["max_model_len"]
    return found
