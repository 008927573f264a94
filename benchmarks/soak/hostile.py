"""Hostile or badly behaved clients: each attacks once and tells the outcome."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import aiohttp

from benchmarks.access import HOSTILE, Access
from benchmarks.soak.asks import POISON
from benchmarks.soak.attack import Attack, Hostile, Wait, calls
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc

ADDRESS = "127.0.0.66"  # their own address, since clients' shares may go by address
LONGEST_SILENCE = 20.0
SMALL = 4096  # bytes of a silent reader's buffer
SEGMENT = 536  # bytes: small ones keep the server's buffer small, too
MB = 1 << 20
TEXT = "/v1/completions"

Generate = Callable[[pb.GenerateRequest], Any]  # a call of a stream


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request, with its name in the report."""

    name: str
    path: str
    data: bytes


@asynccontextmanager
async def http(fleet: Access, known: bool = True) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a session that sends the hostile clients' API key, if `known`."""
    headers = fleet.api_key(HOSTILE) if known else {}
    connector = aiohttp.TCPConnector(local_addr=(ADDRESS, 0), limit=0)
    url, endless = f"http://127.0.0.1:{fleet.ports['http']}", aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        url, connector=connector, timeout=endless, headers=headers
    ) as session:
        yield session


@asynccontextmanager
async def rpc(fleet: Access) -> AsyncIterator[Generate]:
    """Yields `Inference.Generate` with the hostile clients' API key."""
    key = tuple(fleet.api_key(HOSTILE).items())
    async with calls(fleet, f"127.0.0.1:{fleet.ports['grpc']}") as channel:
        yield partial(pb_grpc.InferenceStub(channel).Generate, metadata=key)


def named(wait: Wait) -> dict[str, str]:
    """Returns the header with the request's id."""
    return {"X-Request-Id": wait.request_id}


# ---- clients that do not read ----


async def silent(attack: Attack) -> None:
    """Requests long answers without reading them; sends half of a request."""
    await asyncio.gather(
        attack.ask("stream", partial(_unread_stream, attack)),
        attack.call("gRPC stream", partial(_unread_call, attack)),
        attack.ask("half a request", partial(_half_a_request, attack)),
    )


async def _unread_stream(attack: Attack, wait: Wait) -> str:
    body = {"prompt": [5] * 20, "max_tokens": 200, "n": 8, "logprobs": 20, "stream": True}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    headers = attack.fleet.api_key(HOSTILE) | named(wait)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{lines}"
    return await _unread(attack, wait, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


async def _half_a_request(attack: Attack, wait: Wait) -> str:
    return await _unread(attack, wait, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConte")


async def _unread(attack: Attack, wait: Wait, data: bytes) -> str:
    """Returns who ended the connection: the server, or this client after reading at last."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
        client.bind((ADDRESS, 0))
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", attack.fleet.ports["http"]))
        await loop.sock_sendall(client, data)
        await wait.rest(attack.seconds)
        try:
            async with asyncio.timeout(1):
                while await loop.sock_recv(client, MB):
                    pass
        except TimeoutError:
            return "left by the client"
        except ConnectionError:
            pass
        return "ended by the server"


async def _unread_call(attack: Attack, wait: Wait) -> str:
    sampling = pb.SamplingParams(max_tokens=200, n=8, logprobs=20, ignore_eos=True)
    ids = pb.TokenIds(ids=[5] * 20)
    request = pb.GenerateRequest(token_ids=ids, sampling=sampling, request_id=wait.request_id)
    async with rpc(attack.fleet) as generate:
        call = generate(request)
        await call.read()
        await wait.rest(attack.seconds)
        told = (await call.code()).name if call.done() else "left by the client"
        call.cancel()
    return told


# ---- clients that hang up ----


async def hang_up(attack: Attack) -> None:
    """Four clients disconnect during prefill, during the KV transfer, or while streaming."""
    rng = attack.random
    ways = [rng.choice((_leave_in_transfer, _leave_in_stream, _leave_call)) for _ in range(4)]
    await asyncio.gather(
        *(
            (attack.call if way is _leave_call else attack.ask)("", partial(way, attack))
            for way in ways
        )
    )


def _long_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, POISON) for _ in range(rng.randint(200, 700))]


async def _leave_in_transfer(attack: Attack, wait: Wait) -> str:
    body = {"prompt": _long_prompt(attack.random), "max_tokens": 50, "ignore_eos": True}
    async with http(attack.fleet) as session:
        try:
            async with asyncio.timeout(attack.random.uniform(0, 1)):
                async with session.post(TEXT, json=body, headers=named(wait)) as response:
                    return f"HTTP {response.status} before it left"
        except TimeoutError:
            return "left before the answer"


async def _leave_in_stream(attack: Attack, wait: Wait) -> str:
    prompt, lines = _long_prompt(attack.random), attack.random.randint(1, 20)
    body = {"prompt": prompt, "max_tokens": 50, "ignore_eos": True, "stream": True}
    async with (
        http(attack.fleet) as session,
        session.post(TEXT, json=body, headers=named(wait)) as response,
    ):
        for _ in range(lines):  # the KV may still be on its way
            await response.content.readline()
            wait.moved()
        response.close()
        return f"HTTP {response.status}, left in the stream"


async def _leave_call(attack: Attack, wait: Wait) -> str:
    sampling = pb.SamplingParams(max_tokens=50, ignore_eos=True)
    ids, messages = pb.TokenIds(ids=_long_prompt(attack.random)), attack.random.randint(1, 5)
    request = pb.GenerateRequest(token_ids=ids, sampling=sampling, request_id=wait.request_id)
    async with rpc(attack.fleet) as generate:
        call = generate(request)
        for _ in range(messages):
            await call.read()
            wait.moved()
        call.cancel()
    return "gRPC, left in the stream"


# ---- huge bodies ----


@cache
def _huge() -> list[Body]:
    def prompt(name: str, value: bytes, more: bytes = b"") -> Body:
        return Body(name, TEXT, b'{"max_tokens": 1, "prompt": ' + value + more + b"}")

    chat = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "'
    return [
        prompt("30 MB of text", b'"' + b"once upon " * (3 * MB) + b'"'),
        prompt("3 MB of text", b'"' + b"once upon " * (MB // 3) + b'"'),
        prompt("7 million one-token lists", b"[" + b"[5]," * (7 * MB) + b"[5]]"),
        prompt("10 million tokens", b"[" + b"5, " * (10 * MB) + b"5]"),
        prompt("1,024 prompts of 128 choices", b"[" + b"[5]," * 1023 + b"[5]]", b', "n": 128'),
        prompt("a million brackets", b"[" * MB + b"]" * MB),
        prompt("more than the bound", b'"' + b"x" * (40 * MB) + b'"'),
        Body("a 30 MB message", "/v1/chat/completions", chat + b"a" * (30 * MB) + b'"}]}'),
        Body("30 MB to tokenize", "/tokenize", b'{"prompt": "' + b"word " * (6 * MB) + b'"}'),
    ]


async def huge(attack: Attack) -> None:
    body = attack.random.choice(_huge())
    async with http(attack.fleet) as session:
        await attack.ask(body.name, partial(_post, session, body))


async def _post(session: aiohttp.ClientSession, body: Body, wait: Wait) -> str:
    headers = {"Content-Type": "application/json", **named(wait)}
    async with session.post(body.path, data=io.BytesIO(body.data), headers=headers) as response:
        await response.read()
        return str(response.status)


# ---- poison ----

EXTREME = (0.0, -0.0, 1e-45, 1e-39, 1e-30, 0.5, 1.0, 9.0, 1e30, 3.4e38, -1.0, math.inf, math.nan)
WHOLE = (0, 1, 2, 20, 511, 512, 2**31 - 1, 2**31, 2**32 - 1)
KNOWN = (  # each of these has crashed a node before
    {"repetition_penalty": 1e-39},
    {"repetition_penalty": 1e-45, "temperature": 1.0},
    {"repetition_penalty": 1e-39, "logit_bias": {5: 100.0}},
    {"repetition_penalty": 1e-39, "temperature": 1.0, "min_p": 9.0},
)
FLOATS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
WHOLES = ("top_k", "seed", "min_tokens", "logprobs", "n")


ROWS: tuple[dict[str, Any], ...] = (  # fails on a prefill node; fails on a decode node
    {"prompt": [7, 8, POISON, 9]},
    {"logit_bias": {POISON: 100.0}, "ignore_eos": True},
)


async def poison(attack: Attack) -> None:
    """Sends eight requests with extreme parameters, and one that no node can compute, over HTTP and
    gRPC."""
    rng = attack.random
    async with http(attack.fleet) as session, rpc(attack.fleet) as generate:
        send = partial(_poison, session, generate)
        bodies = [("parameters", _parameters(rng)) for _ in range(8)]
        bodies.append(("a row that fails", dict(rng.choice(ROWS))))
        ways = [(rng.random() < 0.5, *each) for each in bodies]
        await asyncio.gather(
            *(
                (attack.ask if over_http else attack.call)(name, partial(send, body, over_http))
                for over_http, name, body in ways
            )
        )


def _parameters(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return dict(rng.choice(KNOWN))
    found: dict[str, Any] = {name: rng.choice(EXTREME) for name in rng.sample(FLOATS, 2)}
    if rng.random() < 0.5:
        found[rng.choice(WHOLES)] = rng.choice(WHOLE)
    if rng.random() < 0.3:
        found["logit_bias"] = {rng.choice(WHOLE): rng.choice(EXTREME)}
    return found


async def _poison(
    session: aiohttp.ClientSession,
    generate: Generate,
    parameters: dict[str, Any],
    over_http: bool,
    wait: Wait,
) -> str:
    prompt = parameters.pop("prompt", [5, 6, 7] * 10)
    if over_http:
        body = json.dumps({"prompt": prompt, "max_tokens": 8, **parameters}).encode()
        return f"HTTP {await _post(session, Body('', TEXT, body), wait)}"
    try:
        sampling = pb.SamplingParams(max_tokens=8, **parameters)
    except ValueError:
        return "cannot be expressed over gRPC"
    ids = pb.TokenIds(ids=prompt)
    async for _ in generate(
        pb.GenerateRequest(token_ids=ids, sampling=sampling, request_id=wait.request_id)
    ):
        wait.moved()
    return "gRPC OK"


HOSTILE_ATTACKS = {
    "silent": Hostile(silent, longest=LONGEST_SILENCE),
    "hang-up": Hostile(hang_up),
    "huge": Hostile(huge),
    "poison": Hostile(poison),
}
