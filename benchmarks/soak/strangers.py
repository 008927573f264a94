"""Impostors: register fake nodes, impersonate others, or call what only the router may."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from benchmarks.access import Access
from benchmarks.fleet import free_port
from benchmarks.soak.attack import Attack, Hostile, Wait, at_grpc, calls, nodes_of
from pdserve.common.rpc.auth import TOKEN_KEY, ClusterKey
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc

ADMITTED = "admitted"  # the outcome of a stranger that a cluster with keys admits: a failure
ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}
ROLE_NAMES = {number: name for name, number in ROLES.items()}
NOWHERE = "10.255.255.1"
THROTTLES = "impossible numbers with the key"
LONGEST_LIE = 10.0  # seconds
FAKES = 4  # fake nodes at a time


class Liar:
    """Talks to the registry like a node; `trusted` ones have the cluster's key, others another
    key."""

    def __init__(self, fleet: Access, channel: grpc.aio.Channel, trusted: bool) -> None:
        self._registry = fleet.registry
        key = fleet.cluster_key
        self._key = key and ClusterKey(key if trusted else "open sesame and let me in")
        self._channel = channel
        self._stub = pb_grpc.RegistryStub(channel)

    async def register(self, info: pb.NodeInfo, **load_values: int) -> None:
        load = pb.NodeLoad(
            free_blocks=10**6,
            total_blocks=10**6,
            most_free_blocks=10**6,
            healthy=True,
            **load_values,
        )
        await self._call("Register", info, pb.RegisterRequest(node=info, load=load))

    async def heartbeat(self, info: pb.NodeInfo) -> None:
        load = pb.NodeLoad(healthy=False, reason="a stranger says so")
        same = {"node_id": info.node_id, "instance": info.instance}
        # Not as a stream: grpc.aio says INTERNAL of a call that ends during a write.
        beats = self._channel.unary_stream("/pdserve.v1.Registry/Heartbeats")(
            pb.HeartbeatRequest(load=load, **same).SerializeToString(),
            metadata=self._signed("Heartbeats", info, b""),
        )
        await beats.read()
        beats.cancel()

    async def deregister(self, info: pb.NodeInfo) -> None:
        same = {"node_id": info.node_id, "instance": info.instance}
        await self._call("Deregister", info, pb.DeregisterRequest(**same))

    async def _call(self, method: str, info: pb.NodeInfo, request: Any) -> None:
        metadata = self._signed(method, info, request.SerializeToString())
        await getattr(self._stub, method)(request, metadata=metadata)

    def _signed(self, method: str, info: pb.NodeInfo, said: bytes) -> list[tuple[str, str]]:
        if not self._key:
            return []
        role, path = ROLE_NAMES[info.role], f"/pdserve.v1.Registry/{method}"
        token = self._key.sign(role, info.node_id, path, self._registry, said)
        return [(TOKEN_KEY, token)]


async def _a_node(fleet: Access, rng: random.Random) -> pb.NodeInfo:
    """Returns the registration of a known node. Raises NotNow."""
    node = rng.choice(await nodes_of(fleet))
    node["role"] = ROLES[node["role"]]
    return ParseDict(node, pb.NodeInfo(), ignore_unknown_fields=True)


def _fake(info: pb.NodeInfo, address: str, rng: random.Random) -> pb.NodeInfo:
    fake = pb.NodeInfo()
    fake.CopyFrom(info)
    fake.node_id, fake.address = f"fake-{rng.getrandbits(32):08x}", address
    fake.instance = fake.node_id
    return fake


Lie = Callable[[Liar, pb.NodeInfo, Attack, Wait], Awaitable[None]]


async def _registers(liar: Liar, info: pb.NodeInfo, attack: Attack, wait: Wait) -> None:
    """Registers nodes that claim to be idle, at an address without a server."""
    rng = attack.random
    host = rng.choice(("127.0.0.1", NOWHERE))
    fakes = [_fake(info, f"{host}:{free_port()}", rng) for _ in range(rng.randint(1, FAKES))]
    await _stay(liar, fakes, attack, wait)


async def _throttles(liar: Liar, info: pb.NodeInfo, attack: Attack, wait: Wait) -> None:
    """Registers a node that claims so many requests of so many other routers that every router
    would be left without a slot, if the numbers counted."""
    fake = _fake(info, f"127.0.0.1:{free_port()}", attack.random)
    await _stay(
        liar, [fake], attack, wait, others=2**32 - 1, routers=2**32 - 1, others_tokens=2**63
    )


async def _stay(
    liar: Liar, fakes: list[pb.NodeInfo], attack: Attack, wait: Wait, **load: int
) -> None:
    for fake in fakes:
        await liar.register(fake, **load)
    await wait.rest(attack.seconds)
    for fake in fakes:
        await liar.deregister(fake)


async def _takes_over(liar: Liar, info: pb.NodeInfo, attack: Attack, wait: Wait) -> None:
    fake = _fake(info, f"127.0.0.1:{free_port()}", attack.random)
    fake.node_id = info.node_id
    await liar.register(fake)


async def _says_it_is_ill(liar: Liar, info: pb.NodeInfo, attack: Attack, wait: Wait) -> None:
    await liar.heartbeat(info)


async def _says_it_leaves(liar: Liar, info: pb.NodeInfo, attack: Attack, wait: Wait) -> None:
    await liar.deregister(info)


def _lies(lie: Lie, trusted: bool) -> Callable[[Attack, str], Awaitable[None]]:
    async def lies(attack: Attack, name: str) -> None:
        fleet = attack.fleet
        info = await _a_node(fleet, attack.random)

        async def ask(wait: Wait) -> str:
            async with calls(fleet, fleet.registry, trusted) as channel:
                await lie(Liar(fleet, channel, trusted), info, attack, wait)
            return "OK" if trusted or fleet.open else ADMITTED

        await attack.ask(name, ask, at_grpc(fleet, fleet.registry))

    return lies


async def _generates(attack: Attack, name: str) -> None:
    """Calls a node directly, past the router."""
    fleet = attack.fleet
    info = await _a_node(fleet, attack.random)
    job = pb.Job(request_id="stranger", prompt_token_ids=[5, 6, 7], choices=[pb.Choice()])

    async def ask(wait: Wait) -> str:
        async with calls(fleet, info.address) as channel:
            if info.role == pb.ROLE_DECODE:
                stub = pb_grpc.DecodeStub(channel)
                events = stub.Events(pb.EventsRequest(stream="stranger"))
                told = await stub.Run(pb.DecodeRequest(job=job, stream="stranger")).code()
                events.cancel()
            else:
                call = pb_grpc.PrefillStub(channel).Run(pb.PrefillRequest(job=job))
                await call.read()
                told = await call.code() if call.done() else None
                call.cancel()
        if told not in (None, grpc.StatusCode.OK):
            return told.name
        return "OK" if fleet.open else ADMITTED

    await attack.ask(name, ask, at_grpc(fleet, info.address))


async def _garbage(attack: Attack, name: str) -> None:
    """Sends bytes that are not gRPC."""
    host, _, port = attack.fleet.registry.rpartition(":")

    async def ask(wait: Wait) -> str:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(attack.random.randbytes(10_000))
        try:
            while await reader.read(1 << 16):
                wait.moved()
        finally:
            writer.close()
        return "closed"

    await attack.ask(name, ask, at_grpc(attack.fleet, attack.fleet.registry))


ATTACKS: dict[str, Callable[[Attack, str], Awaitable[None]]] = {
    "registers": _lies(_registers, trusted=False),
    "takes an id over": _lies(_takes_over, trusted=False),
    "says that a node is ill": _lies(_says_it_is_ill, trusted=False),
    "says that a node leaves": _lies(_says_it_leaves, trusted=False),
    "asks a node": _generates,
    "sends garbage": _garbage,
    "dead nodes with the key": _lies(_registers, trusted=True),
    "takes an id over with the key": _lies(_takes_over, trusted=True),
    THROTTLES: _lies(_throttles, trusted=True),
}


async def stranger(attack: Attack) -> None:
    name = attack.random.choice(list(ATTACKS))
    await ATTACKS[name](attack, name)


async def liar(attack: Attack) -> None:
    await ATTACKS[THROTTLES](attack, THROTTLES)


STRANGER_ATTACKS = {
    "stranger": Hostile(stranger, ("registry",), LONGEST_LIE),
    "liar": Hostile(liar, ("registry",), LONGEST_LIE, weight=0.5),
}
