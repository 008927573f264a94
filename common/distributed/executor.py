"""How a node's ranks run: in this process, or one process each. The caller cannot tell.

    InProcessExecutor      one rank, on a thread of its own
    MultiprocessExecutor   one process per rank, on this host     ⎫ the same ZeroMQ fan-out
    RayExecutor            one Ray actor per rank, on any host    ⎭ (`fanout.py`)
    make_executor          the one that fits (`launch.py`)

A rank hosts a worker (an object built from an import string) and, beside it, the worker's
extension, which has a channel and a thread of its own, so that it is served while a step
computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.common.config.shared import LogConfig

Emit = Callable[[bytes], None]


class Extension(Protocol):
    """Lives beside a worker and shares its memory; speaks bytes. For pdserve this is the rank
    half of the KV transfer (`kv_transfer/rank/transfer_rank.py`); this layer does not know that."""

    def handle(self, message: bytes) -> bytes:
        """Serves one call from the node. Must return fast and may be called while a step runs."""

    def close(self, deadline: float) -> None:
        """Stops all I/O within `deadline` seconds."""


class Worker(Protocol):
    """One rank. Built in its own process (or thread) by `WorkerSpec.factory(spec, emit)`; its
    host closes the extension first and then the worker."""

    @property
    def extension(self) -> Extension | None: ...

    def ready(self) -> bytes:
        """What the rank reports once (a msgpack `RankReady`)."""

    def step(self, message: bytes) -> bytes:
        """Runs one step: msgpack `StepDelta` in, msgpack `StepOutput` out (that of the
        `answer_rank` is used)."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All a rank's process needs to build its worker. Encoded as msgpack, never pickled."""

    factory: str  # "module:callable"
    rank: int
    world_size: int
    init_method: str  # where ranks find each other; "": the executor provides a place
    config: Any  # plain data the factory decodes (the engine config as builtins)
    answer_rank: int = 0  # whose answers to steps are used
    local_rank: int = 0  # its place among the node's ranks of its host: the GPU it computes on
    local_world_size: int = 1  # those ranks, of all replicas: they share the host's cores and RAM
    role: str = "node"  # whose rank this is, for the log
    log: LogConfig = field(default_factory=LogConfig)  # of a rank with a process of its own


class Executor(ABC):
    """Runs steps on all ranks and carries messages to and from their extensions."""

    @abstractmethod
    async def start(self) -> Sequence[bytes]:
        """Builds all ranks; returns each rank's `ready()`.

        Raises:
            ConfigError: a rank cannot start as configured.
            NodeError: a rank failed to start; the message holds its last words.
        """

    @abstractmethod
    async def step(self, message: bytes) -> bytes:
        """Runs one step on all ranks and returns the answer of their `answer_rank`. Several may
        be in flight: every rank runs them in the order of the calls, and a pipeline's stages
        work on different ones at once.

        Raises:
            NodeError: a rank raised or died; the ranks no longer agree, so the node must end.
        """

    @abstractmethod
    async def call(self, rank: int, message: bytes) -> bytes:
        """Calls one rank's extension; served even while a step runs.

        Raises:
            PdserveError: what the extension raised (NodeError if it was not typed), or the
                rank is dead.
        """

    @abstractmethod
    def on_event(self, callback: Callable[[int, bytes], None]) -> None:
        """Sets who hears (rank, event) from extensions; called on the event loop."""

    @abstractmethod
    def on_death(self, callback: Callable[[int, str], None]) -> None:
        """Sets who hears that a rank died (rank, reason); called on the event loop, once."""

    @abstractmethod
    async def shutdown(self, deadline: float) -> None:
        """Stops all ranks, by force after `deadline` seconds; afterwards no process of this
        executor is left. May be called at any time and more than once."""
