"""Finds the jobs that a router which has died left at decode nodes (`decode_node/orphans.py`)."""

from __future__ import annotations

import asyncio
from time import monotonic

import grpc

from pdserve.common.core.errors import Conflict
from pdserve.common.core.request import PromptPath
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.router.cluster.registry import Node, Registry

ASK_TIMEOUT = 1.0  # seconds
PATIENCE = (
    3.0  # seconds that a job's router gets to finish it or to be found dead, a node to answer
)
PAUSE = 0.1  # seconds between two looks


class OrphanFinder:
    def __init__(self, registry: Registry, channels: Channels) -> None:
        self._registry = registry
        self._channels = channels

    async def find(self, key: bytes) -> tuple[Node, PromptPath] | None:
        """Returns the node that has the orphan of this key, and how its prompt's KV came there;
        None: none has. Waits while the job has a router, or while a node owes its answer.

        Raises:
            Conflict: a router serves the job.
        """
        until = monotonic() + PATIENCE
        while True:
            nodes = [node for node in self._registry.nodes() if self._may_have(node)]
            answers = await asyncio.gather(*(self._ask(node, key) for node in nodes))
            found = [
                (n, a) for n, a in zip(nodes, answers, strict=True) if a is not None and a.found
            ]
            for node, answer in found:
                if not answer.attached:
                    local = answer.local_prefill
                    return node, PromptPath.LOCAL if local else PromptPath.TRANSFERRED
            late = monotonic() > until
            if not found and (late or None not in answers):
                return None
            if late:
                raise Conflict(
                    "the request of this Idempotency-Key is being served: ask again, or wait for "
                    "its answer",
                    retry_after=1.0,
                )
            await asyncio.sleep(PAUSE)

    def _may_have(self, node: Node) -> bool:
        return node.info.role != pb.ROLE_PREFILL and self._registry.is_alive(node)

    async def _ask(self, node: Node, key: bytes) -> pb.FindOrphanResponse | None:
        """Returns its answer; None: none came in time, and it may have one."""
        stub = pb_grpc.DecodeStub(self._channels.get(node.info.address))
        nothing = pb.FindOrphanResponse()
        try:
            answer = await stub.FindOrphan(pb.FindOrphanRequest(key=key), timeout=ASK_TIMEOUT)
        except grpc.aio.AioRpcError as error:  # the request finds out why
            return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else nothing
        except grpc.aio.UsageError:
            return nothing
        return nothing if answer is None else answer
