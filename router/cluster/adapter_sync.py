"""Sends the served adapters to nodes: all of them to each node, when it registers and after each
change, until the node has them. A client's new adapter is served once every node has it."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn, TypeVar

import grpc

from pdserve.common.config.lora import LoRAConfig
from pdserve.common.core.errors import (
    Blame,
    ConfigError,
    InvalidRequest,
    NodeError,
    PdserveError,
    Unavailable,
)
from pdserve.common.core.lora import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from pdserve.common.core.printable import MAX_PEER_TEXT, printable
from pdserve.common.core.request import is_plain_id
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import from_rpc_error
from pdserve.router.cluster.adapters import Adapter, ServedAdapters
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.node_client import protocol_error
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.served_model import ServedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")

SET_TIMEOUT = 120.0  # seconds a node may take to read its adapters
RETRY = 5.0  # seconds until another try after a node failed


class AdapterSync:
    """Has all nodes load the served adapters; `keep` must run as long as the router does."""

    def __init__(
        self,
        config: LoRAConfig,
        folder: str | None,
        model: ServedModel,
        adapters: ServedAdapters,
        registry: Registry,
        channels: Channels,
    ) -> None:
        """`folder` is --runtime-lora-dir: clients may load adapters in it."""
        self._config = config
        self._folder = Path(folder or ".").resolve()
        self._model = model
        self._adapters = adapters
        self._registry = registry
        self._channels = channels
        self._loading = asyncio.Lock()  # one adapter at a time
        self._work: asyncio.Task[Adapter] | None = None
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by node
        # By node: time, wanted digests and reason of its last failure.
        self._failed: dict[str, tuple[float, frozenset[str], str]] = {}

    # ---- for clients -------------------------------------------------------------------------

    async def load(self, name: str, path: str, in_place: bool) -> Adapter:
        """Loads an adapter on every node. Once begun, loading continues even if the client leaves.

        Raises:
            InvalidRequest: the adapter cannot be served, here or on a node; nothing has changed.
            Unavailable: running requests still use the adapters in its place, or no node answers.
                If only some nodes do not answer, they load it later.
        """
        await self._loading.acquire()
        self._work = asyncio.create_task(self._load(name, path, in_place))
        self._work.add_done_callback(lambda _: self._loading.release())
        return await asyncio.shield(self._work)

    async def _load(self, name: str, path: str, in_place: bool) -> Adapter:
        self._check_name(name, in_place)
        adapter = await asyncio.to_thread(self._read, name, path)
        wanted = self._adapters.wanted()
        if adapter.digest not in wanted and len(wanted) >= self._config.max_loras:
            self._refuse_one_more()
        await self._load_everywhere(adapter)
        self._adapters.add(adapter)
        self._registry.notify()
        logger.info("serving adapter %s: %s from %s", name, adapter.digest, adapter.path)
        return adapter

    def _refuse_one_more(self) -> NoReturn:
        limit = self._config.max_loras
        if len({each.digest for each in self._adapters.served()}) < limit:
            raise _in_use(
                f"requests still use unloaded adapters; with them there are {limit}, as many as "
                "--max-loras allows"
            )
        raise InvalidRequest(
            f"{limit} adapters are loaded, as many as --max-loras allows: unload one (it goes when "
            "its last request has ended)"
        )

    def unload(self, name: str) -> None:
        """Requests in flight keep the adapter.

        Raises:
            ModelNotFound: there is no adapter of that name.
        """
        self._adapters.remove(name)
        logger.info("unloaded adapter %s", printable(name, 128))

    def _check_name(self, name: str, in_place: bool) -> None:
        if not is_plain_id(name):
            raise InvalidRequest(
                "lora_name must be 1 to 128 characters of ASCII, without spaces", param="lora_name"
            )
        if name in self._model.names:
            raise InvalidRequest("the model itself has this name", param="lora_name")
        if self._adapters.find(name) and not in_place:
            raise InvalidRequest(
                f"the adapter `{name}` is loaded already; load_inplace: true replaces it",
                param="lora_name",
            )

    def _read(self, name: str, given: str) -> Adapter:
        path = self._folder
        try:
            path = (path / given).resolve()
            if path == self._folder or not path.is_relative_to(self._folder):
                raise ConfigError("must be inside the folder of --runtime-lora-dir")
            for each in (CONFIG_FILE, WEIGHTS_FILE):
                if not (path / each).resolve().is_relative_to(self._folder):
                    raise ConfigError(f"{each} is a link out of the folder of --runtime-lora-dir")
            file = read_adapter(path, self._model.native, self._config.max_lora_rank)
        except ConfigError as error:
            message = error.message.replace(str(path), given)
            raise InvalidRequest(f"lora_path: {message}", param="lora_path") from error
        except (OSError, ValueError, RuntimeError) as error:  # no path at all, or links in a circle
            raise InvalidRequest("lora_path is no path of a folder", param="lora_path") from error
        return Adapter(name, str(path), file.digest)

    async def _load_everywhere(self, adapter: Adapter) -> None:
        nodes = [
            node
            for node in self._registry.nodes()
            if node.info.takes_adapters and self._registry.is_alive(node)
        ]
        if not nodes:
            raise Unavailable("no node takes adapters", code="NO_NODE", retry_after=2.0)
        failures = await asyncio.gather(*(self._sync(node, adapter) for node in nodes))
        for node, failed in zip(nodes, failures, strict=True):
            if adapter.digest in failed:
                reason = f"{node.id}: {failed[adapter.digest]}"
                # A full node drops adapters that no router wants, unless jobs still use them.
                others = node.adapters - self._adapters.wanted().keys()
                if others and len(node.adapters) >= self._config.max_loras:
                    raise _in_use(reason)
                raise InvalidRequest(reason, param="lora_path")
        if not any(adapter.digest in node.adapters for node in nodes):
            reasons = (
                f"{node.id}: {failed.get('')}" for node, failed in zip(nodes, failures, strict=True)
            )
            raise Unavailable("; ".join(reasons), code="NO_NODE", retry_after=2.0)

    # ---- for nodes ---------------------------------------------------------------------------

    async def keep(self) -> None:
        """Sends adapters to nodes that register, or that failed before; never returns."""
        sending: dict[str, asyncio.Task[object]] = {}
        try:
            await self._keep(sending)
        finally:
            for task in sending.values():
                task.cancel()
            if self._work is not None:
                self._work.cancel()

    async def _keep(self, sending: dict[str, asyncio.Task[object]]) -> None:
        while True:
            for node_id in [node_id for node_id, task in sending.items() if task.done()]:
                sending.pop(node_id).result()
            for node in self._registry.nodes():
                if node.id not in sending and self._lacks(node):
                    sending[node.id] = asyncio.create_task(self._sync(node))
            present = {node.id for node in self._registry.nodes()}
            for node_id in (self._failed.keys() | self._asking.keys()) - present - sending.keys():
                self._failed.pop(node_id, None)
                self._asking.pop(node_id, None)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY):
                    await self._registry.wait_for_change()

    def _lacks(self, node: Node) -> bool:
        wanted = self._adapters.wanted().keys()
        if not node.info.takes_adapters or not self._registry.is_alive(node):
            return False
        if wanted <= node.adapters:
            return False
        when, what, _ = self._failed.get(node.id, (-RETRY, frozenset(), ""))
        return what != wanted or monotonic() - when >= RETRY

    async def _sync(self, node: Node, new: Adapter | None = None) -> dict[str, str]:
        """Sends a node the wanted adapters and the `new` one. Returns the reasons, by digest, why
        it lacks some; an empty digest stands for all."""
        async with self._asking[node.id]:
            wanted = self._adapters.wanted()
            if new is not None:
                wanted[new.digest] = new.path
            failures: dict[str, str] = {}
            try:
                if not self._registry.is_alive(node):  # it may have died while this waited
                    raise NodeError("it does not answer", code="PEER_SILENT")
                response = await _unless_lost(node, self._ask(node, wanted))
                node.adapters = frozenset(response.digests)
                failures = {
                    digest: printable(reason, MAX_PEER_TEXT)
                    for digest, reason in response.failures.items()
                    if digest in wanted
                }
            except PdserveError as error:
                failures[""] = error.message
            if not failures and wanted.keys() - node.adapters:
                failures[""] = "it does not have all adapters that it was sent"
            self._note(node, frozenset(wanted), failures)
        self._registry.notify()
        return failures

    def _note(self, node: Node, wanted: frozenset[str], failures: dict[str, str]) -> None:
        if not failures:
            self._failed.pop(node.id, None)
            return
        reason = "; ".join(failures.values())
        if reason != self._failed.get(node.id, (0, wanted, ""))[2]:
            logger.warning("%s lacks adapters: %s", node.id, reason)
        self._failed[node.id] = monotonic(), wanted, reason

    async def _ask(self, node: Node, wanted: dict[str, str]) -> pb.SetAdaptersResponse:
        stub = pb_grpc.AdaptersStub(self._channels.get(node.info.address))
        adapters = [pb.Adapter(digest=digest, path=path) for digest, path in wanted.items()]
        try:
            response: pb.SetAdaptersResponse | None = await stub.Set(
                pb.SetAdaptersRequest(adapters=adapters), timeout=SET_TIMEOUT
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, Blame(node.role)) from None
        except grpc.aio.UsageError as error:  # a closed channel
            raise NodeError(str(error), code="UNREACHABLE", blame=Blame(node.role)) from None
        if response is None:
            raise protocol_error(node.role, "the answer to Set does not parse")
        return response


def _in_use(reason: str) -> Unavailable:
    return Unavailable(reason, code="ADAPTERS_IN_USE", retry_after=2.0)


async def _unless_lost(node: Node, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; raises PdserveError as `work` does, or when the node is lost: a host that
    stands still breaks no connection."""
    task = asyncio.ensure_future(work)
    lost: list[PdserveError] = []

    def end(error: PdserveError) -> None:
        lost.append(error)
        task.cancel()

    node.on_lost.add(end)
    try:
        await asyncio.wait((task,))
        if lost:
            raise lost[0]
        if task.cancelled():  # its channel is closed when the node has left
            raise NodeError(f"{node.id} has left", code="PEER_LOST", blame=Blame(node.role))
        return task.result()
    finally:
        node.on_lost.discard(end)
        task.cancel()
