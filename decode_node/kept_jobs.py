"""Jobs that several routers may read, and that outlive them.

A job with an `orphan_key` keeps its events. Each router that knows the key may join the job, and
gets all events from the first one on. The end of a router's stream tells the node that the router
died. When a job's last router dies, the job continues for `--orphan-lease` seconds. A job that has
ended well is kept for as long.

    Run ─▶ read ── the last reader's stream ends, too ─▶ orphan ── Run, join ─▶ read
            │ the last Run is cancelled                     │ lease, or the KV has not come yet
            └────────────▶ closed ◀─────────────────────────┘

A job without its KV ends: its prefill node has lost the router, too, and the answer has not begun.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable

import msgspec

from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.tokens import StepEvent
from pdserve.decode_node.router_streams import JobWriter, RouterStream, weight_of
from pdserve.decode_node.session import DecodeSession

# Seconds in which the node notices that a router's calls have ended, too, where its stream has, and
# the other way round: the same connection has both. A process that stands still has as much longer.
NOTICE = 0.5
LOOKS = 10
MAX_ORPHANS = 256
# The weight of all that is kept of jobs; those that have ended give way to what is new, and one
# that would exceed it is not kept.
MAX_KEPT = 2**17
OVERHEAD = 4  # the weight of a job that says nothing


class KeptJob:
    """A job with a key. `serve` is a router's part in it; it lives with or without one."""

    def __init__(self, jobs: KeptJobs, key: bytes, session: DecodeSession, local: bool) -> None:
        """`local`: it computes its prompt itself."""
        self.key = key
        self.client = session.client
        self.weight = OVERHEAD
        self.ended = False  # well
        self._jobs = jobs
        self._session: DecodeSession | None = session
        self._events: list[StepEvent] = []
        self._readers: dict[object, tuple[RouterStream, int]] = {}
        self._lease: asyncio.TimerHandle | None = None
        self._life = asyncio.create_task(self._run(session, local))

    @property
    def is_orphan(self) -> bool:
        """Whether the job runs without a router."""
        return self._lease is not None and not self.ended

    async def _run(self, session: DecodeSession, local: bool) -> None:
        writer = JobWriter(self._add, 0)
        try:
            writer.event(pb.DecodeEvent(kept=pb.Kept()))
            await session.run(local, writer)
            self.ended = True
        except PdserveError as error:
            writer.end(error)
        finally:
            self._session = None
            self._jobs.close(session)
            if self.ended:
                self._jobs.has_ended(self)
                self._expect_readers()
            else:
                self._jobs.forget(self)

    def _add(self, event: StepEvent) -> None:
        self._jobs.keep(self, self._events, event)
        for stream, number in self._readers.values():
            self._say(event, stream, number)

    @staticmethod
    def _say(event: StepEvent, stream: RouterStream, number: int) -> None:
        stream.add(msgspec.structs.replace(event, job=number))

    async def serve(self, stream: RouterStream, number: int) -> None:
        """Says on the stream all that it has said so far, and what follows, until its end.

        Raises:
            NodeError: the stream has ended.
        """
        reader = object()
        lost: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()

        def lose(error: PdserveError) -> None:
            if not lost.done():
                lost.set_result(error)

        try:
            with stream.job(number, lose):
                self._readers[reader] = stream, number
                self._expect_readers()
                for event in tuple(self._events):
                    self._say(event, stream, number)
                await asyncio.wait((self._life, lost), return_when=asyncio.FIRST_COMPLETED)
            if self._life.done():
                self._life.result()
                return
            del self._readers[reader]
            await _noticed(lambda: False)  # the call of a router that has died ends, too
            raise lost.result()
        except asyncio.CancelledError:
            self._readers.pop(reader, None)
            self._jobs.spawn(self._left(stream))
            raise
        except PdserveError:
            self._end_unread()
            raise
        finally:
            self._readers.pop(reader, None)
            self._expect_readers()

    def _expect_readers(self) -> None:
        """Begins the lease of a job that has ended, when no router reads it."""
        if self._readers or self.ended:
            self._stop_lease()
        if self.ended and not self._readers:
            self._begin_lease()

    def _begin_lease(self) -> None:
        loop = asyncio.get_running_loop()
        self._lease = loop.call_later(self._jobs.lease, self.end)

    def _stop_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    async def _left(self, stream: RouterStream) -> None:
        """Handles the end of a router's call: on purpose, or with the router and so with its
        stream."""
        await _noticed(stream.closed.is_set)
        if self._readers or self.ended or self._lease is not None:
            return
        has_kv = self._session is not None and self._session.has_kv
        if stream.closed.is_set() and has_kv and self._jobs.take(self):
            self._begin_lease()
        else:
            self.end()

    def _end_unread(self) -> None:
        if not (self._readers or self.ended or self.is_orphan):
            self.end()

    def end(self) -> None:
        """Ends it, wherever it is."""
        self._stop_lease()
        self._life.cancel()
        self._jobs.forget(self)


async def _noticed(has_happened: Callable[[], bool]) -> None:
    """Waits for what happens within NOTICE seconds, as far as this process runs in them."""
    for _ in range(LOOKS):
        if has_happened():
            return
        await asyncio.sleep(NOTICE / LOOKS)


class KeptJobs:
    """A node's jobs with keys: read by routers, orphaned, or ended lately. Clients share the room
    for them; the client with the most tokens loses its jobs first."""

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
        self._kept: Counter[str] = Counter()  # weight by client
        self._ended: defaultdict[str, dict[KeptJob, None]] = defaultdict(dict)  # the oldest first

    def begin(self, key: bytes, session: DecodeSession, local_prefill: bool) -> KeptJob | None:
        """Begins the session's job; None: it has no key, or is not to be kept."""
        if not (key and self.lease):
            return None
        if (known := self._jobs.get(key)) is not None:
            if not known.ended:
                return None
            known.end()
        if not self._make_room(OVERHEAD):
            return None
        job = self._jobs[key] = KeptJob(self, key, session, local_prefill)
        self._kept[job.client] += job.weight
        return job

    def join(self, key: bytes) -> KeptJob:
        """Raises NodeError: no job is kept under this key."""
        if (job := self._jobs.get(key)) is None:
            message = "the answer is not kept here, or not any more"
            raise NodeError(message, code="ORPHAN_GONE", blame=Blame.NETWORK)
        return job

    def take(self, job: KeptJob) -> bool:
        """Returns whether the job may become an orphan: it is kept, and there are not too many."""
        num_orphans = sum(each.is_orphan for each in self._jobs.values())
        return self._jobs.get(job.key) is job and num_orphans < MAX_ORPHANS

    def keep(self, job: KeptJob, events: list[StepEvent], event: StepEvent) -> None:
        """Adds an event to those of a job. If there is too much already, the job becomes one
        without a key."""
        if self._jobs.get(job.key) is not job:
            return
        weight = weight_of(event)
        if not self._make_room(weight):
            self.forget(job)
            return
        job.weight += weight
        self._kept[job.client] += weight
        events.append(event)

    def has_ended(self, job: KeptJob) -> None:
        """Keeps a job that has ended well while there is room."""
        if self._jobs.get(job.key) is job:
            self._ended[job.client][job] = None

    def forget(self, job: KeptJob) -> None:
        """Drops the kept events of a job."""
        if self._jobs.get(job.key) is not job:
            return
        del self._jobs[job.key]
        self._kept[job.client] -= job.weight
        if not self._kept[job.client]:
            del self._kept[job.client]
        if job.ended:
            del self._ended[job.client][job]
            if not self._ended[job.client]:
                del self._ended[job.client]

    def _make_room(self, weight: int) -> bool:
        while self._kept.total() + weight > MAX_KEPT:
            if not self._ended:
                return False
            client = max(self._ended, key=self._kept.__getitem__)
            next(iter(self._ended[client])).end()
        return True
