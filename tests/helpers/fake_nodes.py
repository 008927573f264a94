"""Nodes without engines behind real gRPC, in this process: their tokens state their position, they
transfer no KV, and tests inject faults."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from fakes_pipeline import byte_level_folder
from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import PdserveError
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.convert import event_from_pb
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2
from pdserve.common.rpc.status import serving
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.decode_node.router_streams import JobWriter, RouterStreams
from pdserve.router.cluster.probes import probe_nodes
from pdserve.router.cluster.registry import Registry
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    TextDelta,
    Update,
)
from pdserve.router.requests.pipeline import Pipeline
from waiting import eventually

VOCAB_SIZE = 200
ROLES = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE}
Fault = Callable[[Any], Awaitable[None]]  # gets the call's context


def token_at(position: int) -> int:
    return 40 + position % 50


def event_at(position: int, job: pb.Job, choice: int = 0) -> pb.TokenEvent:
    last = position - len(job.prompt_token_ids) + 1 >= job.sampling.max_tokens
    return pb.TokenEvent(
        choice=choice,
        tokens=[inference_pb2.Token(id=token_at(position))],
        finish_reason=inference_pb2.FINISH_REASON_LENGTH if last else None,
    )


class FakeNode:
    """`on_run`: a fault in every job. `on_token[k]`: a fault before a job's token k here, once the
    router has taken the job's earlier events."""

    def __init__(self, cluster: FakeCluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.role = ROLES[name[0]]
        self.address = ""
        self.on_run: Fault | None = None
        self.on_token: dict[int, Fault] = {}
        self.on_retarget: Fault | None = None
        self.on_landed: Fault | None = None
        self.token_offset = 0  # added to every token
        self.tells: Callable[[Any], Iterable[Any]] = lambda event: (event,)  # replaces an event
        self.jobs: list[pb.Job] = []
        self.local_prefills = 0
        self.finished: list[int] = []  # choices that the router has finished
        self.prompt_logprobs: pb.PromptLogprobs | None = None  # sent for every prompt
        self.open = 0  # running jobs
        self.said = Counter[tuple[str, int]]()  # events by stream and job number
        self.committed: dict[bytes, asyncio.Future[pb.FirstToken]] = {}
        self.streams = RouterStreams()
        self.times = (0.0, 0.0, 0.0)  # times in the tokens of timed jobs
        self.position_offset = 0  # added to the streamed positions
        # In place of a message of its stream.
        self.streams_message: Callable[[Any], Iterable[Any]] = lambda message: (message,)
        self.server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])

    async def start(self) -> None:
        if self.role == pb.ROLE_PREFILL:
            service, methods = (
                "Prefill",
                {
                    "Run": grpc.unary_stream_rpc_method_handler(
                        self._run_prefill, pb.PrefillRequest.FromString, _bytes
                    )
                },
            )
        else:
            service, methods = (
                "Decode",
                {
                    "Run": grpc.unary_unary_rpc_method_handler(
                        self._run_decode, pb.DecodeRequest.FromString, _bytes
                    ),
                    "FinishChoice": grpc.unary_unary_rpc_method_handler(
                        self._finish_choice, pb.FinishChoiceRequest.FromString, _bytes
                    ),
                    "Events": grpc.unary_stream_rpc_method_handler(
                        self._events, pb.EventsRequest.FromString, _bytes
                    ),
                },
            )
        retarget = grpc.unary_unary_rpc_method_handler(
            self._retarget, pb.RetargetRequest.FromString, _bytes
        )
        self.server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(f"pdserve.v1.{service}", methods),
                grpc.method_handlers_generic_handler(
                    "pdserve.v1.KVTransfer", {"Retarget": retarget}
                ),
            )
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        await self.cluster.channels.get(self.address).channel_ready()
        self.register()

    def register(self, address: str = "", instance: str = "") -> None:
        info = pb.NodeInfo(
            node_id=self.name, role=self.role, address=address or self.address,
            fingerprint="f", kv_connectors=["tcp"], instance=instance,
        )  # fmt: skip
        self.cluster.registry.register(info, pb.NodeLoad(healthy=True))

    @asynccontextmanager
    async def _job(self, job: pb.Job, context: Any) -> AsyncIterator[None]:
        self.jobs.append(job)
        self.open += 1
        try:
            async with serving(context):
                if self.on_run is not None:
                    await self.on_run(context)
                yield
        finally:
            self.open -= 1

    async def _run_prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for event in self._told(self._prefill(request, context)):
            yield event

    async def _run_decode(self, request: Any, context: Any) -> Any:
        """Runs a job. An error before it starts ends the call; a later one ends the job."""
        async with self._job(request.job, context):
            with self.streams.named(request.stream) as stream:
                await stream.until_open()
                with stream.job(request.job_number, lambda _: None) as writer:
                    try:
                        return await self._say(writer, request, context)
                    except PdserveError as error:
                        writer.end(error)
        return pb.DecodeResponse()

    async def _say(self, writer: JobWriter, request: pb.DecodeRequest, context: Any) -> Any:
        """Writes all events of a job; returns the call's answer."""
        said = {each.index: len(each.output_token_ids) for each in request.job.choices}
        said[request.job.choices[0].index] += not request.local_prefill  # the first token
        times = self.times if request.job.timed else None
        async for event in self._told(self._decode(request, context)):
            if isinstance(event, bytes):
                return event
            self.said[request.stream, request.job_number] += 1
            if isinstance(event, pb.DecodeEvent):
                writer.event(event)
                continue
            tokens = event_from_pb(event)
            position = said.get(tokens.choice, 0)
            said[tokens.choice] = position + len(tokens.tokens)
            writer.tokens(position + self.position_offset, tokens, times)
        writer.end()
        return pb.DecodeResponse()

    async def _told(self, events: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for event in events:
            for each in (event,) if isinstance(event, bytes) else self.tells(event):
                yield each
                await asyncio.sleep(0)

    async def _events(self, request: pb.EventsRequest, context: Any) -> AsyncIterator[Any]:
        async for message in self.streams.messages(request.stream):
            for each in self.streams_message(message):
                yield each

    async def _before(
        self, count: int, context: Any, request: pb.DecodeRequest | None = None
    ) -> None:
        if (fault := self.on_token.get(count)) is not None:
            if request is not None:  # which is told on another stream than the fault
                job, heard = (request.stream, request.job_number), self.cluster.heard
                await eventually(lambda: heard[job] >= self.said[job])
            await fault(context)

    async def _prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        async with self._job(request.job, context):
            await self._before(0, context)
            job = request.job
            position = len(job.prompt_token_ids) + len(job.choices[0].output_token_ids)
            known = request.HasField("first_token")
            token = request.first_token if known else self._event(position, job)
            first = pb.FirstToken(
                token=token, cached_tokens=3, queue_s=0.25, compute_s=0.5, step_s=0.5,
                prompt_logprobs=self.prompt_logprobs,
            )  # fmt: skip
            yield pb.PrefillEvent(first_token=first)
            if token.finish_reason and len(job.choices) == 1:
                return
            await self._before(1, context)
            decode = self.cluster.by_address(request.ticket.address)
            committed = decode.committed[request.ticket.transfer_id]
            if not committed.done():  # by a call that was abandoned since
                committed.set_result(first)
            await self._before(2, context)
            yield pb.PrefillEvent(handed_off=pb.HandedOff(transfer_s=0.001))

    async def _decode(self, request: pb.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        job = request.job
        position = len(job.prompt_token_ids) + len(job.choices[0].output_token_ids)
        if request.local_prefill:
            self.local_prefills += 1
            await self._before(0, context, request)
            prefilled = pb.Prefilled(cached_tokens=3, queue_s=0.25, compute_s=0.5, step_s=0.5)
            yield pb.DecodeEvent(prefilled=prefilled)
        else:
            transfer_id = bytes([len(self.committed)]) * 16
            future = self.committed[transfer_id] = asyncio.Future()
            ticket = pb.Ticket(transfer_id=transfer_id, epoch=1, address=self.address)
            yield pb.DecodeEvent(reserved=ticket)
            first = await future
            if self.on_landed is not None:
                await self.on_landed(context)
            yield pb.DecodeEvent(landed=pb.Landed(bytes=1, cached_tokens=2, first_token=first))
            position += 1
        prompt = len(job.prompt_token_ids)
        due = {each.index: prompt + len(each.output_token_ids) for each in job.choices}
        due[job.choices[0].index] = position
        end = prompt + job.sampling.max_tokens
        for count in itertools.count():
            if not (left := [choice for choice, each in due.items() if each < end]):
                return
            if count or not request.local_prefill:
                await self._before(count, context, request)
            for choice in left:
                yield self._event(due[choice], job, choice)
                due[choice] += 1

    async def _finish_choice(self, request: Any, context: Any) -> pb.FinishChoiceResponse:
        self.finished.append(request.choice)
        return pb.FinishChoiceResponse()

    def _event(self, position: int, job: pb.Job, choice: int = 0) -> pb.TokenEvent:
        event = event_at(position, job, choice)
        event.tokens[0].id += self.token_offset
        return event

    async def _retarget(self, request: pb.RetargetRequest, context: Any) -> pb.RetargetResponse:
        async with serving(context):
            if self.on_retarget is not None:
                await self.on_retarget(context)
        ticket = pb.Ticket(transfer_id=request.transfer_id, epoch=2, address=self.address)
        return pb.RetargetResponse(ticket=ticket)


class FakeCluster:
    """A pipeline over fake nodes, named `p0`, `d1` …"""

    def __init__(self, folder: Path, **routing: Any) -> None:
        late = {"queue_timeout": 10.0, "heartbeat_timeout": 60.0, "breaker_cooldown": 600.0}
        load = {"prefill_policy": "least-load", "decode_policy": "least-load"}
        options = {**late, **load, **routing}
        self.config = RoutingConfig(**options)
        self.registry = Registry(self.config)
        self.count_standstills(False)  # a slow machine has standstills
        self.channels = Channels()
        self.metrics = RouterMetrics()
        tokenizer = Tokenizer.from_folder(byte_level_folder(folder))
        self.pipeline = Pipeline(
            self.config, self.registry, tokenizer, self.channels, self.metrics, VOCAB_SIZE
        )
        self.nodes: dict[str, FakeNode] = {}
        self.heard = Counter[tuple[str, int]]()  # of what decode nodes said
        self._count_heard()

    def _count_heard(self) -> None:
        job = self.pipeline.streams.job

        def counted(node: Any, request: Any, receiver: Any) -> AbstractContextManager[Any]:
            def count(event: Any) -> None:
                self.heard[request.stream, request.job_number] += 1
                receiver.take(event)

            counting = SimpleNamespace(take=count, fail=receiver.fail, receiver=receiver)
            return job(node, request, counting)

        self.pipeline.streams.job = counted  # type: ignore[method-assign,assignment]

    async def start(self, *names: str) -> None:
        for name in names:
            self.nodes[name] = FakeNode(self, name)
            await self.nodes[name].start()

    def count_standstills(self, counted: bool = True) -> None:
        """Sets whether the router counts its own standstills."""
        clock = self.registry.clock
        real = type(clock).stood_still
        clock.stood_still = lambda: counted and real(clock)  # type: ignore[method-assign]

    def __getitem__(self, name: str) -> FakeNode:
        return self.nodes[name]

    def by_address(self, address: str) -> FakeNode:
        return next(node for node in self.nodes.values() if node.address == address)

    def jobs(self, role: str) -> int:
        return sum(len(node.jobs) for node in self.nodes.values() if node.name[0] == role)

    def request(self, num_prompt: int = 5, max_tokens: int = 8) -> GenerationRequest:
        self._number = getattr(self, "_number", 0) + 1
        sampling = SamplingParams(max_tokens=max_tokens)
        return GenerationRequest(f"r{self._number}", tuple(range(3, 3 + num_prompt)), sampling)

    async def updates(self, *requests: GenerationRequest) -> AsyncGenerator[Update, None]:
        """Yields the updates of all requests, one request after the other."""
        async with aclosing(self.pipeline.generate(requests)) as batches:
            async for batch in batches:
                for _, update in batch:
                    yield update

    async def ask(self, num_prompt: int = 5, max_tokens: int = 8) -> GenerationStats:
        """Sends one request; each token must arrive once, in order."""
        seen: list[int] = []
        request = self.request(num_prompt, max_tokens)
        async for update in self.updates(request):
            if isinstance(update, TextDelta):
                seen += [token.token_id for token in update.tokens]
        assert isinstance(update, GenerationStats)
        assert seen == [token_at(num_prompt + each) for each in range(max_tokens)]
        return update

    async def settled(self) -> None:
        """Waits until router and nodes hold and count nothing any more."""
        async with asyncio.timeout(60):
            while any(node.open for node in self.nodes.values()):
                await asyncio.sleep(0.01)
        assert (self.pipeline.admission.running, self.pipeline.admission.waiting) == (0, 0)
        counts = {(node.in_flight, node.prefill_tokens) for node in self.registry.nodes()}
        assert counts <= {(0, 0)}
        assert not any(node.on_lost for node in self.registry.nodes())


@asynccontextmanager
async def fake_cluster(
    folder: Path, names: Sequence[str], watched: bool = False, **routing: Any
) -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster(folder, **routing)
    await cluster.start(*names)
    timeout = cluster.config.heartbeat_timeout
    watching = probe_nodes(cluster.registry, cluster.channels, timeout) if watched else None
    tasks = [asyncio.create_task(each) for each in (cluster.registry.clock.run(), watching) if each]
    try:
        yield cluster
        await cluster.settled()
    finally:
        for task in tasks:
            task.cancel()
        await cluster.channels.close()
        cluster.pipeline.streams.close()
        for node in cluster.nodes.values():
            node.streams.end()
            await node.server.stop(0)


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


# ---- faults of a job ----


def fails(error: Exception, times: int = 10**9) -> Fault:
    """Fails with this error, `times` times."""
    left = [times]

    async def fault(context: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise error

    return fault


def says(status: grpc.StatusCode, **metadata: str) -> Fault:
    """Fails with a status, with these fields of pdserve in its metadata."""

    async def fault(context: Any) -> None:
        words = tuple((f"pdserve-{key.replace('_', '-')}", each) for key, each in metadata.items())
        await context.abort(status, "told so", words)

    return fault


def stand_still(seconds: float) -> None:
    """Blocks this process, nodes and router included."""
    time.sleep(seconds)


def once(fault: Fault) -> Fault:
    left = [fault]

    async def first(context: Any) -> None:
        if left:
            await left.pop()(context)

    return first


async def hangs(context: Any) -> None:
    await asyncio.Event().wait()


async def dies(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE)
