"""The LoRA adapters that are loaded on a node, which jobs may name.

An adapter that no router wants any more stays loaded until its place is needed. So routers that
want different adapters do not unload each other's, and one that is wanted again is still loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc

from pdserve.common.config.lora import LoRAConfig
from pdserve.common.core.errors import Blame, ConfigError, NodeError, PdserveError
from pdserve.common.core.lora import read_adapter
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.engine.messages import (
    LOADED,
    AdapterCall,
    DropAdapter,
    LoadAdapter,
    encode_adapter_call,
)
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import serving

logger = logging.getLogger(__name__)

POLL = 0.02  # seconds between two checks that an adapter is loaded
TIMEOUT = 100.0  # seconds a rank may take to load or drop an adapter
PATIENCE = 5.0  # seconds to wait until jobs no longer use an unwanted adapter

CallRank = Callable[[bytes], Awaitable[bytes]]


class NodeAdapters:
    """Loads and drops adapters on all ranks; call `start` once these run."""

    def __init__(self, config: LoRAConfig, spec: ModelSpec, blame: Blame) -> None:
        """Raises ConfigError when one of --lora-modules cannot be served."""
        self.enabled = config.enable_lora
        self._max_loras = config.max_loras
        self._blame = blame
        self._modules = {
            read_adapter(path, spec, config.max_lora_rank).digest: path
            for path in config.modules.values()
        }
        self.present: list[str] = []  # digests, the least recently wanted first
        self._users: dict[object, str] = {}  # digests by job
        self._given_back = asyncio.Event()
        self._ranks: Sequence[CallRank] = ()  # of all replicas
        self._changing = asyncio.Lock()

    async def start(self, ranks: Sequence[CallRank]) -> None:
        """Loads --lora-modules.

        Raises:
            PdserveError: a rank cannot load one; ConfigError if it never could.
        """
        self._ranks = ranks
        for digest, path in self._modules.items():
            await self._load(digest, path)

    def check(self, digest: str) -> None:
        """Raises NodeError when this adapter is not loaded here."""
        if digest and digest not in self.present:
            raise NodeError(
                f"adapter {digest[:32]} is not loaded on this node",
                code="ADAPTER_NOT_LOADED",
                blame=self._blame,
            )

    def take(self, user: object, digest: str) -> None:
        """Keeps the adapter loaded until the user's `give_back`."""
        if digest:
            self._users[user] = digest

    def give_back(self, user: object) -> None:
        if self._users.pop(user, None):
            self._given_back.set()

    async def set(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """Loads the `wanted` adapters, folders by digest; returns the reason for each that it could
        not load."""
        failures: dict[str, str] = {}
        async with self._changing:
            here = [digest for digest in self.present if digest in wanted]
            self.present = [digest for digest in self.present if digest not in wanted] + here
            for digest in [digest for digest in wanted if digest not in here]:
                try:
                    await self._make_room(wanted)
                    await self._load(digest, wanted[digest])
                except PdserveError as error:
                    failures[digest] = error.message
        return failures

    async def _make_room(self, wanted: Collection[str]) -> None:
        """Makes room for one more: drops the oldest that is not `wanted` once no job uses it.

        Raises:
            ConfigError: there is none to drop.
        """
        end = asyncio.get_running_loop().time() + PATIENCE
        while len(self.present) >= self._max_loras:
            others = [digest for digest in self.present if digest not in wanted]
            idle = [digest for digest in others if digest not in self._users.values()]
            if idle:
                self.present.remove(idle[0])
                await self._call(DropAdapter(idle[0]))
                logger.info("adapter %s dropped", idle[0])
                continue
            self._given_back.clear()
            try:
                async with asyncio.timeout_at(end if others else 0.0):
                    await self._given_back.wait()
            except TimeoutError:
                raise ConfigError(
                    f"{self._max_loras} adapters are in use, as many as --max-loras allows"
                ) from None

    async def _load(self, digest: str, path: str) -> None:
        try:
            await self._call(LoadAdapter(digest, path))
        except PdserveError:
            with suppress(PdserveError):
                await self._call(DropAdapter(digest))
            raise
        self.present.append(digest)
        logger.info("adapter %s loaded from %s", digest, path)

    async def _call(self, call: AdapterCall) -> None:
        """Calls all ranks, even if one fails; raises the first error."""
        message = encode_adapter_call(call)

        async def done(rank: CallRank) -> None:
            try:
                async with asyncio.timeout(TIMEOUT):
                    while await rank(message) != LOADED and isinstance(call, LoadAdapter):
                        await asyncio.sleep(POLL)
            except TimeoutError:
                raise NodeError(
                    f"adapter {call.digest}: a rank was not done with it after {TIMEOUT:.0f} s",
                    blame=self._blame,
                ) from None

        answers = await asyncio.gather(*map(done, self._ranks), return_exceptions=True)
        for error in filter(None, answers):
            raise error


class AdaptersService(pb_grpc.AdaptersServicer):
    """Loads the adapters that routers ask for."""

    def __init__(
        self,
        adapters: NodeAdapters,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        announce: Callable[[], None],
        blame: Blame,
    ) -> None:
        """Calls `announce` when the loaded adapters have changed."""
        self._adapters = adapters
        self._spawn = spawn
        self._announce = announce
        self._blame = blame

    async def Set(
        self, request: pb.SetAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetAdaptersResponse:
        async with serving(context, self._blame):
            response = pb.SetAdaptersResponse()
            # A router that cancels the call must not leave ranks with different adapters.
            await asyncio.shield(self._spawn(self._set(request, response)))
        return response

    async def _set(self, request: pb.SetAdaptersRequest, response: pb.SetAdaptersResponse) -> None:
        failures = await self._adapters.set({each.digest: each.path for each in request.adapters})
        self._announce()
        response.digests.extend(self._adapters.present)
        response.failures.update(failures)
