"""The same prompt and seed have the same log-probabilities to the last bit, whatever the path: cold
or from the prefix cache, in chunks of any size, alone or beside others, on one node or handed over,
with drafts, after a preemption and after a node's death."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quantized_folder import Scheme, quantize_folder
from benchmarks.warm_start import alive
from cluster import ask_until_preempted
from deaths import MORE_BLOCKS
from deaths import D as SESSION
from paths import MODELS
from thinned import only, slow
from warm import WarmCluster

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")

NUM_TOKENS = 24
MANY = 12  # that have not enough blocks together
BLOCK = 16
RNG = random.Random(0)
PROMPT = [RNG.randrange(3, 500) for _ in range(5 * BLOCK + 7)]
BESIDE = [[RNG.randrange(3, 500) for _ in range(length)] for length in (1, 9, 40, 70, 100, 130)]
DRAWN = {"temperature": 1.5, "seed": 11, "top_p": 0.9}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
SCHEMES = {  # of llama-gqa
    "awq": Scheme("awq", group_size=64),
    "gptq": Scheme("gptq", bits=8, group_size=64, desc_act=True),
}
SETUPS = [
    ("mixtral", "bfloat16"),
    *(
        slow((model, dtype))
        for model in ("llama-gqa", "mistral", "mixtral", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe")
        for dtype in ("float32", "bfloat16")
        if (model, dtype) != ("mixtral", "bfloat16")
    ),
    *(slow((scheme, dtype)) for scheme in SCHEMES for dtype in ("float32", "bfloat16")),
]
DEGREES = [(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2)]  # of prefill and decode nodes
CONFIGURATIONS = {
    "chunks of 16 tokens, blocks of 8, over tcp, steps ahead": (
        ("prefill", "decode"),
        {
            "max_num_batched_tokens": 16,
            "block_size": 8,
            "kv_connector": "tcp",
            "async_scheduling": "",
        },
    ),
    "one node, large chunks, drafts": (
        ("both",),
        {"max_num_batched_tokens": 512, "speculative_config": json.dumps(NGRAM)},
    ),
    "two threads, without a prefix cache": (
        ("prefill", "decode"),
        {"cpu_threads": 2, "no_enable_prefix_caching": ""},
    ),
}


def ask(cluster: WarmCluster, salt: str = "", prompt: Any = PROMPT, **body: Any) -> str:
    """All that is said of an answer, its prompt's log-probabilities included."""
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3, **body}
    answer = cluster.complete(prompt, cache_salt=salt or None, **body)
    return json.dumps(answer["choices"])


def ask_all(cluster: WarmCluster, salt: str = "") -> list[str]:
    """Greedy and drawn, with the prompt's scores, which no prefix cache can give."""
    return [
        ask(cluster, salt),
        ask(cluster, salt, **DRAWN),
        ask(cluster, salt, n=2, **DRAWN),
        ask(cluster, salt, prompt_logprobs=2, max_tokens=4),
    ]


@contextmanager
def running(setup: tuple[str, str], *roles: str, **options: Any) -> Iterator[WarmCluster]:
    model, dtype = setup
    with WarmCluster(model, 0, 0, dtype=dtype, **options) as cluster:
        for role in roles:
            cluster.start_node(role)
        cluster.wait_nodes()
        yield cluster


@pytest.fixture(scope="module", params=SETUPS, ids="-".join)
def setup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    model, dtype = request.param
    if model not in SCHEMES:
        return model, dtype
    folder = tmp_path_factory.mktemp("quantized") / model
    return str(quantize_folder(MODELS / "llama-gqa", folder, SCHEMES[model])), dtype


@pytest.fixture(scope="module")
def cluster(setup: tuple[str, str]) -> Iterator[WarmCluster]:
    with running(setup, "prefill", "decode") as made:
        yield made


@pytest.fixture(scope="module")
def expected(cluster: WarmCluster) -> list[str]:
    return ask_all(cluster, "cold")


def test_every_prefix_that_is_cached(cluster: WarmCluster, expected: list[str]) -> None:
    for blocks in range(1 + len(PROMPT) // BLOCK):
        salt = f"{blocks} blocks"
        if blocks:
            ask(cluster, salt, PROMPT[: blocks * BLOCK], max_tokens=1)
        assert ask(cluster, salt) == expected[0], salt
    assert ask_all(cluster, salt) == expected


@pytest.mark.slow
def test_beside_others(cluster: WarmCluster, expected: list[str]) -> None:
    with ThreadPoolExecutor(len(BESIDE) + 4) as pool:
        others = [pool.submit(ask, cluster, "", prompt) for prompt in BESIDE for _ in range(2)]
        found = [pool.submit(ask_all, cluster, f"beside {number}") for number in range(4)]
        assert all(each.result() == expected for each in found)
        assert all(each.result() for each in others)


def test_beside_others_that_ask_for_more_log_probabilities(cluster: WarmCluster) -> None:
    """Equally likely tokens, which bfloat16 often has, keep their order."""
    asked = [{"prompt": each, **DRAWN, "seed": seed} for each in BESIDE for seed in range(3)]
    alone = [ask(cluster, **each) for each in asked]
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(ask, cluster, **{**each, "logprobs": 20}) for each in asked[:6]]
        assert [*pool.map(lambda each: ask(cluster, **each), asked)] == alone
        assert all(each.result() for each in others)


@pytest.mark.parametrize("name", only(CONFIGURATIONS, [*CONFIGURATIONS][:1]))
def test_other_nodes(setup: tuple[str, str], expected: list[str], name: str) -> None:
    roles, options = CONFIGURATIONS[name]
    with running(setup, *roles, **options) as other:
        assert ask_all(other) == expected
        assert ask_all(other) == expected


@pytest.mark.parametrize(("prefill", "decode"), only(DEGREES, [(2, 1)]))
def test_unequal_ranks(
    setup: tuple[str, str], expected: list[str], prefill: int, decode: int
) -> None:
    if Path(setup[0]).is_absolute():
        pytest.skip("its groups are not those of two ranks")
    with running(setup) as other:
        other.start_node("prefill", tensor_parallel_size=prefill)
        other.start_node("decode", tensor_parallel_size=decode, async_scheduling="")
        other.wait_nodes()
        assert ask_all(other) == expected
        assert ask_all(other) == expected


@pytest.mark.parametrize("options", [slow({}), slow({"async_scheduling": ""})], ids=str)
def test_after_a_preemption(
    setup: tuple[str, str], cluster: WarmCluster, options: dict[str, Any]
) -> None:
    """The last of several at once lose their blocks and are computed again."""
    body = {"prompt": PROMPT[:20], "max_tokens": 90, **DRAWN}
    expected = ask(cluster, **body)
    with running(setup, "both", num_gpu_blocks_override=64, **options) as few:
        (node,) = few.nodes()

        def ask_at_once() -> None:
            with ThreadPoolExecutor(MANY) as pool:
                found = pool.map(lambda number: ask(few, str(number), **body), range(MANY))
                assert all(each == expected for each in found)

        ask_until_preempted(node, ask_at_once)


@pytest.mark.parametrize("token", only(range(1, NUM_TOKENS), [13]))
def test_a_decode_node_dies(cluster: WarmCluster, expected: list[str], token: int) -> None:
    arm = ("mortal:arm", "SIGKILL", f"{SESSION}.sampled", str(token))
    options = {"async_scheduling": ""} if token % 2 else {}
    mortal = cluster.start_node("decode", arm, num_gpu_blocks_override=MORE_BLOCKS, **options)
    cluster.wait_nodes()
    pid = cluster.pids.pop(mortal)
    for number in range(10):
        assert ask(cluster, f"death {token} {number}") == expected[0]
        if not alive(pid):
            return
    raise AssertionError("it did not die")
