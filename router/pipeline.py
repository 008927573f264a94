"""The request path: admit → place → prefill ∥ decode → detokenize → stream.

client ─▶ generate ─▶ _serve ─▶ Attempt ─ Decode.Run ──▶ D   reserves blocks
                                    ◀──── ticket ───────
                                    ──── Prefill.Run ──▶ P ══ KV blocks ══▶ D
                                    ◀──── first token ──          goes to the client at once
                                    ◀──── tokens ─────── D        after P's commit

When P fails, another takes over D's blocks: D issues a ticket of the next epoch (`Retarget`).
When D fails, the request begins another attempt: prompt and tokens so far are prefilled, and the
next token is the one that D would have drawn, because draws are keyed by (seed, position). The
client notices a pause.

Every part of a request runs in one task (`_serve`) or in that task's group, under the request's
one deadline. However it ends, that task's end is the request's, its place is free and its calls
are cancelled; the client gets the answer's rest or a typed error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Blame, NodeError, PdserveError, TransferError
from pdserve.common.obs.logging import request_id_var
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.server import Channels
from pdserve.common.rpc.status import REQUEST_ID_KEY, from_rpc_error
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.admission import Admission
from pdserve.router.call import Call
from pdserve.router.generation import GenerationRequest, GenerationStats, TextDelta
from pdserve.router.placement import Placement
from pdserve.router.registry import PARTED_CODES, Node, Registry, Use
from pdserve.router.run import Run

logger = logging.getLogger(__name__)

RETARGET_TIMEOUT = 5.0  # seconds a decode node gets to quiesce its ranks
FINISH_TIMEOUT = 5.0  # seconds a decode node gets to hear that a choice has ended


class Pipeline:
    """Implements `pdserve.router.generation.Generator` on the registered nodes."""

    def __init__(
        self,
        config: RoutingConfig,
        registry: Registry,
        tokenizer: Tokenizer,
        channels: Channels,
        metrics: RouterMetrics,
        vocab_size: int = 2**32,
    ) -> None:
        """`vocab_size`: rows of the model's embedding."""
        self._config = config
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.registry = registry
        self.channels = channels
        self.metrics = metrics
        self.placement = Placement(config, registry)
        self.admission = Admission(
            config.max_concurrent_requests,
            config.max_queued_requests,
            config.queue_timeout,
            config.max_client_share,
        )

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[TextDelta | GenerationStats, None]:
        """As `pdserve.router.generation.Generator.generate`."""
        run = Run(request, self._tokenizer, self._config)
        serving = asyncio.create_task(self._serve(run))
        serving.add_done_callback(lambda _: run.deltas.put_nowait(None))
        try:
            while (delta := await run.deltas.get()) is not None:
                yield delta
            yield await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self, run: Run) -> GenerationStats:
        """The whole of a request: its deltas go into `run.deltas`; its outcome is this task's,
        counted and logged once."""
        try:
            async with self.admission.place(*run.admission), run.deadline.running():
                while not run.finished:
                    await self._attempt(run)
        except PdserveError as error:
            self.metrics.observe_error(error.code)
            logger.warning("%s failed: %s", run.request_id, error)
            raise
        except asyncio.CancelledError:
            self.metrics.observe_error("CANCELLED")
            logger.info("%s cancelled by the client", run.request_id)
            raise
        except Exception:
            self.metrics.observe_error("INTERNAL")
            logger.exception("%s failed: unexpected error", run.request_id)
            raise PdserveError(
                f"internal error; its log entry is under request id {run.request_id}"
            ) from None
        return self._finished(run)

    async def _attempt(self, run: Run) -> None:
        """What one decode node makes of the request: all that is left of it, unless something
        fails; that is noted then, and the caller tries again from there."""
        await run.recovery.pause(run.deadline)
        decode, local_prefill = await self.placement.decode(run)
        run.mark("queued")
        with suppress(BeginAnew):
            await Attempt(self, run, decode, local_prefill).serve()

    def _finished(self, run: Run) -> GenerationStats:
        run.mark("finished")
        stats = run.stats()
        self.metrics.observe_request(
            stats.timeline,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            finish_reasons=run.finish_reasons,
        )
        self.metrics.itl.observe_all(run.token_gaps)
        logger.info(
            "%s finished: %d prompt tokens (%d cached), %d generated, TTFT %.0f ms, %.0f ms in all",
            run.request_id, stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens,
            1e3 * (stats.timeline.first_token or 0), 1e3 * (stats.timeline.finished or 0),
        )  # fmt: skip
        return stats

    # ---- what there is ----------------------------------------------------------------------

    def ready(self) -> tuple[bool, str]:
        return self.placement.ready()

    def cluster(self) -> dict[str, Any]:
        ready, reason = self.ready()
        return {
            "ready": ready,
            "reason": reason,
            "running": self.admission.running,
            "waiting": self.admission.waiting,
            "nodes": self.registry.describe(),
            "pairings": [
                {"prefill": prefill.info.node_id, "decode": decode.info.node_id}
                for prefill, decode in self.placement.pairs()
            ],
        }


class BeginAnew(Exception):
    """This decode node is given up. Why has been noted; another attempt follows."""


class Attempt:
    """One decode node, and as many prefill nodes as it takes to hand the KV over to it.

        Decode.Run ──▶ reserved ─┬─▶ Prefill.Run ──▶ first token ──▶ handed off
                                 │        └─ fails ─▶ Retarget: the next epoch's ticket ─▶ another
                                 └─▶ landed ──▶ tokens

    The client sees the first token once, whichever node tells it first, and it stands: a prefill
    node that takes over commits that token and no other.
    """

    def __init__(self, pipeline: Pipeline, run: Run, decode: Node, local_prefill: bool) -> None:
        self._pipeline = pipeline
        self._registry = pipeline.registry
        self._run = run
        self._job = convert.job_to_pb(run.job)
        # The client's id, where it gave one, so that one word finds a request in every log.
        self._metadata = ((REQUEST_ID_KEY, request_id_var.get() or run.request_id),)
        self._decode = decode
        self._local_prefill = local_prefill
        self._prefill: Node | None = None  # the one at work
        self._first: pb.TokenEvent | None = None
        self._decoding = False  # the decode node has all KV
        self._stopped: asyncio.Queue[int] = asyncio.Queue()  # choices, each once, by stop strings

    # ---- the path, top to bottom ------------------------------------------------------------

    async def serve(self) -> None:
        """Returns when every choice has finished.

        Raises:
            BeginAnew: another attempt is to go on.
            PdserveError: the request cannot go on.
        """
        tokens = self._run.num_tokens if self._local_prefill else 0
        suspect = self._run.recovery.suspect(self._decode.role)
        with self._registry.using(self._decode, tokens, suspect) as use:
            async with _first_cause() as group:
                finishing = group.create_task(self._part(self._finish_choices()))
                decoding = group.create_task(self._part(self._run_decode(group, use)))
                await self._run.ended.wait()
                decoding.cancel()
                finishing.cancel()

    async def _part(self, work: Coroutine[Any, Any, None]) -> None:
        """What a task of the group does. A failure after the last token is nobody's: the answer is
        whole, and the group only waits for its tasks then."""
        try:
            await work
        except Exception:
            if not self._run.finished:
                raise

    async def _run_decode(self, group: asyncio.TaskGroup, use: Use) -> None:
        """Reads the decode node's stream; the hand-off goes on beside it."""
        request = pb.DecodeRequest(job=self._job, local_prefill=self._local_prefill)
        handing_off: asyncio.Task[None] | None = None
        try:
            with self._call(pb_grpc.DecodeStub, self._decode, request) as call:
                while (event := await call.read()) is not None:
                    self._check_order(call, event, handing_off is not None)
                    if event.HasField("reserved"):
                        self._run.mark("reserved")
                        handing_off = group.create_task(self._part(self._hand_off(event.reserved)))
                    elif event.HasField("landed"):
                        self._landed(event.landed)
                    elif event.HasField("tokens"):
                        self._take(event.tokens, self._decode.role)
                        use.worked()
                self._run.check_finished()
        except PdserveError as error:
            use.failed(error)
            if self._run.finished:
                return
            self._decode_failed(error, computing=self._decoding or use.had_its_turn)
            raise BeginAnew from error
        finally:
            if handing_off is not None:
                handing_off.cancel()

    async def _hand_off(self, ticket: pb.Ticket | None) -> None:
        """Until the decode node has the KV: from one prefill node, or else from the next."""
        run, placement = self._run, self._pipeline.placement
        while ticket is not None:
            self._prefill = await placement.prefill(run, self._decode)
            if self._prefill is None:
                raise BeginAnew
            try:
                await self._run_prefill(self._prefill, ticket)
                return
            except PrefillFailed as failure:
                if run.finished:
                    return
                self._prefill_failed(failure, self._prefill)
            self._prefill = None
            await run.recovery.pause(run.deadline)
            ticket = await self._retarget(ticket)

    async def _run_prefill(self, prefill: Node, ticket: pb.Ticket) -> None:
        request = pb.PrefillRequest(job=self._job, ticket=ticket, first_token=self._first)
        pair = prefill.info.node_id, self._decode.info.node_id
        suspect = self._run.recovery.suspect(prefill.role)
        self._registry.pairs.placed(*pair)
        try:
            with (
                self._registry.using(prefill, self._run.num_tokens, suspect) as use,
                self._call(pb_grpc.PrefillStub, prefill, request) as call,
            ):
                first = await call.expect("first_token")
                self._run.cached_tokens = self._run.cached_tokens or first.cached_tokens
                self._tell_first(first.token)
                use.worked()
                if self._run.finished:
                    return
                handed_off = await call.expect("handed_off")
                self._run.transfer_seconds += handed_off.transfer_s
                self._registry.pairs.succeeded(*pair)
        except PdserveError as error:
            raise PrefillFailed(error, use.had_its_turn) from error

    async def _retarget(self, ticket: pb.Ticket) -> pb.Ticket | None:
        """A ticket for another prefill node; None when all KV has landed after all."""
        stub = pb_grpc.KVTransferStub(self._pipeline.channels.get(self._decode.info.address))
        request = pb.RetargetRequest(transfer_id=ticket.transfer_id)
        try:
            response = await stub.Retarget(request, timeout=RETARGET_TIMEOUT)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error, Blame.DECODE)
            if error.code == "ALREADY_LANDED":
                return None
        else:
            if response is not None:
                return response.ticket
            message = "decode node: the answer to Retarget does not parse"
            error = NodeError(message, code="PROTOCOL_ERROR", blame=Blame.DECODE)
        self._decode_failed(error, computing=False)
        raise BeginAnew from error

    async def _finish_choices(self) -> None:
        """Tells the decode node which choices a stop string has ended, so that it computes no more
        of them. One that does not hear it, or is older than the call, does no harm."""
        stub = pb_grpc.DecodeStub(self._pipeline.channels.get(self._decode.info.address))
        while True:
            choice = await self._stopped.get()
            request = pb.FinishChoiceRequest(request_id=self._run.request_id, choice=choice)
            try:
                await stub.FinishChoice(request, timeout=FINISH_TIMEOUT, metadata=self._metadata)
            except (
                grpc.aio.AioRpcError,
                grpc.aio.UsageError,
            ) as error:  # refused; a closed channel
                logger.debug("%s: choice %d goes on: %s", self._run.request_id, choice, error)

    # ---- what nodes say ---------------------------------------------------------------------

    def _check_order(self, call: Call, event: pb.DecodeEvent, reserved: bool) -> None:
        """Reserved and landed come once each, in this order and before all tokens; a decode node
        that computes the prompt tells neither."""
        landed = self._decoding or self._local_prefill
        unexpected = {
            "reserved": reserved or self._local_prefill,
            "landed": landed or not reserved,
            "tokens": not landed,
        }
        kind = event.WhichOneof("event")  # None: a later version's
        if kind is not None and unexpected.get(kind):
            raise call.protocol_error(f"{kind!r} is out of order")

    def _landed(self, landed: pb.Landed) -> None:
        self._run.mark("transferred")
        self._run.transfer_bytes += landed.bytes
        self._decoding = True
        self._tell_first(landed.first_token)

    def _tell_first(self, token: pb.TokenEvent) -> None:
        """The prefill node's token, whoever tells it first."""
        if self._first is not None:
            return
        if len(token.tokens) != 1 or token.choice != self._job.choices[0].index:
            raise _bad_tokens("prefill", "it is not the one that was asked for")
        self._take(token, "prefill")
        self._first = token

    def _take(self, tokens: pb.TokenEvent, role: str) -> None:
        """A token that cannot be is the fault of the node that made it: once it is among the
        request's tokens, it would be the client's."""
        event = convert.event_from_pb(tokens)
        if fault := self._run.fault_of(event, self._pipeline.vocab_size):
            raise _bad_tokens(role, fault)
        if self._run.take(event, role, self._decode.info.fingerprint):
            self._stopped.put_nowait(event.choice)

    # ---- when they fail ---------------------------------------------------------------------

    def _decode_failed(self, error: PdserveError, computing: bool) -> None:
        """Raises `error`, or that the request is poison, when another attempt would not help."""
        if error.blame is Blame.DECODE and not isinstance(error, TransferError):
            self._run.recovery.failed(error, self._decode, computing)
        else:
            self._parted(error, self._decode)
        self._goes_on(error, self._decode)

    def _prefill_failed(self, failure: PrefillFailed, prefill: Node) -> None:
        """As `_decode_failed`."""
        error = failure.error
        if error.blame is Blame.PREFILL and not isinstance(error, TransferError):
            self._run.recovery.failed(error, prefill, failure.computing)
        else:
            self._parted(error, prefill)
        self._goes_on(error, prefill)

    def _parted(self, error: PdserveError, node: Node) -> None:
        """What a node says of a transfer, or of its peer, is nobody's own failure."""
        self._run.recovery.parted(error, node)
        if self._prefill is not None and error.code in PARTED_CODES:
            pair = self._prefill.info.node_id, self._decode.info.node_id
            self._registry.pairs.failed(*pair)

    def _goes_on(self, error: PdserveError, node: Node) -> None:
        self._pipeline.metrics.migrations.labels(node.role, error.code).inc()
        logger.warning("%s goes on elsewhere: %s", self._run.request_id, error)

    def _call(self, stub: Any, node: Node, request: Any) -> Call:
        channel = self._pipeline.channels.get(node.info.address)
        return Call(stub, channel, node, request, self._metadata)


def _bad_tokens(role: str, fault: str) -> NodeError:
    return NodeError(f"{role} node: a token: {fault}", code="PROTOCOL_ERROR", blame=Blame(role))


class PrefillFailed(Exception):
    """A prefill node, or its transfer, failed; `computing`: it was the request's turn there."""

    def __init__(self, error: PdserveError, computing: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.computing = computing


@asynccontextmanager
async def _first_cause() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises what failed first, as itself: all else follows from it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # Python before 3.13 forgets it here
            raise asyncio.CancelledError from None
        raise failures.exceptions[0] from None
