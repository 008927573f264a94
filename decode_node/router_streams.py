"""One stream to each router, for all of its jobs: one message per step.

    reserved, landed, tokens, ended ──▶ add ──▶ │ pending │ ──▶ StepEvents n, n + 1, …
                                                 while the router takes one, the next gathers

All events of a job use this stream, in order. A router opens its stream before it sends the first
job, and a job begins when its stream is open. When the router ends, or is too far behind, unread
events are lost. Then its jobs fail, and the router continues the requests on other nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from itertools import accumulate, takewhile

from pdserve.common.core.errors import Blame, InvalidRequest, NodeError, PdserveError
from pdserve.common.core.request import TokenEvent
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.status import failure_to_pb
from pdserve.common.rpc.tokens import JobEvent, JobTokens, StepEvent, encode_events
from pdserve.common.rpc.trace import event_noter

# What a router may be behind with, by weight: a minute of two thousand tokens a second, so that
# one that stands still for a moment goes on. Tokens of a sequence weigh 1: some hundred bytes, or
# more with logprobs. Other events weigh 1 more for each KiB; a prompt's logprobs may be megabytes.
MAX_BEHIND = 2**17
MAX_MESSAGE = 2**12  # the weight of a message of several, which stays far below gRPC's limit
OPEN_TIMEOUT = 10.0  # seconds that a job waits until its router has opened the stream


class JobWriter:
    """Reports the events of one job in order, and none after its end."""

    def __init__(self, add: Callable[[StepEvent], None], number: int) -> None:
        """`add` takes the events; `number` is the job's in them."""
        self._add = add
        self._number = number
        self._note = event_noter()
        self._ended = False

    def tokens(
        self, position: int, event: TokenEvent, times: tuple[float, float, float] | None = None
    ) -> None:
        """Adds tokens of one of the job's choices; `position` and `times` are those of
        `JobTokens`."""
        if not self._ended:
            self._add(JobTokens.of(self._number, position, event, times))

    def event(self, event: pb.DecodeEvent) -> None:
        if not self._ended:
            self._note(event)
            message = event.SerializeToString()
            self._add(JobEvent(self._number, message))

    def end(self, error: PdserveError | None = None) -> None:
        """Sends the job's end: every choice has finished, or the job failed with `error`."""
        ended = pb.Ended() if error is None else pb.Ended(failure=failure_to_pb(error))
        self.event(pb.DecodeEvent(ended=ended))
        self._ended = True


class RouterStream:
    """The stream to one router."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()  # a router reads it, or has read it
        self.users = 0  # jobs that have it or wait for it, and its reader
        self._pending: list[StepEvent] = []
        self._behind = 0  # their weight
        self._wake = asyncio.Event()
        self._jobs: set[Callable[[PdserveError], None]] = set()
        self._ending = False
        self.closed = asyncio.Event()  # its router is gone, or too far behind

    @contextmanager
    def job(self, number: int, fail: Callable[[PdserveError], None]) -> Iterator[JobWriter]:
        """Yields a job's writer to this stream. Calls `fail` if its events are lost meanwhile.

        Raises:
            NodeError: the stream has ended.
        """
        if self.closed.is_set() or self._ending:
            raise _lost()
        self._jobs.add(fail)
        try:
            yield JobWriter(self.add, number)
        finally:
            self._jobs.discard(fail)
            if self._ending:
                self._wake.set()

    async def until_open(self) -> None:
        """Raises NodeError: its router does not open it."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                await self.opened.wait()
        except TimeoutError:
            raise _lost() from None

    def add(self, event: StepEvent) -> None:
        """Adds an event to the message of this step."""
        if self.closed.is_set():
            return
        self._pending.append(event)
        self._behind += weight_of(event)
        self._wake.set()
        if self._behind > MAX_BEHIND:
            self.close()

    async def messages(self) -> AsyncGenerator[pb.StepEvents, None]:
        """Yields messages until the stream ends or is closed. Call this once.

        Raises:
            InvalidRequest: it is read already.
        """
        if self.opened.is_set():
            raise InvalidRequest("this stream is read already", param="stream")
        self.opened.set()
        number = 0
        try:
            while True:
                await self._wake.wait()
                if self.closed.is_set():
                    return
                if batch := self._take():
                    yield pb.StepEvents(number=number, events=encode_events(batch))
                    number += 1
                elif self._ending and not self._jobs:
                    return
                else:
                    self._wake.clear()
        finally:
            self.close()

    def _take(self) -> list[StepEvent]:
        """Takes the events of the next message: all pending ones that fit into it."""
        batch = self._pending
        if self._behind > MAX_MESSAGE:
            weights = accumulate(map(weight_of, batch))
            batch = batch[: max(1, sum(1 for _ in takewhile(MAX_MESSAGE.__ge__, weights)))]
        self._pending = self._pending[len(batch) :]
        self._behind -= sum(map(weight_of, batch))
        return batch

    def end(self) -> None:
        """Takes no more jobs, and ends once the current jobs have ended and everything is read."""
        self._ending = True
        self._wake.set()

    def close(self) -> None:
        """Drops pending events; the stream's jobs fail."""
        self.closed.set()
        self._pending, self._behind = [], 0
        self._wake.set()
        for fail in tuple(self._jobs):
            fail(_lost())


class RouterStreams:
    """The streams to all routers, by the names that these gave them."""

    def __init__(self) -> None:
        self._streams: dict[str, RouterStream] = {}

    @contextmanager
    def named(self, name: str) -> Iterator[RouterStream]:
        """Keeps the stream while it is in use: by its router, or by a job that waits for it."""
        stream = self._streams.setdefault(name, RouterStream())
        stream.users += 1
        try:
            yield stream
        finally:
            stream.users -= 1
            if not stream.users and self._streams.get(name) is stream:
                del self._streams[name]

    async def messages(self, name: str) -> AsyncGenerator[pb.StepEvents, None]:
        """Yields the messages of a stream, for its one reader; `RouterStream.messages` raises."""
        with self.named(name) as stream:
            async with aclosing(stream.messages()) as messages:
                async for message in messages:
                    yield message

    def end(self) -> None:
        """Ends the streams, after the jobs' last events, because the node stops."""
        for stream in tuple(self._streams.values()):
            stream.end()


def weight_of(event: StepEvent) -> int:
    """Returns the weight of an event that waits; of `MAX_BEHIND`."""
    return 1 if isinstance(event, JobTokens) else 1 + len(event.message) // 1024


def _lost() -> NodeError:
    return NodeError(
        "the stream of its tokens to the router has ended",
        code="TOKEN_STREAM_LOST",
        blame=Blame.NETWORK,
    )
