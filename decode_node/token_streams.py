"""One stream of tokens to each router, for all of its jobs: what a step gives is one message.

    sampled ──▶ add ──▶ │ pending │ ──▶ StepTokens n, n + 1, …          Decode.Tokens
                         while the router takes one, the next gathers

A stream is there as long as somebody uses it: a job that names it, or the router that reads it.
They come in any order. When the router ends, or is too far behind, what it has not read is lost,
and so are the jobs: they fail, and it makes the rest elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from pdserve.common.core.errors import Blame, InvalidRequest, NodeError, PdserveError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.tokens import JobTokens, encode_tokens

# Entries that a router may be behind with: a minute of two thousand tokens a second, so that one
# that stands still for a moment goes on. Each takes some hundred bytes, more with logprobs.
MAX_BEHIND = 2**17
MAX_MESSAGE = 2**12  # entries of a message, which stays far below gRPC's limit


class TokenStream:
    """One router's."""

    def __init__(self) -> None:
        self._pending: list[JobTokens] = []
        self._wake = asyncio.Event()
        self._jobs: set[Callable[[PdserveError], None]] = set()
        self._closed = False
        self.read = False  # a router reads it, or has read it

    @property
    def used(self) -> bool:
        return bool(self._jobs) or (self.read and not self._closed)

    @contextmanager
    def job(self, fail: Callable[[PdserveError], None]) -> Iterator[None]:
        """A job's tokens go here meanwhile; `fail` is called if they are lost.

        Raises:
            NodeError: the stream has ended.
        """
        if self._closed:
            raise _lost()
        self._jobs.add(fail)
        try:
            yield
        finally:
            self._jobs.discard(fail)

    def add(self, tokens: JobTokens) -> None:
        """They go out with all else that this step gives."""
        if self._closed:
            return
        self._pending.append(tokens)
        self._wake.set()
        if len(self._pending) > MAX_BEHIND:
            self.close()

    async def messages(self) -> AsyncGenerator[pb.StepTokens, None]:
        """Until it is closed; not again.

        Raises:
            InvalidRequest: somebody reads it already.
        """
        if self.read:
            raise InvalidRequest("this token stream is read already", param="token_stream")
        self.read = True
        number = 0
        try:
            while True:
                await self._wake.wait()
                if self._closed:
                    return
                batch, self._pending = self._pending[:MAX_MESSAGE], self._pending[MAX_MESSAGE:]
                if not self._pending:
                    self._wake.clear()
                yield pb.StepTokens(number=number, tokens=encode_tokens(batch))
                number += 1
        finally:
            self.close()

    def close(self) -> None:
        """What is pending is lost."""
        self._closed = True
        self._pending = []
        self._wake.set()
        for fail in tuple(self._jobs):
            fail(_lost())


class TokenStreams:
    """Those of all routers, by the names that these gave them."""

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}

    @contextmanager
    def job(self, name: str, fail: Callable[[PdserveError], None]) -> Iterator[TokenStream | None]:
        """The stream of a job; None for a job without one. As `TokenStream.job`."""
        if not name:
            yield None
            return
        with self._using(name) as stream, stream.job(fail):
            yield stream

    async def messages(self, name: str) -> AsyncGenerator[pb.StepTokens, None]:
        """As `TokenStream.messages`."""
        with self._using(name) as stream:
            async with aclosing(stream.messages()) as messages:
                async for message in messages:
                    yield message

    @contextmanager
    def _using(self, name: str) -> Iterator[TokenStream]:
        stream = self._streams.setdefault(name, TokenStream())
        try:
            yield stream
        finally:
            if not stream.used and self._streams.get(name) is stream:
                del self._streams[name]

    def close(self) -> None:
        """The node stops; its jobs have ended."""
        for stream in tuple(self._streams.values()):
            stream.close()


def _lost() -> NodeError:
    return NodeError(
        "the stream of its tokens to the router has ended",
        code="TOKEN_STREAM_LOST",
        blame=Blame.NETWORK,
    )
