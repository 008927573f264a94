"""Hostile or badly behaved clients: each attacks once and records the outcome."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import aiohttp
import grpc

from benchmarks.fleet import HOSTILE, Fleet
from benchmarks.soak.crowd import HUNG, refusal
from benchmarks.soak.faults import Fault, Faults, Kind
from benchmarks.soak.poisoned import TOKEN
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc

ADDRESS = "127.0.0.66"  # their own address, since clients' shares may go by address
PATIENCE = 60.0  # seconds until an attack without an answer counts as hung
LONGEST_SILENCE = 20.0
SMALL = 4096  # bytes of a silent reader's buffer
SEGMENT = 536  # bytes: small ones keep the server's buffer small, too
MB = 1 << 20
TEXT = "/v1/completions"
UNFIT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)  # without a code of ours

Generate = Callable[[pb.GenerateRequest], Any]  # a call of a stream


@dataclass(frozen=True, slots=True)
class Attack:
    """A request, with its name in the report."""

    name: str
    path: str
    body: bytes


@asynccontextmanager
async def http(fleet: Fleet, known: bool = True) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a session that sends the hostile clients' API key, if `known`."""
    headers = fleet.api_key(HOSTILE) if known else {}
    connector = aiohttp.TCPConnector(local_addr=(ADDRESS, 0), limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    url = f"http://127.0.0.1:{fleet.ports['http']}"
    async with aiohttp.ClientSession(
        url, connector=connector, timeout=timeout, headers=headers
    ) as session:
        yield session


@asynccontextmanager
async def calls(
    fleet: Fleet, address: str, trusted: bool = False, name: str = ""
) -> AsyncIterator[grpc.aio.Channel]:
    """Yields a channel with the credentials of a role (`trusted`), or of a stranger, who may be a
    client. `name`: the name expected in the server's certificate, if not the address."""
    credentials = fleet.credentials(role=trusted)
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
    if name:
        options.append(("grpc.ssl_target_name_override", name.rpartition(":")[0]))
    channel = (
        grpc.aio.secure_channel(address, credentials, options)
        if credentials
        else grpc.aio.insecure_channel(address, options)
    )
    async with channel:
        yield channel


@asynccontextmanager
async def rpc(fleet: Fleet) -> AsyncIterator[Generate]:
    """Yields `Inference.Generate` with the hostile clients' API key."""
    key = tuple(fleet.api_key(HOSTILE).items())
    async with calls(fleet, f"127.0.0.1:{fleet.ports['grpc']}") as channel:
        yield partial(pb_grpc.InferenceStub(channel).Generate, metadata=key)


async def answer(attack: Awaitable[str]) -> str:
    """Returns the outcome of an attack in a word or two."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await attack
    except TimeoutError:
        return HUNG
    except grpc.aio.AioRpcError as error:
        return refusal(error) if error.code() in UNFIT else error.code().name
    except (aiohttp.ClientError, OSError):
        return "closed"


# ---- clients that do not read ----


async def silent(faults: Faults, fault: Fault) -> None:
    """Requests long answers without reading them; sends half of a request."""
    attacks = {
        "stream": _unread_stream(faults.fleet, fault.seconds),
        "gRPC stream": _unread_call(faults.fleet, fault.seconds),
        "half a request": _half_a_request(faults.fleet, fault.seconds),
    }
    for name, told in zip(
        attacks, await asyncio.gather(*map(answer, attacks.values())), strict=True
    ):
        faults.answers["silent", f"{name}: {told}"] += 1


async def _unread_stream(fleet: Fleet, seconds: float) -> str:
    body = {"prompt": [5] * 20, "max_tokens": 200, "n": 8, "logprobs": 20, "stream": True}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    key = "".join(f"{name}: {value}\r\n" for name, value in fleet.api_key(HOSTILE).items())
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{key}"
    return await _unread(
        fleet, seconds, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    )


async def _half_a_request(fleet: Fleet, seconds: float) -> str:
    return await _unread(fleet, seconds, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConte")


async def _unread(fleet: Fleet, seconds: float, data: bytes) -> str:
    """Returns who ended the connection: the server, or this client after reading at last."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
        client.bind((ADDRESS, 0))
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", fleet.ports["http"]))
        await loop.sock_sendall(client, data)
        await asyncio.sleep(seconds)
        try:
            async with asyncio.timeout(1):
                while await loop.sock_recv(client, MB):
                    pass
        except TimeoutError:
            return "left by the client"
        except ConnectionError:
            pass
        return "ended by the server"


async def _unread_call(fleet: Fleet, seconds: float) -> str:
    sampling = pb.SamplingParams(max_tokens=200, n=8, logprobs=20, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 20), sampling=sampling)
    async with rpc(fleet) as generate:
        call = generate(request)
        await call.read()
        await asyncio.sleep(seconds)
        told = (await call.code()).name if call.done() else "left by the client"
        call.cancel()
    return told


# ---- clients that hang up ----


async def hang_up(faults: Faults, fault: Fault) -> None:
    """Four clients disconnect during prefill, during the KV transfer, or while streaming."""
    rng = fault.random
    ways = [rng.choice((_leave_in_transfer, _leave_in_stream, _leave_call)) for _ in range(4)]
    told = await asyncio.gather(*(answer(way(faults.fleet, rng)) for way in ways))
    faults.answers.update(("hang-up", each) for each in told)


def _long_prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, TOKEN) for _ in range(rng.randint(200, 700))]


async def _leave_in_transfer(fleet: Fleet, rng: random.Random) -> str:
    body = {"prompt": _long_prompt(rng), "max_tokens": 50, "ignore_eos": True}
    async with http(fleet) as session:
        try:
            async with asyncio.timeout(rng.uniform(0, 1)):
                async with session.post(TEXT, json=body) as response:
                    return f"HTTP {response.status} before it left"
        except TimeoutError:
            return "left before the answer"


async def _leave_in_stream(fleet: Fleet, rng: random.Random) -> str:
    body = {"prompt": _long_prompt(rng), "max_tokens": 50, "ignore_eos": True, "stream": True}
    async with http(fleet) as session, session.post(TEXT, json=body) as response:
        for _ in range(rng.randint(1, 20)):  # lines; the KV may still be on its way
            await response.content.readline()
        response.close()
        return f"HTTP {response.status}, left in the stream"


async def _leave_call(fleet: Fleet, rng: random.Random) -> str:
    sampling = pb.SamplingParams(max_tokens=50, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=_long_prompt(rng)), sampling=sampling)
    async with rpc(fleet) as generate:
        call = generate(request)
        for _ in range(rng.randint(1, 5)):
            await call.read()
        call.cancel()
    return "gRPC, left in the stream"


# ---- huge bodies ----


@cache
def _huge() -> list[Attack]:
    def prompt(name: str, value: bytes, more: bytes = b"") -> Attack:
        return Attack(name, TEXT, b'{"max_tokens": 1, "prompt": ' + value + more + b"}")

    chat = b'{"max_tokens": 1, "messages": [{"role": "user", "content": "'
    return [
        prompt("30 MB of text", b'"' + b"once upon " * (3 * MB) + b'"'),
        prompt("3 MB of text", b'"' + b"once upon " * (MB // 3) + b'"'),
        prompt("7 million one-token lists", b"[" + b"[5]," * (7 * MB) + b"[5]]"),
        prompt("10 million tokens", b"[" + b"5, " * (10 * MB) + b"5]"),
        prompt("1,024 prompts of 128 choices", b"[" + b"[5]," * 1023 + b"[5]]", b', "n": 128'),
        prompt("a million brackets", b"[" * MB + b"]" * MB),
        prompt("more than the bound", b'"' + b"x" * (40 * MB) + b'"'),
        Attack("a 30 MB message", "/v1/chat/completions", chat + b"a" * (30 * MB) + b'"}]}'),
        Attack("30 MB to tokenize", "/tokenize", b'{"prompt": "' + b"word " * (6 * MB) + b'"}'),
    ]


async def huge(faults: Faults, fault: Fault) -> None:
    attack = fault.random.choice(_huge())
    async with http(faults.fleet) as session:
        told = await answer(_post(session, attack))
    faults.answers["huge", f"{attack.name}: {told}"] += 1


async def _post(session: aiohttp.ClientSession, attack: Attack) -> str:
    headers = {"Content-Type": "application/json"}
    async with session.post(attack.path, data=io.BytesIO(attack.body), headers=headers) as response:
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
    {"prompt": [7, 8, TOKEN, 9]},
    {"logit_bias": {TOKEN: 100.0}, "ignore_eos": True},
)


async def poison(faults: Faults, fault: Fault) -> None:
    """Sends eight requests with extreme parameters, and one that no node can compute, over HTTP and
    gRPC."""
    rng = fault.random
    async with http(faults.fleet) as session, rpc(faults.fleet) as generate:
        attacks = {
            "parameters": [_poison(session, generate, _parameters(rng), rng) for _ in range(8)],
            "a row that fails": [_poison(session, generate, dict(rng.choice(ROWS)), rng)],
        }
        for name, each in attacks.items():
            for told in await asyncio.gather(*map(answer, each)):
                faults.answers["poison", f"{name}: {told}"] += 1


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
    rng: random.Random,
) -> str:
    prompt = parameters.pop("prompt", [5, 6, 7] * 10)
    if rng.random() < 0.5:
        body = json.dumps({"prompt": prompt, "max_tokens": 8, **parameters}).encode()
        return f"HTTP {await _post(session, Attack('', TEXT, body))}"
    try:
        sampling = pb.SamplingParams(max_tokens=8, **parameters)
    except ValueError:
        return "cannot be expressed over gRPC"
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
    async for _ in generate(request):
        pass
    return "gRPC OK"


HOSTILE_KINDS: dict[str, Kind] = {
    "silent": Kind(silent, ("client",), LONGEST_SILENCE),
    "hang-up": Kind(hang_up, ("client",)),
    "huge": Kind(huge, ("client",)),
    "poison": Kind(poison, ("client",)),
}
