"""Jobs that outlive their router.

A job with an `orphan_key` keeps what it says. When its router dies, which the node knows by the end
of the router's stream, the job goes on for `--orphan-lease` seconds. A router that knows the key
adopts it, and gets all it has said, from the first event on, then what follows.

    Run ─▶ attached ── the stream ends, too ─▶ orphan ── Run, adopt ─▶ attached
              │ Run is cancelled                  │ lease, or the KV has not come yet
              └────────────▶ closed ◀─────────────┘

A job whose KV has not come yet ends: its prefill node has lost the router, too, and the answer has
not begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.rpc.tokens import StepEvent
from pdserve.decode_node.router_streams import JobWriter, RouterStream, weight_of
from pdserve.decode_node.session import DecodeSession

# Seconds in which the node notices that a router's stream has ended after its calls have: the same
# connection has both. It looks so many times; a node that stands still meanwhile has looked once.
NOTICE, LOOKS = 0.5, 10
MAX_ORPHANS = 256
MAX_KEPT = 2**17  # the weight of all that is kept of jobs; one that would exceed it is not kept


class KeptJob:
    """A job with a key. `serve` is a router's part in it; it lives with or without one."""

    def __init__(self, orphans: Orphans, key: bytes, session: DecodeSession, local: bool) -> None:
        """`local`: it computes its prompt itself."""
        self.key = key
        self.local_prefill = local
        self._orphans = orphans
        self._session = session
        self._events: list[StepEvent] = []
        self.weight = 0
        self._reader: tuple[RouterStream, int] | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._life = asyncio.create_task(self._run())

    @property
    def is_orphan(self) -> bool:
        return self._lease is not None

    async def _run(self) -> None:
        writer = JobWriter(self._add, 0)
        try:
            await self._session.run(self.local_prefill, writer)
        except PdserveError as error:
            writer.end(error)
        finally:
            self._orphans.close(self._session)

    def _add(self, event: StepEvent) -> None:
        self._orphans.keep(self, self._events, event)
        if self._reader is not None:
            self._say(event, *self._reader)

    @staticmethod
    def _say(event: StepEvent, stream: RouterStream, number: int) -> None:
        stream.add(msgspec.structs.replace(event, job=number))

    async def serve(self, stream: RouterStream, number: int) -> None:
        """Says on the stream all that it has said so far, and what follows, until its end.

        Raises:
            NodeError: the stream has ended.
        """
        try:
            self._adopted()
            with stream.job(number, self._stream_lost):
                self._reader = stream, number
                for event in tuple(self._events):
                    self._say(event, stream, number)
                await asyncio.shield(self._life)
                self._orphans.forget(self)
        except BaseException:
            self._reader = None
            self._orphans.spawn(self._left(stream))
            raise

    def _adopted(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def _stream_lost(self, error: PdserveError) -> None:
        """Fails the job if its router lives and only the stream has ended."""
        reader, self._reader = self._reader, None

        async def fail() -> None:
            for _ in range(LOOKS):
                await asyncio.sleep(NOTICE / LOOKS)
            if self._reader is None and not self.is_orphan:
                self._session.fail(error)

        if reader is not None:
            self._orphans.spawn(fail())

    async def _left(self, stream: RouterStream) -> None:
        """The router's call has ended: on purpose, or with the router and so with its stream."""
        for _ in range(LOOKS):
            with suppress(TimeoutError):
                async with asyncio.timeout(NOTICE / LOOKS):
                    await stream.closed.wait()
                    break
        if self._reader is None and not self.is_orphan:
            if stream.closed.is_set() and self._session.has_kv and self._orphans.take(self):
                loop = asyncio.get_running_loop()
                self._lease = loop.call_later(self._orphans.lease, self.end)
            else:
                self.end()

    def end(self) -> None:
        """Ends it, wherever it is."""
        self._adopted()
        self._life.cancel()
        self._orphans.forget(self)


class Orphans:
    """A node's jobs with keys, those that have a router and those that have lost it."""

    def __init__(
        self,
        lease: float,
        close: Callable[[DecodeSession], None],
        spawn: Callable[..., object],
    ) -> None:
        """`lease`: seconds. `close` gives back all that a session holds; `spawn` runs a coroutine
        at most until the node stops."""
        self.lease = lease
        self.close = close
        self.spawn = spawn
        self._jobs: dict[bytes, KeptJob] = {}
        self._kept = 0

    def begin(self, key: bytes, session: DecodeSession, local_prefill: bool) -> KeptJob | None:
        """Begins the session's job; None: it has no key, or is not to be kept."""
        if not (key and self.lease) or key in self._jobs:
            return None
        job = self._jobs[key] = KeptJob(self, key, session, local_prefill)
        return job

    def find(self, key: bytes) -> KeptJob | None:
        return self._jobs.get(key)

    def adopt(self, key: bytes) -> KeptJob:
        """Raises NodeError: there is no orphan of this key."""
        job = self._jobs.get(key)
        if job is None or not job.is_orphan:
            message = "the answer that its router left is not here any more"
            raise NodeError(message, code="ORPHAN_GONE", blame=Blame.NETWORK)
        return job

    def take(self, job: KeptJob) -> bool:
        """Whether it may become an orphan: it is kept, and there are not too many."""
        num_orphans = sum(each.is_orphan for each in self._jobs.values())
        return self._jobs.get(job.key) is job and num_orphans < MAX_ORPHANS

    def keep(self, job: KeptJob, events: list[StepEvent], event: StepEvent) -> None:
        """Adds an event to those of a job, unless there is too much already: then the job is one
        without a key."""
        if self._jobs.get(job.key) is not job:
            return
        weight = weight_of(event)
        if self._kept + weight > MAX_KEPT:
            self.forget(job)
            return
        job.weight += weight
        self._kept += weight
        events.append(event)

    def forget(self, job: KeptJob) -> None:
        """Lets go of what is kept of a job."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
            self._kept -= job.weight
