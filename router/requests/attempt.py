"""One attempt at a request: a decode node, and the prefill nodes that hand the KV over to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.common.core.printable import printable
from pdserve.common.core.request import PromptPath, TokenEvent
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc import convert
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.status import failure_from_pb
from pdserve.common.rpc.tokens import JobEvent, JobTokens, StepEvent
from pdserve.router.cluster.failures import Effect, has
from pdserve.router.cluster.in_flight import InFlightLoad
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.node_client import DecodeCall, NodeClient, protocol_error
from pdserve.router.cluster.node_streams import NodeStreams
from pdserve.router.cluster.placement import NodeSelector
from pdserve.router.cluster.registry import Registry
from pdserve.router.requests.request_state import RequestState, bad_token
from pdserve.router.requests.stages import Phase

logger = logging.getLogger(__name__)

MAX_REASON = 500  # characters of an error that are kept
GONE = "ORPHAN_GONE"  # the code of a node that does not keep the job of a key

KeptAt = Callable[[Node, PromptPath], None]
"""Called when a node keeps the job of a key; gets the node and the path of the prompt's KV."""


class AttemptFailed(Exception):
    """The attempt on this decode node failed. The reason is noted; another attempt follows."""


class Attempt:
    """One decode node's work on a request, with as many prefill nodes as it takes to hand the KV
    over to it.

        the node's stream ──▶ reserved ─┬─▶ Prefill.Run ──▶ first token ──▶ handed off
                                        │        └─ fails ─▶ Retarget: the next epoch's ticket
                                        ├─▶ landed (or prefilled), tokens, ended: in order
        Decode.Run: the job's life ─────┘

    The client sees the first token once, whichever node sends it first, and it stands: a prefill
    node that takes over commits that token and no other.
    """

    def __init__(
        self,
        registry: Registry,
        channels: Channels,
        streams: NodeStreams,
        placement: NodeSelector,
        metrics: RouterMetrics,
        state: RequestState,
        decode: Node,
        path: PromptPath,
        join: bool = False,
        kept_at: KeptAt | None = None,
    ) -> None:
        """`join`: the node keeps the job already, from another request. `kept_at` is called when it
        keeps this one's."""
        self._join = join
        self._kept_at = kept_at
        self._path = path
        self._registry = registry
        self._channels = channels
        self._streams = streams
        self._placement = placement
        self._metrics = metrics
        self._state = state
        self._job = convert.job_to_pb(state.job)
        self._job.router = registry.router_id
        self._decode = decode
        self._decode_client = NodeClient(channels, decode, state.request_id)
        self._role, self._version = decode.role, decode.info.fingerprint
        self._local_prefill = path is not PromptPath.TRANSFERRED
        state.placed(path, decode.id)
        # The decode node's next event before tokens.
        self._awaited = "landed" if join else "reserved"
        if self._local_prefill:
            self._awaited = "prefilled"
        self._prefill: Node | None = None  # the one at work
        self._first: pb.TokenEvent | None = None
        self._prompt_known = False  # the present prefill node has described it
        self._ticket: asyncio.Future[pb.Ticket] = asyncio.get_running_loop().create_future()
        self._stopped = asyncio.Event()  # a stop string has ended some choice
        self._call: DecodeCall
        self._decode_use: InFlightLoad

    # ---- the path, top to bottom -------------------------------------------------------------

    async def run(self) -> None:
        """Returns when every choice has finished. Meanwhile `take` gets the decode node's events.

        Raises:
            AttemptFailed: another attempt must continue.
            PdserveError: the request cannot continue.
        """
        request = pb.DecodeRequest(
            job=self._job, local_prefill=self._local_prefill, join=self._join
        )
        with self._in_flight(self._decode, prefills=self._local_prefill) as self._decode_use:
            phase = Phase.PREFILL if self._local_prefill else Phase.RESERVE
            self._state.stages.enter(Phase.DECODE if self._join else phase, self._decode.id)
            try:
                with (
                    self._streams.job(self._decode, request, self),
                    self._decode_client.decode(request) as self._call,
                ):
                    async with self._call.meanwhile():
                        if not (self._local_prefill or self._join):
                            await self._hand_off(await self._ticket)
                        if len(self._job.choices) > 1:
                            await self._finish_choices()
                    await self._decoded()
            except (AttemptFailed, PdserveError):
                if not self._state.finished:  # else the answer is whole, and nothing has failed
                    raise

    async def _decoded(self) -> None:
        """Waits until every choice has finished."""
        try:
            await self._call.ended()
        except PdserveError as error:
            self._decode_use.failed(error)
            if self._state.finished:
                return
            if error.code == GONE:  # it was only asked whether it had the job
                raise AttemptFailed from error
            decoding = self._awaited == "tokens" and not self._local_prefill
            computing = decoding or self._decode_use.first_in_line
            self._note_failure(error, self._decode, computing, self._decode_use)
            raise AttemptFailed from error

    async def _finish_choices(self) -> None:
        """Tells the decode node which choices a stop string has ended, so that it stops computing
        them: one after the other, while the job runs."""
        while True:
            while self._state.stopped:
                await self._decode_client.finish_choice(self._state.stopped.popleft())
            self._stopped.clear()
            await self._stopped.wait()

    # ---- events of the decode node, as a `JobOwner` ------------------------------------------

    def take(self, event: StepEvent) -> None:
        if self._call.over():  # what follows a token that cannot be may fit by accident
            return
        try:
            if isinstance(event, JobTokens):
                self._take_tokens(event)
            else:
                self._take_event(self._parsed(event))
        except Exception as error:  # of this request, and of no other in the message
            self._call.fail(error)

    def fail(self, error: PdserveError) -> None:
        self._call.fail(error)

    def _parsed(self, event: JobEvent) -> pb.DecodeEvent:
        try:
            return event.event()
        except ValueError as error:
            raise protocol_error(self._role, str(error)) from None

    def _take_event(self, event: pb.DecodeEvent) -> None:
        kind = event.WhichOneof("event")
        if kind is None or (self._join and kind == "reserved"):  # a later version's; long past
            return
        if kind == "kept":
            if self._kept_at is not None:
                self._kept_at(self._decode, self._path)
            return
        if kind == "ended":
            raise self._ended(event.ended)
        if kind != self._awaited:
            raise protocol_error(self._role, f"{kind!r} is out of order")
        self._call.connected = True
        if kind == "reserved":
            self._awaited = "landed"
            self._reserved(event.reserved)
        elif kind == "prefilled":
            self._awaited = "tokens"
            self._prefilled(event.prefilled)
        else:
            self._awaited = "tokens"
            self._landed(event.landed)

    def _ended(self, ended: pb.Ended) -> PdserveError:
        """Returns the error if the job ended before every choice had its last token."""
        if ended.HasField("failure"):
            return self._decode.excused(failure_from_pb(ended.failure, Blame(self._role)))
        return protocol_error(self._role, "the job ended before every choice did")

    def _reserved(self, ticket: pb.Ticket) -> None:
        self._state.mark("reserved")
        self._state.stages.told(Phase.RESERVE, decode_slot=ticket.wait_s)
        self._state.stages.enter(Phase.QUEUE)
        self._ticket.set_result(ticket)

    def _prefilled(self, prefilled: pb.Prefilled) -> None:
        self._state.set(prefill_node=self._decode.id)
        self._state.prefilled(prefilled, self._role)
        self._decode.prefilled(len(self._job.prompt_token_ids), prefilled.cached_tokens)
        self._state.stages.enter(Phase.DECODE, self._decode.id)

    def _landed(self, landed: pb.Landed) -> None:
        stages = self._state.stages
        stages.leave(Phase.PREFILL, to=Phase.STREAM)
        if self._prefill is not None:
            self._state.set(prefill_node=self._prefill.id)
        self._take_first(landed.first_token)  # the prefill node's answer may be late
        self._state.landed(landed)
        if not self._state.finished:
            stages.enter(Phase.DECODE, self._decode.id)
        if self._prefill is not None:
            self._state.set(prefill_node=self._prefill.id)
            flows = self._registry.flows
            flows.landed(self._prefill.id, self._decode.id, landed.bytes)

    def _take_tokens(self, tokens: JobTokens) -> None:
        if self._awaited != "tokens":
            raise protocol_error(self._role, "tokens are out of order")
        try:
            event = tokens.event()
        except ValueError as error:
            raise bad_token(self._role, str(error)) from None
        if tokens.times is not None:
            in_steps, preempted, total = tokens.times
            queued = total - in_steps - preempted
            self._state.stages.told(
                Phase.DECODE, decode_compute=in_steps, preempted=preempted, decode_queue=queued
            )
        self._take(event, self._role, tokens.position)
        self._decode_use.progressed()
        if self._state.stopped:
            self._stopped.set()

    def _take(self, event: TokenEvent, role: str, position: int | None = None) -> None:
        self._state.take(event, role, self._version, position)
        if self._state.finished:
            self._call.finish()

    # ---- the hand-off -------------------------------------------------------------------------

    async def _hand_off(self, ticket: pb.Ticket | None) -> None:
        """Tries prefill nodes until one has handed the KV over to the decode node."""
        state = self._state
        while ticket is not None:
            self._prefill = await self._placement.prefill(state.placement, self._decode)
            if self._prefill is None:
                raise AttemptFailed
            if await self._run_prefill(self._prefill, ticket):
                return
            self._prefill = None
            await state.retries.backoff(state.deadline)
            ticket = await self._retarget(ticket)

    async def _run_prefill(self, prefill: Node, ticket: pb.Ticket) -> bool:
        """Returns whether the prefill node has handed the KV over; a failure is noted."""
        request = pb.PrefillRequest(job=self._job, ticket=ticket, first_token=self._first)
        client = NodeClient(self._channels, prefill, self._state.request_id)
        links, link = self._registry.links, (prefill.id, self._decode.id)
        links.begun(*link)
        use = self._in_flight(prefill, prefills=True)
        state, stages = self._state, self._state.stages
        self._prompt_known = False
        try:
            with use, client.prefill(request) as call:
                stages.enter(Phase.PREFILL, prefill.id)
                first = await call.expect("first_token")
                state.set(prefill_node=prefill.id)
                stages.leave(Phase.PREFILL, to=Phase.STREAM)
                self._take_first(first)
                use.progressed()
                if not state.finished:
                    stages.leave(Phase.STREAM, to=Phase.HAND_OFF, node=self._decode.id)
                    handed_off = await call.expect("handed_off")
                    state.handed_off(handed_off)
                    self._registry.flows.sent(*link, handed_off.transfer_s)
                    links.succeeded(*link)
        except PdserveError as error:
            if not state.finished:
                self._note_failure(error, prefill, use.first_in_line, use)
                return False
        return True

    async def _retarget(self, ticket: pb.Ticket) -> pb.Ticket | None:
        """Returns a ticket for another prefill node; None if all KV has landed after all."""
        try:
            return await self._decode_client.retarget(ticket.transfer_id)
        except PdserveError as error:
            if error.code == "ALREADY_LANDED":
                return None
            self._note_failure(error, self._decode, False, self._decode_use)
            raise AttemptFailed from error

    def _take_first(self, first: pb.FirstToken) -> None:
        """Takes the prompt's counts and first token, sent by the prefill node or with the KV."""
        state = self._state
        if not self._prompt_known:
            state.prefilled(first, "prefill")
            self._prompt_known = True
            if self._prefill is not None:  # else it has been given up
                self._prefill.prefilled(len(self._job.prompt_token_ids), first.cached_tokens)
        if self._first is not None:
            return
        if len(first.token.tokens) != 1 or first.token.choice != self._job.choices[0].index:
            raise bad_token("prefill", "it is not the one that was asked for")
        self._take(convert.event_from_pb(first.token), "prefill")
        self._first = first.token

    # ---- its nodes ---------------------------------------------------------------------------

    def _in_flight(self, node: Node, prefills: bool) -> InFlightLoad:
        state = self._state
        tokens = self._placement.missing(state.placement, node) if prefills else 0
        state.retries.placed()
        last_chance = state.request_id if state.retries.last_chance(node.role) else ""
        return InFlightLoad(self._registry, node, tokens, last_chance)

    def _note_failure(
        self, error: PdserveError, node: Node, computing: bool, use: InFlightLoad
    ) -> None:
        """Notes the failure. A node that reports a failed transfer or peer has not failed itself.

        Raises:
            PdserveError: `error`, or that the request is poison: another attempt would not help.
        """
        if error.code == "ADAPTER_NOT_LOADED":
            self._registry.lacks_adapter(node, self._job.adapter)
        if error.blame.value == node.role and not isinstance(error, TransferError):
            self._state.retries.node_failed(error, node, computing, use.alone)
        else:
            self._state.retries.transfer_failed(error, node)
            if self._prefill is not None and has(error.code, Effect.LINK):
                reason = printable(f"{error.message} ({error.code})", MAX_REASON)
                self._registry.links.failed(self._prefill.id, self._decode.id, reason)
        self._metrics.migrations.labels(node.role, error.code).inc()
        if node is self._decode or self._state.stages.phase in (Phase.PREFILL, Phase.HAND_OFF):
            self._state.stages.failed()
        logger.warning("%s migrates to other nodes: %s", self._state.request_id, error)
