"""A streaming call to a node, whose every failure is a typed error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.rpc.status import from_rpc_error
from pdserve.router.registry import Node

logger = logging.getLogger(__name__)


class Call:
    """Use as a context manager: leaving it cancels what is still going on, and the node frees
    what it holds for the call. It also fails when the registry says that the node is lost."""

    def __init__(
        self, stub: Any, channel: grpc.aio.Channel, node: Node, request: Any, metadata: Any
    ) -> None:
        """Starts the call; `stub` is the generated class of a service with a method `Run`."""
        self._connected = channel.get_state(True) is grpc.ChannelConnectivity.READY
        self._node = node
        self._peer = Blame(node.role)
        self._lost: PdserveError | None = None
        self._call = stub(channel).Run(request, metadata=metadata)

    def __enter__(self) -> Call:
        self._node.on_lost.add(self._lose)
        return self

    def __exit__(self, *_: object) -> None:
        self._node.on_lost.discard(self._lose)
        self._call.cancel()

    async def read(self) -> Any | None:
        """The next event; None at the end of the stream.

        Raises:
            PdserveError: the node refused, failed or vanished; `blame` says whose fault it is.
        """
        with self._typed_errors():
            event = await self._call.read()
        if event is None:  # gRPC's word for bytes that do not parse
            raise self.protocol_error("a reply does not parse")
        self._connected = True
        return None if event is EOF else event

    async def expect(self, field: str) -> Any:
        """What the next event says, which must be of this kind."""
        event = await self.read()
        if event is None or not event.HasField(field):
            raise self.protocol_error(f"the stream has no {field!r}")
        return getattr(event, field)

    def protocol_error(self, what: str) -> NodeError:
        """For what such a node never says."""
        return NodeError(f"{self._peer} node: {what}", code="PROTOCOL_ERROR", blame=self._peer)

    # ---- inside -----------------------------------------------------------------------------

    def _lose(self, error: PdserveError) -> None:
        self._lost = error
        self._call.cancel()

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._lost or self._typed(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is our task that was cancelled, not this call alone
            raise self._lost or self._peer_lost("the call was cancelled") from None
        except Exception as error:  # a reply that gRPC itself does not understand
            logger.exception("%s node %s", self._peer, self._node.info.node_id)
            raise self.protocol_error(f"a reply makes no sense: {error!r}") from error

    def _typed(self, rpc_error: grpc.aio.AioRpcError) -> PdserveError:
        error = from_rpc_error(rpc_error, self._peer)
        if error.code == "PEER_LOST" and not self._connected:
            return NodeError(error.message, code="UNREACHABLE", blame=self._peer)
        return error

    def _peer_lost(self, what: str) -> NodeError:
        return NodeError(f"{self._peer} node: {what}", code="PEER_LOST", blame=self._peer)
