"""Bodies that would cost others time or memory: counted before they are parsed, bounded before
they are tokenized, prepared in processes of their own."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest
from multidict import CIMultiDict

from benchmarks.bench_bodies import KINDS as ATTACKS
from benchmarks.bench_bodies import MIB, measure, router
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.router import ChatConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import (
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from pdserve.router.api import preprocess as preprocess_module
from pdserve.router.api import preprocess_workers as workers_module
from pdserve.router.api.app_state import INLINE, AppState
from pdserve.router.api.preprocess import (
    MAX_CONTAINERS,
    MAX_KEYS,
    MAX_PROMPTS,
    PIECE,
    BodyBuffer,
    Preprocessor,
)
from pdserve.router.api.preprocess_worker import Spec
from pdserve.router.api.preprocess_workers import PreprocessWorkers
from pdserve.router.cluster.served_model import ServedModel, load_served_model
from pdserve.router.http import request as request_module
from pdserve.router.http.request import Bodies
from processes import command
from warm import slowness

MODEL = MODELS / "llama-gqa"
CONFIG = ModelConfig(model=str(MODEL))
CHATS = ChatConfig(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_served_model(CONFIG)


@pytest.fixture
def text(model: ServedModel) -> Preprocessor:
    return Preprocessor(model, CHATS)


def encode(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.fixture
def no_encoding(monkeypatch: pytest.MonkeyPatch, model: ServedModel) -> Iterator[list[int]]:
    """The lengths of the texts that are encoded."""
    lengths: list[int] = []
    real = type(model.tokenizer).encode

    def encode(self: Any, text: str, special: bool = True) -> tuple[int, ...]:
        lengths.append(len(text))
        return real(self, text, special)

    monkeypatch.setattr(type(model.tokenizer), "encode", encode)
    yield lengths


# ---- bounds before work ---------------------------------------------------------------------


def test_prompts_are_counted_before_they_are_encoded(
    text: Preprocessor, no_encoding: list[int]
) -> None:
    with pytest.raises(InvalidRequest, match="at most 1024 prompts") as error:
        text.preprocess("completion", encode(prompt=["a"] * (MAX_PROMPTS + 1)))
    assert error.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="prompts × n") as error:
        text.preprocess("completion", encode(prompt=["a"] * 600, n=8))
    assert error.value.param == "n"
    assert not no_encoding


def test_a_body_for_another_model_is_not_encoded(
    text: Preprocessor, no_encoding: list[int]
) -> None:
    for kind, asked in (
        ("completion", {"prompt": "once"}),
        ("chat", {"messages": CHAT}),
        ("responses", {"input": "once"}),
        ("messages", {"messages": CHAT}),
        ("tokenize", {"prompt": "once"}),
    ):
        with pytest.raises(ModelNotFound):
            text.preprocess(kind, encode(model="sql", **asked))
        assert not no_encoding
        replace(text, adapters=frozenset({"sql"})).preprocess(kind, encode(model="sql", **asked))
        assert no_encoding
        no_encoding.clear()


@pytest.mark.parametrize("end", [b"", b"\\", b"\\\\"])
def test_a_string_that_never_ends_is_looked_at_once(text: Preprocessor, end: bytes) -> None:
    """Two megabytes of escaped quotes; trying each of them as a beginning would take hours."""
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        text.preprocess("completion", b'{"prompt": "' + b'\\"' * MIB + end)


def test_millions_of_lists_are_refused_before_they_are_parsed(
    text: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: Any) -> None:
        raise InvalidRequest("parsed")

    monkeypatch.setattr(preprocess_module, "parse", parse)
    many = b"[1]," * (MAX_CONTAINERS + 1)
    with pytest.raises(InvalidRequest, match="lists and objects"):
        text.preprocess("completion", b'{"prompt": [' + many + b"[1]]}")
    with pytest.raises(InvalidRequest, match="values"):
        text.preprocess("completion", b'{"prompt": [' + b"1," * 2**21 + b"1,1]}")
    with pytest.raises(InvalidRequest, match="keys"):  # that no schema has
        text.preprocess("completion", b'{"a": 1' + b',"a": 1' * MAX_KEYS + b"}")
    message = b'{"role": "user", "content": "[{,"},'
    with pytest.raises(InvalidRequest, match="lists and objects"):
        text.preprocess("chat", b'{"messages": [' + message * (MAX_CONTAINERS + 1) + b"]}")
    with pytest.raises(InvalidRequest, match="parsed"):  # what is in strings does not count
        text.preprocess("completion", encode(prompt='[{,\\"\\' * MAX_CONTAINERS))


def test_a_text_too_long_for_the_window_is_not_encoded(
    text: Preprocessor, no_encoding: list[int]
) -> None:
    window = text.model.max_model_len
    long = "a" * (window * text.model.tokenizer.max_token_chars + 1)
    for kind, body, param in (
        ("completion", encode(prompt=long), "prompt"),
        ("chat", encode(messages=[{"role": "user", "content": long}]), "messages"),
        ("tokenize", encode(prompt=long), "prompt"),
    ):
        with pytest.raises(InvalidRequest, match=f"maximum context length is {window} tokens") as e:
            text.preprocess(kind, body)
        assert (e.value.code, e.value.param) == ("CONTEXT_LENGTH_EXCEEDED", param)
    with pytest.raises(InvalidRequest, match="maximum context length"):
        text.preprocess("completion", encode(prompt=[1] * (3 * window)))
    assert not no_encoding


def test_a_long_text_is_encoded_piece_by_piece_until_it_cannot_fit(
    model: ServedModel, no_encoding: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.cluster.served_model._PIECE", 500)
    with pytest.raises(InvalidRequest, match="maximum context length"):
        model.encode("qz" * 4000, "prompt")
    assert max(no_encoding) == 500
    fits = "once upon a time " * 100
    assert model.encode(fits, "prompt") == model.tokenizer.encode(fits)


# ---- the bytes that are held ----------------------------------------------------------------


class Slow:
    """A request whose body comes when the test says so."""

    def __init__(self, size: int) -> None:
        self.content_length: int | None = size
        self.headers = CIMultiDict[str]()
        self.content = self
        self.protocol = self.transport = None
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()

    async def readany(self) -> bytes:
        return await self.chunks.get()


async def test_bodies_share_a_bounded_memory_and_clients_its_shares() -> None:
    bodies = Bodies(10 * MIB, timeout=0.1, share=0.5)

    async def read(request: Slow, client: str) -> int:
        async with bodies.reading(request, client) as raw:  # type: ignore[arg-type]
            return len(raw)

    first, second = Slow(10 * MIB), Slow(10 * MIB)
    reading = [asyncio.create_task(read(first, "a")), asyncio.create_task(read(second, "b"))]
    await asyncio.sleep(0)
    small = Slow(100)
    small.chunks.put_nowait(b"x" * 100)
    small.chunks.put_nowait(b"")
    assert await read(small, "a") == 100  # counts for nothing
    with pytest.raises(Unavailable):  # there is no room; a waiting request reads nothing
        await read(Slow(10 * MIB), "c")
    first.chunks.put_nowait(b"x" * MIB)
    first.chunks.put_nowait(b"")
    assert await reading[0] == MIB
    other = asyncio.create_task(read(first, "c"))
    with pytest.raises(Unavailable):  # `b` has its share
        await read(Slow(10 * MIB), "b")
    first.chunks.put_nowait(b"")
    assert await other == 0
    reading[1].cancel()


async def test_a_large_body_is_never_one_block() -> None:
    chunks = [b"a" * 100] * 2000 + [b"b" * (3 * PIECE)] * 2 + [b"c"]
    request = Slow(sum(map(len, chunks)))
    for chunk in (*chunks, b""):
        request.chunks.put_nowait(chunk)
    async with Bodies(10 * MIB).reading(request, "a") as raw:  # type: ignore[arg-type]
        assert len(raw) == request.content_length and raw.whole() == b"".join(chunks)
        pieces = list(raw)
        assert b"".join(pieces) == b"".join(chunks)
    *others, _ = map(len, pieces)
    assert min(others) >= PIECE and max(others) <= 4 * PIECE


async def test_the_bodies_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "MAX_WAITING", 2)
    bodies = Bodies(MIB, timeout=60, share=1.0)

    async def read(client: str) -> None:
        async with bodies.reading(Slow(MIB), client):  # type: ignore[arg-type]
            pass

    many = [asyncio.create_task(read("a")) for _ in range(4)]  # two are held, two wait
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await read("a")
    other = asyncio.create_task(read("b"))
    with pytest.raises(Overloaded):  # the client with most waiting gives way, the newest first
        await many[-1]
    assert not any(task.done() for task in many[:-1])
    for task in (*many, other):
        task.cancel()
    await asyncio.gather(*many, other, return_exceptions=True)
    quick = Slow(MIB)
    quick.chunks.put_nowait(b"")
    async with bodies.reading(quick, "c") as raw:  # type: ignore[arg-type]
        assert len(raw) == 0  # all room is free again


# ---- processes ------------------------------------------------------------------------------


@pytest.fixture
async def workers() -> AsyncIterator[PreprocessWorkers]:
    workers = PreprocessWorkers(Spec(asdict(CONFIG), asdict(LogConfig()), asdict(CHATS)), size=1)
    yield workers
    await workers.close()
    assert not [each for each in psutil.Process().children() if _prepares(each)]


def _prepares(process: psutil.Process) -> bool:
    return "pdserve.router.api.preprocess_worker" in command(process)


CHAT = [{"role": "user", "content": "Tell me a story."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOLD = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BODIES = [
    ("completion", {"prompt": "once upon", "n": 2, "stop": ["x"], "seed": 3}),
    ("completion", {"prompt": ["once", "upon"], "echo": True, "temperature": 0.5}),
    ("completion", {"prompt": [[3, 4], [5]], "echo": True, "odd": 1, "stream": True}),
    ("completion", {"prompt": [3, 4], "logit_bias": {"3": 1.0}, "user": "me"}),
    ("completion", {"prompt": [3, 4, 5], "truncate_prompt_tokens": "2", "best_of": 3}),
    ("responses", {"input": "once", "text": {"format": {"type": "text"}}, "stream": True}),
    (
        "responses",
        {"input": "once", "instructions": "é" * 9, "tools": [TOLD], "tool_choice": "none"},
    ),
    ("messages", {"messages": CHAT, "max_tokens": 5.0, "tool_choice": {"type": "none"}}),
    ("chat", {"messages": CHAT, "tools": [TOOL], "parallel_tool_calls": False, "top_logprobs": 0}),
    ("tokenize", {"prompt": "once upon a time"}),
    ("detokenize", {"tokens": [3, 4, 5]}),
]
WRONG = [
    ("completion", {"prompt": "a", "n": "many"}),
    ("completion", {"prompt": [10**6]}),
    ("completion", {"prompt": "a", "suffix": "b"}),
    ("chat", {"messages": []}),
    ("responses", {"input": [{"type": "item_reference"}]}),
    ("completion", {"prompt": "a", "use_beam_search": True}),
    ("chat", {"messages": CHAT, "tools": [{"type": "function"}]}),
    ("completion", {"prompt": "a", "user": "x" * 100_000}),
]


async def test_a_process_prepares_as_the_router_does(
    workers: PreprocessWorkers, text: Preprocessor
) -> None:
    for kind, body in BODIES:
        here, there = (
            text.preprocess(kind, encode(**body)),
            await workers.preprocess(kind, BodyBuffer(encode(**body))),
        )
        assert [list(ids) for ids in there.prompts] == [list(ids) for ids in here.prompts]
        assert (list(there.texts), there.ignored) == (list(here.texts), here.ignored)
        assert there.answer == here.answer
        left_out = {"prompt", "tokens", "input", "messages", "instructions", "tools", *here.ignored}
        assert there.body.model_dump(exclude=left_out) == here.body.model_dump(exclude=left_out)
    for kind, body in WRONG:
        with pytest.raises(InvalidRequest) as error:
            await workers.preprocess(kind, BodyBuffer(encode(**body)))
        if "user" not in body:
            with pytest.raises(type(error.value)) as own:
                text.preprocess(kind, encode(**body))
            assert str(own.value) == str(error.value) and own.value.param == error.value.param

    with pytest.raises(ModelNotFound):
        await workers.preprocess("tokenize", BodyBuffer(encode(prompt="a", model="sql")))
    named = BodyBuffer(encode(prompt="a", model="sql"))
    assert (await workers.preprocess("tokenize", named, adapters=frozenset({"sql"}))).prompts

    leaving = asyncio.create_task(workers.preprocess("tokenize", BodyBuffer(encode(prompt="a"))))
    await asyncio.sleep(0)
    leaving.cancel()  # a client that leaves costs no process
    assert (await workers.preprocess("tokenize", BodyBuffer(encode(prompt="a")))).prompts


async def test_a_host_that_starts_no_process_is_not_the_body_s_fault(
    monkeypatch: pytest.MonkeyPatch, workers: PreprocessWorkers
) -> None:
    async def none(*args: Any, **options: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", none)
    with pytest.raises(Unavailable, match="Too many open files"):
        await workers.preprocess("tokenize", BodyBuffer(encode(prompt="a")))


@pytest.mark.slow
def test_large_bodies_leave_the_router_small_and_awake() -> None:
    """The true path, as `benchmarks/bench_bodies.py` measures it with 100 bodies of 30 MB."""
    with router(str(MODEL), "--max-body-size", str(8 * MIB)) as (process, port):
        for kind in ATTACKS:
            figures = asyncio.run(measure(process.pid, port, kind, 5, 6 * MIB))
            assert set(figures.statuses) <= {"400", "503"}, figures
            assert figures.rss_peak < 400, figures
            assert figures.health_p50 < 50 * slowness(), figures


@pytest.mark.parametrize("where", ["threads", "processes"])
async def test_clients_take_turns(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Where large bodies are prepared; what more than may wait is refused."""
    workers = PreprocessWorkers(Spec(asdict(CONFIG), asdict(LogConfig()), asdict(CHATS)), size=1)
    serving = AppState(pipeline=None, served=model)  # type: ignore[arg-type]
    go, order = threading.Event(), list[bytes]()

    def enough(raw: bytes) -> None:
        go.wait(60)
        order.append(raw[:1])
        raise InvalidRequest("enough")

    async def in_a_process(kind: str, raw: BodyBuffer) -> None:
        await asyncio.to_thread(enough, raw.whole())

    monkeypatch.setattr(Preprocessor, "preprocess", lambda self, kind, raw: enough(raw))
    monkeypatch.setattr(workers, "_ask", in_a_process)
    door = serving if where == "threads" else workers

    def ask(client: bytes) -> asyncio.Task[Any]:
        raw = BodyBuffer(client * (INLINE + 1))
        return asyncio.create_task(door.preprocess("tokenize", raw, client.decode()))

    many = [ask(b"a") for _ in range(workers_module.MAX_WAITING + 1)]
    await asyncio.sleep(0)
    if where == "processes":
        with pytest.raises(Overloaded):
            await ask(b"a")
    other = ask(b"b")
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(other, *many, return_exceptions=True)
    assert order.index(b"b") < len(order) // 2
    await workers.close()
