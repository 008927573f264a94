"""Processes that prepare bodies: their deaths and standstills, what may be in a body, templates
that would take any time, and what they inherit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import requests

from benchmarks.bench_bodies import router
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.router import ChatConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import InvalidRequest, PdserveError, RequestError
from pdserve.router.api import fork_server
from pdserve.router.api import preprocess_workers as workers_module
from pdserve.router.api.app_state import INLINE, SMALL, AppState
from pdserve.router.api.conversation import BOUNDS
from pdserve.router.api.preprocess import MAX_CONTAINERS, BodyBuffer, Preprocessor
from pdserve.router.api.preprocess_worker import Spec
from pdserve.router.api.preprocess_workers import PreprocessWorkers
from pdserve.router.cluster.served_model import ServedModel, load_served_model
from processes import alive, command
from waiting import eventually, unless_busy

MODEL = MODELS / "llama-gqa"
# Its template knows how to multiply.
CONFIG = ModelConfig(
    model=str(MODEL),
    max_model_len=1024,
    chat_template="{% for m in messages %}{{ m.content }}{% for c in m.tool_calls | default([]) %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ 'x' * (width | default(0)) }}",
)
one_loop = pytest.mark.asyncio(loop_scope="module")
CHATS = ChatConfig(trust_request_chat_template=True)
CHAT = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_served_model(CONFIG)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[PreprocessWorkers]:
    made = PreprocessWorkers(Spec(asdict(CONFIG), asdict(LogConfig()), asdict(CHATS)))
    yield made
    await made.close()
    assert not ours()


def ours() -> list[psutil.Process]:
    """The fork server and its workers."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if "pdserve.router.api.preprocess_worker" in command(each)]


def server_pid() -> int:
    """The fork server's; 0 while there is none."""
    return next((each.pid for each in ours() if each.ppid() == os.getpid()), 0)


def pids() -> list[int]:
    """The workers'."""
    server = server_pid()
    return sorted(each.pid for each in ours() if server not in (0, each.pid))


def encode(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def tokens(workers: PreprocessWorkers) -> list[int]:
    done = await workers.preprocess("tokenize", BodyBuffer(encode(prompt="once")))
    return list(done.prompts[0])


def while_it_works(monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1) -> list[int]:
    """The first `times` workers get this signal before they can answer; their process ids."""
    hit: list[int] = []
    real = workers_module._Worker.ask

    async def ask(self: Any, *asked: Any) -> Any:
        if len(hit) < times:
            os.kill(self.pid, number)
            hit.append(self.pid)
        return await real(self, *asked)

    monkeypatch.setattr(workers_module._Worker, "ask", ask)
    return hit


@one_loop
async def test_the_ids_of_a_long_stream_come_beside_the_body(workers: PreprocessWorkers) -> None:
    """Fields of the body take 64 KiB at most."""
    ids = [f"{i:032x}" for i in range(60_000)]
    raw = encode(prompt="once", stream=True, resumable=True, resume=ids)
    done = await workers.preprocess("completion", BodyBuffer(raw))
    assert done.resume.split() == ids and done.body.resumable and done.body.resume is None
    with pytest.raises(InvalidRequest, match="parameters take more than 65536 bytes"):
        await workers.preprocess("completion", BodyBuffer(encode(prompt="once", user="u" * 70_000)))


# ---- a worker that is killed ----------------------------------------------------------------


@one_loop
async def test_a_killed_worker_costs_its_body_a_second_try(
    workers: PreprocessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await tokens(workers)
    before = pids()
    hit = while_it_works(monkeypatch, signal.SIGKILL)
    assert await tokens(workers) == expected
    assert hit[0] in before
    await eventually(lambda: not alive(hit[0]))
    for idle in pids():  # which a host without memory kills, say, while they have nothing to do
        os.kill(idle, signal.SIGKILL)
    assert await tokens(workers) == expected


@one_loop
async def test_a_body_that_ends_two_workers_is_refused(
    workers: PreprocessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await tokens(workers)
    while_it_works(monkeypatch, signal.SIGKILL, times=2)
    with pytest.raises(PdserveError, match="ended a process, and another") as refused:
        await tokens(workers)
    assert (refused.value.code, refused.value.http_status) == ("PREPARATION_FAILED", 500)
    assert await tokens(workers) == expected


@one_loop
async def test_a_fork_server_that_dies_is_replaced(workers: PreprocessWorkers) -> None:
    expected = await tokens(workers)
    server = server_pid()
    os.kill(server, signal.SIGKILL)
    assert await tokens(workers) == expected, "by a worker that has not ended yet, or a new one"
    # Without a body that asks for it.
    await eventually(lambda: server_pid() not in (0, server))
    assert await tokens(workers) == expected


# ---- a worker that stands still -------------------------------------------------------------


@one_loop
async def test_a_stopped_worker_is_given_up_and_its_body_tried_again(
    workers: PreprocessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "LOOK_PERIOD", 0.05)
    monkeypatch.setattr(workers_module, "_TIMEOUT", 1e6)  # the look alone finds it
    expected = await tokens(workers)
    hit = while_it_works(monkeypatch, signal.SIGSTOP)
    assert await tokens(workers) == expected
    assert len(hit) == 1
    await eventually(lambda: not alive(hit[0]))


@one_loop
async def test_idle_workers_that_are_stopped_cost_nothing(
    workers: PreprocessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await tokens(workers)
    await asyncio.gather(tokens(workers), tokens(workers))
    stopped = pids()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: all(map(fork_server.is_stopped, stopped)))
    # Two looks at one that owes an answer would take for ever.
    monkeypatch.setattr(fork_server, "LOOK_PERIOD", 1e6)
    assert await asyncio.gather(tokens(workers), tokens(workers)) == [expected] * 2
    await eventually(lambda: not set(stopped) & set(pids()))


@one_loop
async def test_a_stopped_fork_server_is_replaced(
    workers: PreprocessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "LOOK_PERIOD", 0.05)
    monkeypatch.setattr(fork_server, "STOP_TIMEOUT", 0.2)
    expected = await tokens(workers)
    server = server_pid()
    os.kill(server, signal.SIGSTOP)
    while_it_works(monkeypatch, signal.SIGKILL)  # so that another one is needed
    assert await tokens(workers) == expected
    await eventually(lambda: not alive(server))


@one_loop
async def test_a_worker_that_computes_for_long_is_no_stopped_one(
    workers: PreprocessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy host looks alike from outside, but for the state that the kernel tells."""
    monkeypatch.setattr(fork_server, "LOOK_PERIOD", 0.001)
    monkeypatch.setattr(fork_server, "FROZEN_LOOKS", 1)
    await tokens(workers)
    before = pids()
    with pytest.raises(InvalidRequest, match="maximum context length"):
        await workers.preprocess("tokenize", BodyBuffer(encode(prompt="once upon " * 200_000)))
    assert pids() == before


# ---- whatever is in a body ------------------------------------------------------------------

HALF = '{"a": "\\ud800", "\\udfff": ["\\uD83D"]}'  # JSON in a string, as a body may have it
HUGE, LONG = 2**70, 10**4000
DEPTH = 100_000
NESTED = '{"a":' * DEPTH + "1" + "}" * DEPTH
WIDE = {
    "type": "object",
    "properties": {f"p{i}": {} for i in range(600)},
}  # refused, with its place


def said(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*CHAT, {"role": "assistant", "tool_calls": [call]}]


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def answered(arguments: str) -> list[dict[str, Any]]:
    """Items of the Responses API."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    return [call, {"type": "function_call_output", "call_id": "c", "output": arguments}]


SCHEMAS = [
    {"const": HUGE}, {"enum": [LONG]}, {"minimum": float("nan")}, {"maximum": float("inf")},
    {"pattern": "("}, {"$ref": "#/nowhere"},
]  # fmt: skip
ODD: dict[str, tuple[str, bytes]] = {
    "half": ("chat", encode(messages=said(HALF))),
    "nested": ("chat", encode(messages=said(NESTED))),
    "nested less": ("chat", encode(messages=said("[" * 900 + "]" * 900))),
    "nested object": ("chat", encode(messages=said('{"a":' * 900 + "1" + "}" * 900))),
    "long number": ("chat", encode(messages=said('{"a": 1' + "0" * 5000 + "}"))),
    "no number": ("chat", encode(messages=said('{"a": NaN, "b": 1e999}'))),
    "object": ("chat", encode(messages=said({"a": HUGE, "b": LONG}))),
    "tokenize": ("tokenize", encode(messages=said(HALF))),
    "responses": ("responses", encode(input=answered(HALF))),
    "responses nested": ("responses", encode(input=answered(NESTED))),
    "told again": (
        "responses",
        encode(input="a", tools=[{"type": "function", "name": "f", "parameters": {"x": HUGE}}],
               tool_choice="none", metadata={"a": LONG, "b": float("nan")}),
    ),
    "anthropic": (
        "messages",
        encode(messages=[*CHAT, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": HUGE, "b": LONG}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": HALF}]}], max_tokens=1),
    ),
    **{f"tool {i}": ("chat", encode(messages=CHAT, tools=[tool(properties={"a": each})],
                                    tool_choice="required")) for i, each in enumerate(SCHEMAS)},
    **{f"format {i}": ("chat", encode(messages=CHAT, response_format={
        "type": "json_schema", "json_schema": {"name": "f", "schema": each}}))
        for i, each in enumerate(SCHEMAS)},
    "schema half": ("completion", encode(prompt="a", guided_json='{"const": "\\ud800"}')),
    "schema key": ("completion", encode(
        prompt="a", guided_json=json.dumps({"type": "object", "properties": {"\ud800": WIDE}}))),
    "schema nested": ("completion", encode(prompt="a", guided_json='{"not":' * 5000)),
    "tag half": ("completion", encode(prompt="a", structured_outputs={
        "structural_tag": '{"triggers": ["\\ud800"], "structures": [{"begin": "\\ud800", "end": '
                          '"\\ud800", "schema": {"enum": ["\\ud800"]}}]}'})),
    "raw half": ("chat", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "stop half": ("completion", b'{"prompt": "a", "stop": ["\\udc00"]}'),
    "bytes": ("completion", b'{"prompt": "\xff\xed\xa0\x80"}'),
    "nested body": ("chat", b'{"messages":' + b"[" * DEPTH),
    "nested kwargs": ("tokenize", b'{"messages": [{"role": "user", "content": "a"}], '
                      b'"chat_template_kwargs": {"a": ' + b"[" * 190 + b"]" * 190 + b"}}"),
}  # fmt: skip


async def grammar_of(serving: AppState, kind: str, raw: bytes) -> None:
    """Asks; refusals are the client's fault, and can be written."""
    try:
        await serving.preprocess(kind, BodyBuffer(raw), "")
    except RequestError as error:
        assert error.message.encode()


def padded(raw: bytes, size: int) -> bytes:
    return raw + b" " * max(0, size - len(raw))


@one_loop
@pytest.mark.parametrize("size", [0, INLINE + 1, SMALL + 1])
async def test_no_body_is_more_than_its_own_refusal(
    workers: PreprocessWorkers, model: ServedModel, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """On the event loop, on a thread, in a process: no worker ends, and nothing is a defect."""
    serving = AppState(pipeline=None, served=model, chat=CHATS, workers=workers)  # type: ignore[arg-type]
    await tokens(workers)
    before = pids()
    for name, (kind, raw) in ODD.items():
        try:
            await grammar_of(serving, kind, padded(raw, size))
        except Exception as error:
            raise AssertionError(name) from error
        assert pids() == before, name
    assert "Traceback" not in caplog.text


async def test_half_a_character_in_arguments_becomes_a_mark(model: ServedModel) -> None:
    """A model may have written it, so the next turn of the conversation must not be refused."""
    preprocessor = Preprocessor(model)
    done = preprocessor.preprocess("tokenize", encode(messages=said(HALF)))
    text = model.tokenizer.decode(done.prompts[0])
    assert json.loads(text[text.index("{") :]) == {"a": "?", "?": ["?"]}
    whole = preprocessor.preprocess("tokenize", encode(messages=said('{"a": "\\ud83d\\ude00"}')))
    assert "😀" in model.tokenizer.decode(whole.prompts[0])


@pytest.mark.parametrize("calls", [1, 2])
def test_lists_in_arguments_count_before_they_are_parsed(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    parsed: list[str] = []
    monkeypatch.setattr("pdserve.router.api.conversation.decode", parsed.append)
    lists = "[" + ",".join(["[]"] * (MAX_CONTAINERS // calls)) + "]"
    messages = said('"') + calls * said(lists)  # a quote that hides nothing of the next
    with pytest.raises(InvalidRequest, match="more than 65536 lists and objects") as refused:
        Preprocessor(model).preprocess("chat", encode(messages=messages))
    assert refused.value.param == "messages" and not parsed


@one_loop
async def test_a_panic_in_a_worker_is_that_body_s_error(
    workers: PreprocessWorkers, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries in Rust panic with what is no Exception."""

    class PanicException(BaseException):
        pass

    def encode_(*_: Any) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(type(model.tokenizer), "encode", encode_)
    with pytest.raises(PdserveError, match="its log entry is under request id") as failed:
        Preprocessor(model).preprocess("tokenize", encode(prompt="a"))
    assert failed.value.code == "PREPARATION_FAILED"


# ---- templates that would take any time -----------------------------------------------------

BOMBS = {
    "memory": "{{ [1]*1000000000 }}",
    "text": "{{ 'x' * 10**10 }}",
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}


async def hostile(serving: AppState, kind: str, raw: bytes) -> Any:
    return await serving.preprocess(kind, BodyBuffer(raw), "hostile")


@one_loop
@pytest.mark.parametrize("name", BOMBS)
async def test_a_clients_template_is_bounded_at_all_sizes(
    workers: PreprocessWorkers, model: ServedModel, name: str
) -> None:
    serving = AppState(pipeline=None, served=model, chat=CHATS, workers=workers)  # type: ignore[arg-type]
    await tokens(workers)
    sizes = (SMALL + 1,) if name == "time" else (0, INLINE + 1, SMALL + 1)
    for kind, size in zip(("chat", "tokenize", "chat"), sizes, strict=False):
        raw = padded(encode(messages=CHAT, chat_template=BOMBS[name]), size)
        asked = asyncio.create_task(unless_busy(partial(hostile, serving, kind, raw)))
        meanwhile = 0
        while not asked.done():
            await workers.preprocess("tokenize", BodyBuffer(encode(prompt="once")), "other")
            meanwhile += not asked.done()
            await asyncio.sleep(0.02)
        assert meanwhile or name != "time", "no worker was free for others"
        with pytest.raises(InvalidRequest, match=f"takes more than {BOUNDS}") as refused:
            await asked
        assert refused.value.param == "chat_template"
    raw = encode(messages=CHAT, chat_template="{{ messages[0].content }}")
    ids = (await serving.preprocess("tokenize", BodyBuffer(raw), "")).prompts[0]
    assert model.tokenizer.decode(ids) == "Tell me a story."


@one_loop
async def test_values_cannot_make_the_servers_template_a_bomb(
    workers: PreprocessWorkers, model: ServedModel
) -> None:
    serving = AppState(pipeline=None, served=model, workers=workers)  # type: ignore[arg-type]
    raw = encode(messages=CHAT, chat_template_kwargs={"width": 10**10})
    with pytest.raises(InvalidRequest, match="takes more than") as refused:
        await unless_busy(partial(hostile, serving, "chat", raw))
    assert refused.value.param == "chat_template_kwargs"
    few = encode(messages=CHAT, chat_template_kwargs={"width": 3, "enable_thinking": False})
    assert (await serving.preprocess("chat", BodyBuffer(few), "")).prompts


@one_loop
async def test_errors_of_a_bounded_template_come_back(
    workers: PreprocessWorkers, model: ServedModel
) -> None:
    serving = AppState(pipeline=None, served=model, chat=CHATS, workers=workers)  # type: ignore[arg-type]
    for template, message in (
        ("{{ raise_exception('no such role') }}", "the chat template failed: no such role"),
        ("{% for %}", "the chat template failed"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "the chat template failed"),
        ('{{ "\\ud800" }}', "the chat template failed"),
        ('{{ raise_exception("\\ud800") }}', r"failed: \\ud800"),
        ('{{ raise_exception("x" * 5000) }}', "more characters"),
    ):
        raw = encode(messages=CHAT, chat_template=template)
        with pytest.raises(InvalidRequest, match=message) as refused:
            await serving.preprocess("chat", BodyBuffer(raw), "")
        assert refused.value.param == "chat_template" and len(refused.value.message) < 700
    untrusted = replace(serving, chat=ChatConfig())
    with pytest.raises(InvalidRequest, match="does not run clients"):
        await untrusted.preprocess("chat", BodyBuffer(raw), "")


# ---- through a router's own port -----------------------------------------------------------

SECRETS = {
    "PDSERVE_API_KEY": "key-of-clients",
    "PDSERVE_CLUSTER_KEY": "0123456789abcdef-cluster",
    "HF_TOKEN": "hf_secret",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
    "HTTPS_PROXY_OF_OURS": "http://me:secret@127.0.0.1:9",
}


def test_a_routers_workers_know_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with router(str(MODEL)) as (process, port):
        key = {"Authorization": f"Bearer {SECRETS['PDSERVE_API_KEY']}"}
        large = {"prompt": "a", "user": "x" * SMALL}
        url = f"http://127.0.0.1:{port}/tokenize"
        assert requests.post(url, json=large, headers=key, timeout=60).status_code == 200
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2, "a fork server and its workers"
        for child in children:
            environment = Path(f"/proc/{child.pid}/environ").read_bytes().decode()
            assert not [each for each in (*SECRETS, *SECRETS.values()) if each in environment]
