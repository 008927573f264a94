"""LoRA adapters through whole clusters: each answer is that of the model its adapter is merged
into, beside those of others and of the model alone, wherever it is computed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest

import reference
from adapters import make_adapter, merged
from cluster import node_metrics, text_of
from deaths import D, P, check
from exact import prompts
from paths import MODELS
from pdserve.common.core.lora import read_adapter
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from tiny_engine import some_tokens
from warm import WarmCluster, ranks_of, run_roles, shared, suspended
from windowed import make_windowed

MODEL = MODELS / "llama-gqa"
NUM_TOKENS = 24
MARGIN = 0.01  # of the best logit over the second, below which rounding may decide
DRAFT = {"method": "draft_model", "model": str(MODELS / "mistral"), "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters a, b and c, and what they are merged into."""
    made = tmp_path_factory.mktemp("adapters")
    make_adapter(made / "a", MODEL, seed=1)
    make_adapter(made / "b", MODEL, seed=2, rank=8, use_rslora=True)
    make_adapter(made / "c", MODEL, seed=3, rank=2, targets=("q_proj", "v_proj", "down_proj"))
    return made


@pytest.fixture(scope="module")
def options(folder: Path) -> dict[str, Any]:
    modules = json.dumps(
        [f"a={folder}/a", json.dumps({"name": "b", "path": f"{folder}/b", "base_model_name": "x"})]
    )
    return {"enable_lora": "", "lora_modules": modules, "max_loras": 4}


@pytest.fixture(scope="module")
def cluster(folder: Path, options: dict[str, Any]) -> Iterator[WarmCluster]:
    router = {**options, "runtime_lora_dir": folder, "heartbeat_timeout": 30}
    with WarmCluster(MODEL, 1, 0, router=router, **options) as made:
        made.start_node("decode", async_scheduling="")
        made.wait_nodes()
        yield made


def expected(
    folder: Path, name: str | None, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS
) -> str:
    """Returns the tokens of the model, or of one with an adapter in it."""
    model = MODEL if name is None else merged(folder / name, MODEL, folder / f"merged-{name}")
    return reference.decode(model, reference.greedy(model, prompt, num_tokens))


def clear(folder: Path, names: tuple[str | None, ...]) -> list[tuple[int, ...]]:
    """Prompts after which each of these chooses clearly, and another text than the others."""
    found = []
    for prompt in prompts(MODEL)[1::2]:
        texts = {expected(folder, name, prompt) for name in names}
        if len(texts) == len(names) and all(is_clear(folder, name, prompt) for name in names):
            found.append(prompt)
    assert len(found) >= 3
    return found[:3]


def is_clear(
    folder: Path, name: str | None, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS
) -> bool:
    expected(folder, name, prompt, num_tokens)
    path = MODEL if name is None else folder / f"merged-{name}"
    return reference.margin(path, prompt, num_tokens) > MARGIN


def ask(cluster: WarmCluster, name: str | None, prompt: tuple[int, ...], **more: Any) -> str:
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **more}
    answer = cluster.complete(list(prompt), model=name, **body)
    assert answer["model"] == (name or MODEL.name)
    return str(answer["choices"][0]["text"])


def check_exact(cluster: WarmCluster, folder: Path, names: tuple[str | None, ...]) -> None:
    """All at once, twice: the second time with what is in the caches."""
    cases = [(name, prompt) for prompt in clear(folder, names) for name in names]
    right = [expected(folder, *case) for case in cases]
    for _ in range(2):
        with ThreadPoolExecutor(len(cases)) as pool:
            answers = list(pool.map(lambda case: ask(cluster, *case), cases))
        assert answers == right, cluster.log()[-3000:]
    cluster.wait_idle()


# ---- the same tokens ----


def test_adapters_answer_beside_each_other(cluster: WarmCluster, folder: Path) -> None:
    check_exact(cluster, folder, (None, "a", "b"))
    hits = [node_metrics(n)["pdserve_prefix_cache_hits_total"] for n in cluster.nodes("prefill")]
    assert sum(hits) > 0


def test_ranks_and_stages_hold_their_parts(folder: Path, options: dict[str, Any]) -> None:
    with WarmCluster(MODEL, 0, 0, router=options, **options) as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        speculative = json.dumps(NGRAM)
        cluster.start_node("decode", pipeline_parallel_size=2, speculative_config=speculative)
        cluster.wait_nodes()
        check_exact(cluster, folder, (None, "a", "b"))


def test_preempted_and_guessed_tokens_are_the_same(folder: Path, options: dict[str, Any]) -> None:
    """On a node of both roles whose two replicas never have blocks for all, and whose draft model
    knows no adapters."""
    patient = {**options, "heartbeat_timeout": 30}
    with WarmCluster(MODEL, 0, 0, router=patient, **options) as cluster:
        few = {"num_gpu_blocks_override": 14, "max_model_len": 160}
        cluster.start_node(
            "both", **few, data_parallel_size=2, speculative_config=json.dumps(DRAFT)
        )
        cluster.wait_nodes()
        some = [(name, prompt) for prompt in prompts(MODEL)[:6] for name in ("a", "b")]
        cases = [case for case in some if is_clear(folder, *case, 44)]
        (node,), (name,) = cluster.nodes(), cluster.names("both")
        ranks = ranks_of(cluster.pids[name])

        def all_there() -> bool:
            values = node_metrics(node)
            states = ("running", "waiting")
            return sum(values[f"pdserve_num_requests_{each}"] for each in states) == len(cases)

        with ThreadPoolExecutor(len(cases)) as pool:
            with suspended(*ranks):  # one after the other, they would all have blocks
                answers = pool.map(lambda case: ask(cluster, *case, max_tokens=44), cases)
                cluster.wait_for(all_there)
            assert list(answers) == [expected(folder, *case, 44) for case in cases]
        assert {name for name, _ in cases} == {"a", "b"} and len(cases) > 5
        values = node_metrics(node)
        assert values["pdserve_num_preemptions_total"] > 0
        assert values["pdserve_spec_decode_num_accepted_tokens_total"] > 0


@pytest.mark.parametrize(
    ("role", "point", "count"),
    [("decode", f"{D}.sampled", 9), ("prefill", f"{P}.computed", 2)],
)
def test_another_node_goes_on_with_the_adapter(
    cluster: WarmCluster, folder: Path, role: str, point: str, count: int
) -> None:
    prompt = max(clear(folder, (None, "a", "b")), key=len)

    def client(cluster: WarmCluster) -> str:
        body = {"model": "a", "max_tokens": NUM_TOKENS, "ignore_eos": True}
        return text_of(cluster.stream(list(prompt), **body))

    assert client(cluster) == expected(folder, "a", prompt)
    check(cluster, client, role, "SIGKILL", point, count)


@pytest.mark.slow
def test_classes_of_transformers_serve_them(tmp_path: Path) -> None:
    """Beside each other and the model alone, over a hand-off between unequal layouts, and from the
    prefix cache. One that does not fit is the nodes' to refuse: routers do not know its sizes."""
    model = make_windowed("gemma3", tmp_path / "model")
    # Each process would import it.
    shared().load("transformers.models.gemma3.modeling_gemma3", "pdserve.common.model.hf.model")
    for seed, name in enumerate(("a", "b")):
        make_adapter(tmp_path / name, model, seed=seed, size=1.0)
    make_adapter(tmp_path / "misfit", MODEL, seed=0)
    options = {"enable_lora": "", "lora_modules": json.dumps([f"a={tmp_path}/a"])}
    router = {**options, "runtime_lora_dir": tmp_path}
    prompt = tuple(some_tokens(90, seed=1))
    with WarmCluster(model, 0, 0, router=router, **options) as cluster:
        cluster.start_node("prefill", tensor_parallel_size=2)
        cluster.start_node("decode")
        cluster.wait_nodes()
        refused(load(cluster, "misfit", "misfit"), 400, "has the shape")
        assert load(cluster, "b", "b").status_code == 200
        right = {}
        for name in (None, "a", "b"):
            whole = merged(tmp_path / name, model, tmp_path / f"merged-{name}") if name else model
            assert reference.margin(whole, prompt, NUM_TOKENS) > MARGIN
            right[name] = list(reference.greedy(whole, prompt, NUM_TOKENS))
        assert right["a"] != right[None] != right["b"] != right["a"]
        body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        for _ in range(2):
            with ThreadPoolExecutor(3) as pool:
                asked = {
                    name: pool.submit(cluster.complete, list(prompt), model=name, **body)
                    for name in right
                }
            found = {name: each.result()["choices"][0] for name, each in asked.items()}
            assert {name: choice["token_ids"] for name, choice in found.items()} == right


# ---- by clients ----


def load(cluster: WarmCluster, name: str, path: Any, **more: Any) -> Any:
    return cluster.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def unload(cluster: WarmCluster, name: str) -> Any:
    return cluster.post("/v1/unload_lora_adapter", lora_name=name)


def wait_for(cluster: WarmCluster, folder: Path, *names: str, role: str | None = None) -> None:
    """Until all nodes that live, of this role if one is given, have these."""
    spec = ModelSpec.from_folder(MODEL)
    digests = {read_adapter(folder / name, spec, 16).digest for name in names}

    def have() -> bool:
        nodes = [node for node in cluster.nodes(role) if node["state"] == "ready"]
        return all(digests <= set(node["adapters"]) for node in nodes)

    cluster.wait_for(have)


def models(cluster: WarmCluster) -> list[str]:
    return [card["id"] for card in cluster.get("/v1/models").json()["data"]]


def refused(answer: Any, status: int, word: str) -> None:
    error = answer.json()["error"]
    assert answer.status_code == status and word in error["message"], answer.text


def test_an_adapter_comes_and_goes(cluster: WarmCluster, folder: Path) -> None:
    (prompt, *_) = clear(folder, (None, "a", "c"))
    card = load(cluster, "c", "c").json()
    assert card["id"] == "c" and card["parent"] == MODEL.name and card["root"] == f"{folder}/c"
    assert models(cluster) == [MODEL.name, "a", "b", "c"]
    assert cluster.get("/v1/models/c").json() == card
    assert ask(cluster, "c", prompt) == expected(folder, "c", prompt)
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 3}
    assert cluster.post("/v1/chat/completions", model="c", **chat).json()["model"] == "c"
    refused(load(cluster, "c", "b"), 400, "loaded already")
    # Another one under its name.
    assert load(cluster, "c", "b", load_inplace=True).status_code == 200
    assert ask(cluster, "c", prompt) == expected(folder, "b", prompt)
    assert unload(cluster, "c").json() == {"id": "c", "object": "model", "deleted": True}
    refused(unload(cluster, "c"), 404, "not loaded")
    refused(cluster.post("/v1/completions", model="c", prompt="The"), 404, "does not exist")
    refused(cluster.get("/v1/models/c"), 404, "does not exist")
    assert models(cluster) == [MODEL.name, "a", "b"]
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(model="a", token_ids=pb.TokenIds(ids=prompt))
        request.sampling.MergeFrom(pb.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        ids = [token.id for reply in stub.Generate(request) for token in reply.tokens]
        assert tuple(ids) == reference.greedy(folder / "merged-a", prompt, 4)
        request.model = "c"
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_node_that_comes_later_gets_it(cluster: WarmCluster, folder: Path) -> None:
    assert load(cluster, "c", "c").status_code == 200
    late = cluster.start_node("decode", lora_modules="[]")
    cluster.wait_nodes()
    wait_for(cluster, folder, "a", "b", "c")
    assert unload(cluster, "c").status_code == 200
    cluster.kill(late)


def test_a_request_under_way_keeps_its_adapter(cluster: WarmCluster, folder: Path) -> None:
    """Also where another node must go on: its own stands still meanwhile, and then dies."""
    (prompt, *_) = clear(folder, (None, "a", "c"))
    assert load(cluster, "c", "c").status_code == 200
    other = cluster.start_node("decode")
    cluster.wait_nodes()
    wait_for(cluster, folder, "a", "b", "c")
    body = {"model": "c", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    (busy,) = [name for name in cluster.names("decode") if name != other]
    stopped = cluster.start_node(
        "decode", ("mortal:arm", "SIGSTOP", f"{D}.sampled", "5"), num_gpu_blocks_override=400
    )
    cluster.wait_nodes()
    wait_for(cluster, folder, "a", "b", "c")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(lambda: text_of(cluster.stream(list(prompt), **body)))
        cluster.busy("decode")
        assert 'running_lora_adapters="c"' in cluster.get("/metrics").text
        assert unload(cluster, "c").status_code == 200
        refused(cluster.post("/v1/completions", model="c", prompt="The"), 404, "does not exist")
        cluster.kill(stopped)
        assert answer.result() == expected(folder, "c", prompt)
    cluster.kill(other)
    assert busy in cluster.pids


def test_a_failed_load_changes_nothing(cluster: WarmCluster, folder: Path) -> None:
    outside = folder.parent / "outside"
    shutil.copytree(folder / "c", outside)
    (folder / "link").symlink_to(outside)
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "linked").mkdir()
    (folder / "linked" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (folder / "empty").mkdir()
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "adapter_config.json")
    for path in ("../outside", outside, "link", "", ".", "/etc", "/proc/self"):
        refused(load(cluster, "c", path), 400, "must be inside the folder")
    refused(load(cluster, "c", "linked"), 400, "is a link out of")
    for path in ("nothing", "empty", "pipe", "c/adapter_config.json"):
        refused(load(cluster, "c", path), 400, "adapter_config.json is missing")
    for path in ("\0", "circle", "x" * 9000):
        refused(load(cluster, "c", path), 400, "lora_path")
    for name in ("", " ", "é", "x" * 129, MODEL.name):
        refused(load(cluster, name, "c"), 400, "name")
    for body in ({}, {"lora_name": "c"}, {"lora_name": 1, "lora_path": "c"}, {"lora_name": ["c"]}):
        assert cluster.post("/v1/load_lora_adapter", **body).status_code == 400
    for body in ({}, {"lora_name": 1}, {"lora_name": ["c"]}):
        assert cluster.post("/v1/unload_lora_adapter", **body).status_code == 400
    for name in ("1", "2"):
        make_adapter(folder / name, MODEL, seed=int(name), rank=1, targets=("q_proj",))
        assert load(cluster, name, name).status_code == 200
    refused(load(cluster, "c", "c"), 400, "--max-loras")
    wait_for(cluster, folder, "a", "b", "1", "2")  # in the place of those before
    assert [unload(cluster, name).status_code for name in ("1", "2")] == [200, 200]
    make_adapter(folder / "big", MODEL, seed=0, rank=17, targets=("q_proj",))
    refused(load(cluster, "c", "big"), 400, "--max-lora-rank 16")
    assert models(cluster) == [MODEL.name, "a", "b"]


def test_an_adapter_of_no_numbers_fails_alone(cluster: WarmCluster, folder: Path) -> None:
    """Beside others in their steps, and before them in their blocks."""
    make_adapter(folder / "nan", MODEL, seed=0, size=float("nan"))
    assert load(cluster, "nan", "nan").status_code == 200
    cases = [(name, prompt) for prompt in clear(folder, (None, "a", "b")) for name in (None, "a")]
    bad = {"model": "nan", "prompt": list(cases[0][1]), "temperature": 0}
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(cluster.post, "/v1/completions", **bad) for _ in range(4)]
        answers = list(pool.map(lambda case: ask(cluster, *case), cases))
        assert {answer.result().status_code for answer in ended} == {500}
    assert answers == [expected(folder, *case) for case in cases]
    assert [ask(cluster, *case) for case in cases] == answers
    assert unload(cluster, "nan").status_code == 200
    cluster.wait_idle()


@pytest.mark.slow
def test_steps_in_flight_keep_their_adapter(folder: Path) -> None:
    """A node with room for one adapter, whose client leaves while two steps are in flight, takes
    another adapter only after both."""
    options = {"enable_lora": "", "max_loras": 1}
    router = {**options, "runtime_lora_dir": folder, "heartbeat_timeout": 30}
    (prompt, *_) = clear(folder, (None, "a", "b"))
    with (
        WarmCluster(MODEL, 1, 0, router=router, **options) as cluster,
        ThreadPoolExecutor() as pool,
    ):
        cluster.start_held("decode", async_scheduling="")
        cluster.wait_nodes()
        for before, after in (("a", "b"), ("b", "a")):
            assert load(cluster, before, before).status_code == 200
            with cluster.standing_still("decode", steps=5):
                body = {"model": before, "max_tokens": 200, "ignore_eos": True}
                stream = cluster.stream(list(prompt), **body)
                assert text_of(islice(stream, 4))
                stream.close()
                assert unload(cluster, before).status_code == 200
                loaded = pool.submit(load, cluster, after, after)
                wait_for(cluster, folder, after, role="prefill")
            assert loaded.result().status_code == 200
            wait_for(cluster, folder, after)
            assert ask(cluster, after, prompt) == expected(folder, after, prompt)
            assert unload(cluster, after).status_code == 200
        cluster.wait_idle()
        assert "ADAPTER_NOT_LOADED" not in cluster.log()


# ---- at the start ----


def test_mistakes_are_told_at_the_start(folder: Path, tmp_path: Path) -> None:
    common = ["--model", str(MODEL), "--enable-lora", "--lora-modules"]
    cases = {
        "a=/nowhere": "adapter_config.json is missing",
        "a": "must be name=folder",
        f"{MODEL.name}={folder}/a": "the model itself has this name",
    }
    roles = ("router", "prefill_node")
    commands = [[role, *common, word] for word in cases for role in roles][:-1]
    commands.append(["router", *common[:2], "--runtime-lora-dir", str(folder)])
    words = [*[word for word in cases.values() for _ in roles][:-1], "needs --enable-lora"]
    for (code, log), word in zip(run_roles(tmp_path, commands), words, strict=True):
        assert code == 2 and word in log and "Traceback" not in log, log


def test_clients_load_nothing_unless_they_may(folder: Path, options: dict[str, Any]) -> None:
    with WarmCluster(MODEL, 0, 0, router=options) as cluster:
        cluster.start_node("both")  # without --enable-lora
        cluster.wait_nodes()
        assert load(cluster, "c", "c").status_code == 404
        assert "/v1/load_lora_adapter" not in cluster.get("/openapi.json").json()["paths"]
        assert ask(cluster, None, (1, 2, 3))
        assert not any("adapters" in node for node in cluster.nodes())
