"""The load generator: its arithmetic on exact times, and its client against a fake server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdserve.bench.serving import compare
from pdserve.bench.serving import main as serve
from pdserve.bench.serving.capacity import MAX_RUNS, Step, find_capacity
from pdserve.bench.serving.client import Chunk, Client, Record, Usage
from pdserve.bench.serving.datasets import (
    DatasetError,
    PrefixSpec,
    Prompt,
    TraceRow,
    Vocabulary,
    prefix_prompts,
    read_trace,
    sharegpt_prompts,
    trace_prompts,
)
from pdserve.bench.serving.load import gamma_arrivals, run_load
from pdserve.bench.serving.metrics import measure, summarize
from pdserve.bench.serving.options import fit_lengths, parse_args
from pdserve.common.core.errors import ConfigError

IDS = Vocabulary(as_ids=True)
WORDS = Vocabulary(as_ids=False)

# ---------------------------------------------------------------- arrivals


def test_poisson_arrivals_have_the_rate() -> None:
    offsets = gamma_arrivals(5000, rate=10.0, burstiness=1.0, seed=1)
    gaps = [b - a for a, b in pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert offsets[0] == 0.0 and min(gaps) >= 0
    assert mean == pytest.approx(0.1, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)  # exponential gaps


# ---------------------------------------------------------------- data sets


def test_prefixes_are_shared_in_turns() -> None:
    prompts = prefix_prompts(PrefixSpec(8, 4, 3, 7), 9, IDS, seed=1)
    assert [(p.input_len, len(p.prompt), p.output_len) for p in prompts] == [(12, 12, 7)] * 9
    assert len({tuple(p.prompt[:8]) for p in prompts}) == 3
    assert prompts[0].prompt[:8] == prompts[3].prompt[:8] != prompts[1].prompt[:8]
    assert len({tuple(p.prompt) for p in prompts}) == 9


def test_conversations_have_the_published_lengths() -> None:
    prompts = sharegpt_prompts(4000, IDS, seed=1, longest=100_000)
    assert all(len(p.prompt) == p.input_len >= 4 for p in prompts)
    assert sum(p.input_len for p in prompts) / 4000 == pytest.approx(161, rel=0.1)
    assert sum(p.output_len for p in prompts) / 4000 == pytest.approx(338, rel=0.1)
    short = sharegpt_prompts(100, WORDS, seed=1, longest=50)
    assert max(p.output_len for p in short) == 50


def test_mooncake_trace_keeps_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1300, "output_length": 9, "hash_ids": [0, 1, 3]},
        {"timestamp": 4000, "input_length": 600, "output_length": 1, "hash_ids": [0, 4]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = read_trace(path, limit=3)
    assert [row.timestamp for row in read] == [0, 3, 4]
    a, b, c = (p.prompt for p in trace_prompts(read, 1.0, IDS, seed=0))
    assert (len(a), len(b), len(c)) == (1100, 1300, 600)
    assert a[:1024] == b[:1024] and a[1024:1100] != b[1024:1100]
    assert a[:512] == c[:512] and a[512:600] != c[512:600]
    small = trace_prompts(read, 0.1, IDS, seed=0)
    assert [(p.input_len, p.output_len) for p in small] == [(110, 1), (130, 1), (60, 1)]
    assert small[0].prompt[:102] == small[1].prompt[:102]


def test_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9305900,396,109\n"
    )
    rows = read_trace(path, limit=10)
    assert [(row.input_len, row.output_len, row.hash_ids) for row in rows] == [
        (374, 44, ()),
        (396, 109, ()),
    ]
    assert rows[1].timestamp - rows[0].timestamp == pytest.approx(4.25)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"timestamp": 0}', "request 1: KeyError"),
        ("t.jsonl", "not json", "request 1: JSONDecodeError"),
        ("t.jsonl", "", "no requests"),
        ("t.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.6,3\n", "request 1: KeyError"),
        (
            "t.jsonl",
            '{"timestamp":9,"input_length":1,"output_length":1}\n'
            '{"timestamp":8,"input_length":1,"output_length":1}',
            "not in order",
        ),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DatasetError, match=message):
        read_trace(path, limit=10)


# ---------------------------------------------------------------- metrics


def record(
    *times: float, tokens: int, arrival: float = 10.0, sent: float = 10.0, prompt: int = 100
) -> Record:
    """A completed request whose chunks came at `times`, the last time closing it."""
    chunks = [Chunk(time, None) for time in times]
    return Record(arrival, sent, chunks, times[-1], "length", Usage(prompt, tokens))


def test_one_request_exactly() -> None:
    timing = measure(record(10.5, 10.6, 10.8, tokens=3))
    assert timing.ttft == pytest.approx(500)
    assert timing.e2el == pytest.approx(800)
    assert timing.tpot == pytest.approx(150)
    assert timing.itl == pytest.approx((100, 200))


def test_latency_counts_from_the_scheduled_arrival() -> None:
    timing = measure(record(10.5, 10.8, tokens=2, arrival=9.0, sent=10.0))
    assert (timing.ttft, timing.ttft_sent) == (pytest.approx(1500), pytest.approx(500))
    assert (timing.e2el, timing.e2el_sent) == (pytest.approx(1800), pytest.approx(800))
    assert timing.delay == pytest.approx(1000)


def test_chunks_of_several_tokens_share_their_gap() -> None:
    timing = measure(record(10.5, 10.6, 10.9, tokens=7))  # 3 + 2 + 2
    assert timing.itl == pytest.approx((50, 50, 150, 150))
    assert timing.gap == pytest.approx((100, 300))
    assert timing.tpot == pytest.approx(400 / 6)


def test_summary_counts_goodput_and_errors() -> None:
    records = [
        record(10.2, 10.3, tokens=2),
        record(
            11.2, 11.3, tokens=2, arrival=10.5, sent=11.1
        ),  # fast from the send, late for its user
        record(10.2, 12.0, tokens=2),  # good first token, slow second
        Record(10.0, 10.0, error="http_429"),
    ]
    summary, timings = summarize(records, {"ttft": 500.0, "tpot": 150.0})
    assert (summary.completed, summary.failed, len(timings)) == (3, 1, 3)
    assert summary.errors == {"http_429": 1}
    assert summary.duration == pytest.approx(2.0)
    assert summary.request_throughput == pytest.approx(1.5)
    assert summary.output_throughput == pytest.approx(3.0)
    assert summary.total_token_throughput == pytest.approx(153.0)
    assert summary.request_goodput == pytest.approx(0.5)
    assert summary.goodput_share == pytest.approx(0.25)


# ---------------------------------------------------------------- against a fake server

Answer = Callable[[web.Request, web.StreamResponse, dict[str, Any]], Awaitable[None]]


class FakeServer:
    """Answers as `answer` says; remembers request bodies and when they came."""

    def __init__(self) -> None:
        self.answer: Answer = steady
        self.status = 200
        self.seen: list[dict[str, Any]] = []
        self.running = self.peak = 0
        self.url = ""
        self.window: int | None = None  # tokens; it says and keeps it

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        body = await request.json()
        self.seen.append(body)
        if self.window is not None:
            wanted = len(body["prompt"]) + body["max_tokens"]
            if wanted > self.window:
                said = f"{wanted} tokens do not fit the window of {self.window}"
                return web.json_response({"error": {"message": said}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await self.answer(request, response, body)
        finally:
            self.running -= 1
        return response


async def emit(response: web.StreamResponse, event: dict[str, Any] | str) -> None:
    data = event if isinstance(event, str) else json.dumps(event)
    await response.write(f"data: {data}\n\n".encode())


def choice(body: dict[str, Any], text: str, finish: str | None = None) -> dict[str, Any]:
    content = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return {"choices": [{"index": 0, **content, "finish_reason": finish}]}


async def close(response: web.StreamResponse, body: dict[str, Any], tokens: int) -> None:
    await emit(response, choice(body, "", "length"))
    usage = {
        "prompt_tokens": 11,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    await emit(response, {"choices": [], "usage": usage})
    await emit(response, "[DONE]")


async def steady(request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
    """A role, 60 ms of prefill, then `max_tokens` tokens 20 ms apart, two in each chunk."""
    await emit(response, choice(body, ""))
    await asyncio.sleep(0.06)
    chunks = body["max_tokens"] // 2
    for i in range(chunks):
        await emit(response, choice(body, "two tokens "))
        await asyncio.sleep(0.04 if i < chunks - 1 else 0)
    await close(response, body, 2 * chunks)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.handle)
    app.router.add_post("/v1/chat/completions", fake.handle)

    async def models(request: web.Request) -> web.Response:
        card = {"id": "fake"} | ({"max_model_len": fake.window} if fake.window else {})
        return web.json_response({"object": "list", "data": [card, {"id": "other"}]})

    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=1024) as session:
        yield session


def client(server: FakeServer, session: aiohttp.ClientSession, chat: bool = False) -> Client:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Client(session, server.url + path, chat, {"model": "fake"})


PROMPT = Prompt([70, 71], 2, 6)


@pytest.mark.parametrize("chat", [False, True])
async def test_timings_of_a_known_stream(
    server: FakeServer, session: aiohttp.ClientSession, chat: bool
) -> None:
    prompt = Prompt("two words", 2, 6) if chat else PROMPT
    timing = measure(await client(server, session, chat).send(prompt))
    assert (timing.prompt_tokens, timing.completion_tokens, timing.cached_tokens) == (11, 6, 4)
    assert 55 < timing.ttft < 60_000  # not the role chunk, which comes at once
    assert len(timing.itl) == 4 and len(timing.gap) == 2
    assert 0 < sum(timing.itl) < 60_000  # a late client reads several chunks at once
    assert timing.tpot is not None and 0 < timing.tpot < 12_000
    assert timing.e2el == timing.e2el_sent > 130
    body = server.seen[0]
    assert body["stream_options"] == {"include_usage": True} and body["max_tokens"] == 6
    assert ("messages" in body) is chat and ("prompt" in body) is not chat


async def test_token_ids_in_chunks_are_counted(
    server: FakeServer, session: aiohttp.ClientSession
) -> None:
    async def answer(_: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        event = choice(body, "x")
        event["choices"][0]["token_ids"] = [1, 2, 3]
        await emit(response, event)
        await emit(response, choice(body, "", "stop"))
        await emit(response, "[DONE]")

    server.answer = answer
    timing = measure(await client(server, session).send(PROMPT))
    assert timing.completion_tokens == 3 and timing.estimated


async def send_and_kind(server: FakeServer, session: aiohttp.ClientSession) -> str | None:
    return (await client(server, session).send(PROMPT)).error


async def test_http_errors_are_kinds(server: FakeServer, session: aiohttp.ClientSession) -> None:
    server.status = 429
    assert await send_and_kind(server, session) == "http_429"


async def _error_event(_: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
    await emit(response, choice(body, "a"))
    await emit(response, {"error": {"message": "m", "code": "NODE_FAILED"}})
    await emit(response, "[DONE]")


async def _at_once(_: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
    await close(response, body, body["max_tokens"])


async def _plain_frame(_: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
    await emit(response, "oops")


async def _endless_line(_: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
    await response.write(b"data: " + b"x" * 10_000)


async def _clean_cut(_: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
    await emit(response, choice(body, "a"))


async def _no_finish(_: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
    await emit(response, choice(body, "a"))
    await emit(response, "[DONE]")


async def _reset(request: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
    await emit(response, choice(body, "a"))
    request.transport.abort()


async def _silence(_: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
    await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (_error_event, "stream_NODE_FAILED"),
        (_plain_frame, "malformed"),
        (_endless_line, "malformed"),
        (_clean_cut, "truncated"),
        (_no_finish, "truncated"),
        (_reset, "disconnected"),
    ],
)
async def test_broken_streams_are_kinds(
    server: FakeServer, session: aiohttp.ClientSession, answer: Answer, kind: str
) -> None:
    server.answer = answer
    assert await send_and_kind(server, session) == kind


async def test_timeouts_and_refusals_are_kinds(server: FakeServer) -> None:
    server.answer = _silence
    timeout = aiohttp.ClientTimeout(total=0.1)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        assert await send_and_kind(server, session) == "timeout"
    server.url = "http://127.0.0.1:1"
    async with aiohttp.ClientSession() as session:
        assert await send_and_kind(server, session) == "connect"


async def test_open_loop_does_not_wait_for_answers(
    server: FakeServer, session: aiohttp.ClientSession
) -> None:
    everyone = asyncio.Barrier(4)

    async def answer(request: Any, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await everyone.wait()
        await steady(request, response, body)

    server.answer = answer
    offsets = [0.0, 0.02, 0.04, 0.06]
    records = await run_load(client(server, session), [PROMPT] * 4, offsets, None)
    assert [record.error for record in records] == [None] * 4
    assert [r.arrival - records[0].arrival for r in records] == pytest.approx(offsets)
    assert all(record.sent >= record.arrival for record in records)


async def test_a_cap_in_open_loop_counts_the_wait(
    server: FakeServer, session: aiohttp.ClientSession
) -> None:
    records = await run_load(client(server, session), [PROMPT] * 3, [0.0] * 3, 1)
    timings = [measure(r) for r in records]
    assert server.peak == 1
    last = timings[2]
    assert last.delay > 200  # two answers of at least 140 ms went before
    assert last.ttft == pytest.approx(last.delay + last.ttft_sent)
    assert records[0].arrival == records[2].arrival


async def test_closed_loop_keeps_the_cap_full(
    server: FakeServer, session: aiohttp.ClientSession
) -> None:
    done = []
    records = await run_load(client(server, session), [PROMPT] * 6, None, 3, lambda: done.append(1))
    assert len(done) == 6 and server.peak == 3
    assert all(measure(r).delay == 0 for r in records)


# ---------------------------------------------------------------- capacity


@pytest.mark.parametrize("knee", [0.3, 1.0, 5.0, 37.0])
async def test_the_capacity_is_found_from_below(knee: float) -> None:
    async def measure(rate: float) -> float:
        return 1.0 if rate <= knee else 0.5

    capacity, steps = await find_capacity(measure, 1.0, 0.9, 1.1)
    assert knee / 1.1 <= capacity <= knee
    assert len(steps) < 14 and Step(capacity, 1.0) in steps


# ---------------------------------------------------------------- the command


async def test_command_finds_the_capacity(server: FakeServer, tmp_path: Path) -> None:
    """The fake fails at any rate, which no search makes a success."""
    server.answer = _error_event
    path = tmp_path / "r.json"
    argv = [
        *("--base-url", server.url, "--num-prompts", "1", "--request-rate", "1e6", "--json"),
        *("--random-input-len", "5", "--random-output-len", "4", "--save-result", str(path)),
    ]
    never = [*argv, "--slo-ttft-ms", "0.001"]
    assert await asyncio.to_thread(serve.main, never) == 1
    found = json.loads(path.read_text())
    assert found["capacity"] == 0 and len(found["steps"]) == MAX_RUNS
    assert found["slo"] == {"ttft": 0.001}
    prompts = [tuple(body["prompt"]) for body in server.seen]
    assert len(set(prompts)) == len(prompts)  # no prefix cache knows them


def test_two_results_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for number, rate in ((1, 2.0), (2, 3.0)):
        result = {
            "config": {"num_prompts": 10 * number, "seed": 0, "base_url": str(number)},
            "request_throughput": rate, "p99_itl_ms": None, "median_ttft_ms": 0.0,
        }  # fmt: skip
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(result))
    argv = list(map(str, files))
    assert compare.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"] == {
        "request_throughput": {"before": 2.0, "after": 3.0, "ratio": 1.5},
        "median_ttft_ms": {"before": 0.0, "after": 0.0, "ratio": None},
    }
    assert found["options"] == {"num_prompts": [10, 20]}
    assert compare.main(argv) == 0
    assert "1.50" in (out := capsys.readouterr().out) and "differs: num_prompts 10 → 20" in out
    for text in ("no JSON", "[]", "{}"):
        files[1].write_text(text)
        with pytest.raises(ConfigError, match=r"2\.json"):
            compare.main(argv)
    with pytest.raises(ConfigError, match="No such file"):
        compare.main([argv[0], str(tmp_path / "3.json")])


async def test_command_writes_results(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, picture = tmp_path / "r.json", tmp_path / "r.png"
    argv = [
        *("--base-url", server.url, "--num-prompts", "4", "--request-rate", "50"),
        *("--random-input-len", "5", "--random-output-len", "4", "--num-warmups", "2"),
        *("--goodput", "ttft:2000", "tpot:1", "--ignore-eos", "--json"),
        *("--extra-body", '{"top_k": 3}'),
        *("--save-result", str(result), "--plot", str(picture)),
    ]
    assert await asyncio.to_thread(serve.main, argv) == 0
    saved = json.loads(result.read_text())
    assert saved == json.loads(capsys.readouterr().out)
    assert (saved["completed"], saved["failed"]) == (4, 0)
    assert saved["total_output_tokens"] == 16 and saved["request_goodput"] == 0
    assert saved["config"]["num_prompts"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(server.seen) == 6  # warm-ups are sent but not measured
    assert all(b["ignore_eos"] and b["top_k"] == 3 for b in server.seen)
    assert server.seen[0]["model"] == "fake"


def fast(*more: str) -> list[str]:
    return ["--model", "fake", "--num-prompts", "4", "--random-range-ratio", "0.5", *more]


async def test_default_lengths_fit_the_servers_window(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer, server.window = _at_once, 256
    for more in ([], ["--random-output-len", "100"], ["--dataset-name", "prefix_repetition"]):
        server.seen.clear()
        argv = ["--base-url", server.url, *fast(*more)]
        assert await asyncio.to_thread(serve.main, argv) == 0, capsys.readouterr().out
        assert "the server's context is 256 tokens, so: --" in capsys.readouterr().out
        longest = max(len(body["prompt"]) + body["max_tokens"] for body in server.seen)
        assert 100 < longest <= 256
    argv = ["--base-url", server.url, *fast("--json", "--random-prefix-len", "100")]
    assert await asyncio.to_thread(serve.main, argv) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["config"]["random_input_len"] < 100
    assert "the server's context is 256 tokens" in out.err


async def test_the_first_refusals_reasons_are_shown(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The load that is asked for is not made smaller."""
    server.answer, server.window = _at_once, 64
    argv = ["--base-url", server.url, "--model", "fake", "--num-prompts", "2"]
    argv += ["--random-input-len", "80", "--random-output-len", "4"]
    assert await asyncio.to_thread(serve.main, argv) == 1
    out = capsys.readouterr().out
    assert out.count("http_400: 84 tokens do not fit the window of 64") == 1
    assert await asyncio.to_thread(serve.main, [*argv, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["reasons"] == {"http_400": "84 tokens do not fit the window of 64"}
    with pytest.raises(ConfigError, match=r"http_400 .84 tokens do not fit"):
        await asyncio.to_thread(serve.main, [*argv, "--num-warmups", "1"])


@pytest.mark.parametrize(
    ("flags", "window", "lengths"),
    [
        ("", None, (1024, 128)),
        ("", 1152, (1024, 128)),
        ("", 576, (512, 64)),
        ("--random-input-len 500", 576, (500, 76)),
        ("--random-input-len 500 --random-output-len 500", 576, (500, 500)),
        ("--random-input-len 600", 576, (600, 1)),
        ("--random-range-ratio 0.5", 864, (512, 64)),
        ("--random-prefix-len 100", 676, (512, 64)),
        ("--backend openai-chat", 640, (512, 64)),
    ],
)
def test_only_what_is_not_given_gives_way(
    flags: str, window: int | None, lengths: tuple[int, int]
) -> None:
    args = parse_args(flags.split())
    fit_lengths(args, window)
    assert (args.random_input_len, args.random_output_len) == lengths


@pytest.mark.parametrize(
    "argv",
    [
        ["--goodput", "speed:3"],
        ["--goodput", "ttft:-1"],
        ["--request-rate", "0"],
        ["--num-prompts", "0"],
        ["--dataset-name", "trace"],
        ["--backend", "openai-chat", "--prompt-format", "ids"],
        ["--random-range-ratio", "1.5"],
        ["--vocab-size", "10"],
        ["--seed", "-1"],
        ["--extra-body", "[1]"],
        ["--extra-body", "{"],
        ["--save-result", "/nowhere/result.json"],
        ["--plot", "/nowhere/result.png"],
        ["--slo-attainment", "1.5"],
        ["--slo-ttft-ms", "5", "--max-concurrency", "2"],
        ["--slo-ttft-ms", "5", "--request-rate", "inf"],
        ["--slo-ttft-ms", "5", "--goodput", "ttft:5"],
        ["--slo-itl-ms", "5", "--dataset-name", "trace", "--dataset-path", "x"],
    ],
)
def test_options_that_make_no_sense_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(argv)


def test_which_loop_the_options_choose(tmp_path: Path) -> None:
    base = ["--num-prompts", "3", "--random-input-len", "4", "--random-output-len", "4"]
    assert serve.load_prompts(parse_args([*base, "--max-concurrency", "2"]))[1] is None
    _, offsets = serve.load_prompts(
        parse_args([*base, "--max-concurrency", "2", "--request-rate", "5"])
    )
    assert offsets is not None and offsets[2] > 0
    path = tmp_path / "t.jsonl"
    row = TraceRow(0.0, 4, 4, ())
    line = {"input_length": row.input_len, "output_length": row.output_len}
    path.write_text("\n".join(json.dumps({"timestamp": t, **line}) for t in (0, 500, 2000)))
    trace = ["--dataset-name", "trace", "--dataset-path", str(path)]
    assert serve.load_prompts(parse_args(trace))[1] == [0, 0.5, 2.0]
    closed = [*trace, "--request-rate", "inf", "--max-concurrency", "1"]
    assert serve.load_prompts(parse_args(closed))[1] is None
