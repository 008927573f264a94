"""Placement that knows the caches, through real clusters: a prompt goes where its beginning is,
also after nodes died and came back, and every token stays right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

import reference
from callers import fresh_prompt
from cluster import METRIC, MODEL_NAME
from paths import MODELS
from thinned import slow
from tiny_engine import some_tokens
from warm import WarmCluster, run_roles
from windowed import make_windowed

MODEL = "llama-gqa"
SIZE = 16
PREFIX_AWARE = {"prefill_policy": "prefix-aware", "decode_policy": "prefix-aware"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, prefill=2, decode=1, router=PREFIX_AWARE) as made:
        yield made


def ask(cluster: WarmCluster, prompt: list[int]) -> int:
    """Asks and checks every token; returns how many of the prompt's were cached."""
    return ask_all(cluster, [prompt])


def ask_all(cluster: WarmCluster, prompts: list[list[int]]) -> int:
    """In one request: the router places all of them at once."""
    shown = {"logprobs": 0, "return_tokens_as_token_ids": True, "ignore_eos": True}
    answer = cluster.complete(prompts, max_tokens=6, **shown)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        tokens = choice["logprobs"]["tokens"]
        ids = tuple(int(token.removeprefix("token_id:")) for token in tokens)
        assert ids == reference.greedy(cluster.model, tuple(prompt), 6)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def prefill_nodes(cluster: WarmCluster) -> list[dict[str, Any]]:
    return [node for node in cluster.state()["nodes"] if node["role"] == "prefill"]


def prefilled(cluster: WarmCluster) -> Counter[str]:
    """Prompt tokens that each prefill node was given."""
    return Counter({node["name"]: node["prompt_tokens"] for node in prefill_nodes(cluster)})


def metrics(cluster: WarmCluster) -> dict[str, float]:
    lines = MODEL_NAME.sub("", requests.get(f"{cluster.url}/metrics", timeout=60).text)
    found = (METRIC.fullmatch(line) for line in lines.replace("{,", "{").splitlines())
    return {f"{each[1]} {each[3] or ''}".strip(): float(each[4]) for each in found if each}


def known_blocks(cluster: WarmCluster, role: str = "prefill") -> float:
    return metrics(cluster)[f'pdserve_prefix_index_blocks role="{role}"']


def turn(cluster: WarmCluster, prompt: list[int]) -> tuple[str, int]:
    """Returns the prefill node that computed it, and the tokens that were cached; the router knows
    all its blocks then."""
    before, known = prefilled(cluster), known_blocks(cluster)
    cached = ask(cluster, prompt)
    full = len(prompt) // SIZE - cached // SIZE
    cluster.wait_for(lambda: known_blocks(cluster) >= known + full)
    (name,) = (prefilled(cluster) - before).keys()
    return name, cached


def asked(cluster: WarmCluster, prompt: list[int], cached: int) -> str:
    """Returns the prefill node that computed it."""
    before = prefilled(cluster)
    assert ask(cluster, prompt) == cached
    (name,) = (prefilled(cluster) - before).keys()
    return name


def test_conversations_stay_where_they_began_and_are_dealt_out(cluster: WarmCluster) -> None:
    homes = []
    for _ in range(4):
        prompt = fresh_prompt(3 * SIZE)
        home, cached = turn(cluster, prompt)
        assert cached == 0
        for length in (5, 8):
            prompt = prompt + fresh_prompt(length * SIZE - len(prompt))
            assert turn(cluster, prompt)[0] == home
        homes.append(home)
    assert len(set(homes)) == 2, "new ones go to either node"
    said = metrics(cluster)
    hits = said['pdserve_prefix_index_hits_total role="prefill"']
    assert hits == 4 * (3 + 5) * SIZE
    assert said['pdserve_kv_event_resyncs_total reason="gap"'] == 0
    assert said['pdserve_placement_policy_failures_total role="prefill"'] == 0


def test_a_node_that_died_is_forgotten_and_another_takes_over(cluster: WarmCluster) -> None:
    prompt = fresh_prompt(4 * SIZE)
    home, _ = turn(cluster, prompt)
    longer = prompt + fresh_prompt(SIZE)
    assert turn(cluster, longer)[0] == home
    known = known_blocks(cluster)
    cluster.kill(home)
    longest = longer + fresh_prompt(SIZE)
    ask(cluster, longest)  # at once: the router may still believe in the dead one
    cluster.wait_for(lambda: known_blocks(cluster) < known)
    cluster.start_node("prefill")
    cluster.wait_nodes()
    other, cached = turn(cluster, longest + fresh_prompt(SIZE))
    assert other != home and cached == len(longest)


@pytest.mark.slow
def test_a_state_is_found_where_it_is(tmp_path: Path) -> None:
    """A model of states alone caches few blocks of a prompt: those after which it has a state."""
    model = make_windowed("mamba", tmp_path)
    options = {"max_num_batched_tokens": 4 * SIZE, "max_model_len": 1024}
    with WarmCluster(model, 2, 1, router=PREFIX_AWARE, **options) as cluster:
        prompts = [some_tokens(11 * SIZE + 5, seed=number) for number in range(4)]
        homes = [asked(cluster, prompt, cached=0) for prompt in prompts]
        cluster.wait_for(lambda: known_blocks(cluster) == 4 * 5)  # two per chunk, the last one full
        for prompt, home in zip(prompts, homes, strict=True):
            longer = [*prompt, *some_tokens(40, seed=9)]
            assert asked(cluster, longer, cached=11 * SIZE) == home
        assert len(set(homes)) == 2
        hits = metrics(cluster)['pdserve_prefix_index_hits_total role="prefill"']
        assert hits == 4 * 11 * SIZE


@pytest.mark.slow
def test_many_with_one_beginning_are_shared_by_the_nodes(cluster: WarmCluster) -> None:
    cluster.wait_nodes()
    before, shared = prefilled(cluster), fresh_prompt(4 * SIZE)
    ask(cluster, shared)
    prompts = [shared + fresh_prompt(6 * SIZE) for _ in range(24)]
    ask_all(cluster, prompts)
    given = prefilled(cluster) - before
    assert len(given) == 2, given  # how evenly is the kit's to check, where no clock runs


def test_cost_keeps_conversations_and_sessions_where_they_began() -> None:
    router = {"prefill_policy": "cost", "decode_policy": "cost"}
    with WarmCluster(MODEL, prefill=2, decode=2, router=router) as cluster:
        homes = set()
        for _ in range(4):
            prompt = fresh_prompt(12 * SIZE)
            home, _ = turn(cluster, prompt)
            assert turn(cluster, prompt + fresh_prompt(SIZE))[0] == home
            homes.add(home)
        assert homes
        for name in ("a", "b", "c\N{LATIN SMALL LETTER E WITH ACUTE}" * 999):
            before, history = prefilled(cluster), list[int]()
            for _ in range(3):  # at once: no node has reported the prompt before
                history += fresh_prompt(3 * SIZE)
                body = {"prompt": history, "max_tokens": 2}
                headers = {"X-Session-Id": name.encode("latin-1")}
                url = f"{cluster.url}/v1/completions"
                requests.post(url, json=body, headers=headers, timeout=60).raise_for_status()
            assert len(prefilled(cluster) - before) == 1
        said = metrics(cluster)
        assert said['pdserve_placement_policy_failures_total role="prefill"'] == 0


@pytest.mark.parametrize("policy", [slow("prefix-aware"), "cost"])
def test_the_next_turn_of_a_chat_is_computed_where_the_answer_was(policy: str) -> None:
    router = {"decode_policy": policy, "local_prefill_threshold": 4 * SIZE}
    with WarmCluster(MODEL, prefill=1, decode=2, router=router) as cluster:
        prompt = fresh_prompt(12 * SIZE)
        for turns in range(3):
            before, known = prefilled(cluster), known_blocks(cluster, "decode")
            answer = cluster.complete(prompt, max_tokens=2 * SIZE, **SHOWN)
            tokens = tuple(answer["choices"][0]["token_ids"])
            assert tokens == reference.greedy(cluster.model, tuple(prompt), 2 * SIZE)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (turns and (len(prompt) - SIZE - 1) // SIZE * SIZE)
            assert bool(prefilled(cluster) - before) == (turns == 0)
            prompt = [*prompt, *tokens, *fresh_prompt(SIZE)]
            new = (len(prompt) - SIZE - 1) // SIZE - cached // SIZE
            cluster.wait_for(partial(knows, cluster, known + new))


SHOWN = {"return_token_ids": True, "ignore_eos": True}


def knows(cluster: WarmCluster, count: float) -> bool:
    """Whether the router knows so many blocks of decode nodes."""
    return known_blocks(cluster, "decode") >= count


@pytest.mark.slow
def test_nodes_of_both_roles_keep_their_conversations() -> None:
    router = {"decode_policy": "prefix-aware"}
    with WarmCluster(MODEL, prefill=0, decode=0, router=router) as cluster:
        for _ in range(2):
            cluster.start_node("both", data_parallel_size=2)
        cluster.wait_nodes()
        for _ in range(3):
            prompt = fresh_prompt(4 * SIZE)
            ask(cluster, prompt)
            cluster.wait_for(partial(told_of, cluster))
            for _ in range(2):
                # A node has two caches: which one it takes is its own choice, by the same blocks.
                prompt, known = prompt + fresh_prompt(2 * SIZE), len(prompt)
                assert ask(cluster, prompt) == known
                cluster.wait_for(partial(told_of, cluster))


def told_of(cluster: WarmCluster) -> bool:
    """Whether the router knows the blocks of all prompts so far."""
    nodes = cluster.state()["nodes"]
    computed = sum(node["prompt_tokens"] - node["cached_tokens"] for node in nodes)
    return known_blocks(cluster, "both") >= computed // SIZE


@pytest.mark.parametrize("policy", [slow("round-robin"), slow("least-load"), slow("power-of-two")])
def test_policies_that_do_not_follow_caches_use_all_nodes(policy: str) -> None:
    router = {"prefill_policy": policy, "decode_policy": policy}
    with WarmCluster(MODEL, prefill=2, decode=2, router=router) as cluster:
        before = prefilled(cluster)
        ask_all(cluster, [fresh_prompt(4 * SIZE) for _ in range(12)])
        given = prefilled(cluster) - before
        assert sum(given.values()) == 12 * 4 * SIZE and len(given) == 2
        if policy == "round-robin":
            assert set(given.values()) == {6 * 4 * SIZE}
        said = metrics(cluster)
        assert said['pdserve_placement_policy_failures_total role="prefill"'] == 0
        assert not any("prefix_index_blocks" in name for name in said), "none asks"


def test_a_policy_of_ones_own_places(tmp_path: Path) -> None:
    router = {"prefill_policy": "bad_policies:Last", "decode_policy": "bad_policies:Raises"}
    with WarmCluster(MODEL, prefill=2, decode=1, router=router) as cluster:
        last = max(prefill_nodes(cluster), key=lambda node: node["node_id"])
        for _ in range(3):
            ask(cluster, fresh_prompt(2 * SIZE))
        assert set(+prefilled(cluster)) == {last["name"]}
        failed = metrics(cluster)['pdserve_placement_policy_failures_total role="decode"']
        assert failed > 0, "load decided instead"
        assert not any("prefix_index_blocks" in name for name in metrics(cluster)), "none asks"


def test_a_policy_that_is_none_ends_the_router(tmp_path: Path) -> None:
    commands = [
        ["router", f"--model={MODELS / MODEL}", f"--prefill-policy={name}"]
        for name in ("sticky", "json:loads")
    ]
    ended = run_roles(tmp_path, commands)
    assert [code for code, _ in ended] == [2, 2], ended
    assert "--prefill-policy: unknown name 'sticky'; choose one of: cost, least-load" in ended[0][1]
    assert "--prefill-policy json:loads is not a subclass of" in ended[1][1]
