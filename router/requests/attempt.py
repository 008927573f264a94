"""One attempt at a request: a decode node, and the prefill nodes that hand the KV over to it."""

from __future__ import annotations

import asyncio
import logging

from pdserve.common.core.errors import PdserveError, TransferError
from pdserve.common.core.request import TokenEvent
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc import convert
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.tokens import JobTokens
from pdserve.router.cluster.in_flight import LINK_CODES, InFlight
from pdserve.router.cluster.node_client import DecodeStream, NodeClient, protocol_error
from pdserve.router.cluster.placement import NodeSelector
from pdserve.router.cluster.registry import Node, Registry
from pdserve.router.cluster.token_streams import TokenStreams
from pdserve.router.requests.request_state import RequestState, bad_token
from pdserve.router.requests.stages import Phase

logger = logging.getLogger(__name__)

Times = tuple[float, float, float]  # as `JobTokens.times`
LAST_TOKENS = 5.0  # seconds that the last tokens may come after the end of `Decode.Run`
LAST_WORD = 1.0  # seconds that the prefill node's first word may come after the last token


class AttemptFailed(Exception):
    """The decode node is given up. Why has been noted; another attempt follows."""


class Attempt:
    """What one decode node makes of a request, with as many prefill nodes as it takes to hand the
    KV over to it.

        Decode.Run ──▶ reserved ─┬─▶ Prefill.Run ──▶ first token ──▶ handed off
                                 │        └─ fails ─▶ Retarget: the next epoch's ticket ─▶ another
                                 └─▶ landed ──▶ tokens

    The client sees the first token once, whichever node sends it first, and it stands: a prefill
    node that takes over commits that token and no other.
    """

    def __init__(
        self,
        registry: Registry,
        channels: Channels,
        streams: TokenStreams,
        placement: NodeSelector,
        metrics: RouterMetrics,
        state: RequestState,
        decode: Node,
        local_prefill: bool,
    ) -> None:
        self._registry = registry
        self._channels = channels
        self._streams = streams
        self._placement = placement
        self._metrics = metrics
        self._state = state
        self._job = convert.job_to_pb(state.job)
        self._decode = decode
        self._decode_client = NodeClient(channels, decode, state.request_id)
        self._role, self._version = decode.role, decode.info.fingerprint
        self._local_prefill = local_prefill
        self._prefill: Node | None = None  # the one at work
        self._first: pb.TokenEvent | None = None
        self._decoding = False  # the decode node has all KV
        self._prompt_told = asyncio.Event()  # what was cached of it, and how long it took
        self._handing_off: asyncio.Task[None] | None = None
        # Tokens may come: it has the first one, and the client what is wanted of the prompt.
        self._takes = local_prefill and state.prompt_scored
        # Those that overtook `landed`, after `reserved`, or `prefilled`, where that tells of the
        # prompt.
        self._early: list[JobTokens] | None = [] if local_prefill else None
        self._stream: DecodeStream
        self._decode_use: InFlight

    # ---- the path, top to bottom -------------------------------------------------------------

    async def run(self) -> None:
        """Returns when every choice has finished.

        Raises:
            AttemptFailed: another attempt is to go on.
            PdserveError: the request cannot go on.
        """
        with self._in_flight(self._decode, prefills=self._local_prefill) as use:
            try:
                self._state.stages.enter(
                    Phase.PREFILL if self._local_prefill else Phase.RESERVE, self._decode.id
                )
                async with asyncio.TaskGroup() as group:
                    finishing = group.create_task(self._finish_choices())
                    decoding = group.create_task(self._run_decode(group, use))
                    await self._state.ended.wait()
                    if self._local_prefill:
                        await self._told_of_prompt(decoding, LAST_TOKENS)
                    decoding.cancel()
                    finishing.cancel()
                    if self._handing_off is not None:
                        if self._prefill is not None:
                            await self._told_of_prompt(self._handing_off, LAST_WORD)
                        self._handing_off.cancel()
            except BaseExceptionGroup as failures:
                if self._state.finished:
                    return  # the answer is whole: what fails now is nobody's failure
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # Python before 3.13 forgets it here
                    raise asyncio.CancelledError from None
                raise failures.exceptions[0] from None  # what failed first: all follows from it

    async def _told_of_prompt(self, listening: asyncio.Task[None], seconds: float) -> None:
        """Tokens have a stream of their own: a short answer's overtake what is said of the prompt,
        as what was cached of it. Waits until that is heard, but not for ever: the client has all
        tokens, and it is no failure if nothing comes."""
        told = asyncio.create_task(self._prompt_told.wait())
        try:
            with self._state.deadline.waiting():
                await asyncio.wait(
                    (told, listening), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            told.cancel()

    async def _run_decode(self, group: asyncio.TaskGroup, use: InFlight) -> None:
        """Reads what the decode node says; the hand-off goes on beside it."""
        request = pb.DecodeRequest(job=self._job, local_prefill=self._local_prefill)
        self._decode_use = use
        try:
            with (
                self._streams.job(self._decode, request, self) as streamed,
                self._decode_client.decode(request) as self._stream,
            ):
                while (event := await self._stream.read()) is not None:
                    if event.HasField("reserved"):
                        self._state.mark("reserved")
                        self._state.stages.told(Phase.RESERVE, decode_slot=event.reserved.wait_s)
                        self._early = []
                        self._handing_off = group.create_task(self._hand_off(event.reserved))
                    elif event.HasField("prefilled"):
                        self._prefilled(event.prefilled, self._decode)
                        self._take_early()
                    elif event.HasField("landed"):
                        # What is wanted of the prompt is with the prefill node's first token alone.
                        await self._state.until_prompt_scored()
                        self._landed(event.landed)
                    elif event.HasField("tokens"):
                        self._take(convert.event_from_pb(event.tokens))
                if self._local_prefill:
                    self._prompt_told.set()  # or it does not say so any more
                if not self._state.finished:
                    await self._stream.rest(LAST_TOKENS if streamed else 0.0)
        except PdserveError as error:
            use.failed(error)
            if self._state.finished:
                return
            self._note_failure(error, self._decode, self._decoding or use.first_in_line)
            raise AttemptFailed from error

    def _prefilled(self, event: pb.FirstToken | pb.Prefilled, node: Node) -> None:
        self._state.prefilled(event, node.role)
        node.prefilled(len(self._state.request.prompt_token_ids), event.cached_tokens)
        self._prompt_told.set()

    def _landed(self, landed: pb.Landed) -> None:
        """The tokens that overtook this, or come now, go on after its first one."""
        stages = self._state.stages
        stages.leave(Phase.PREFILL, to=Phase.STREAM)
        self._take_first(landed.first_token)  # the prefill node's may be late
        self._state.landed(landed)
        if not self._state.finished:
            stages.enter(Phase.DECODE, self._decode.id)
        if self._prefill is not None:
            flows = self._registry.flows
            flows.landed(self._prefill.id, self._decode.id, landed.bytes)
        self._decoding = True
        self._take_early()

    def _take_early(self) -> None:
        self._takes = True
        early, self._early = self._early, None
        for tokens in early or ():
            self._take_streamed(tokens)

    def _take_streamed(self, tokens: JobTokens) -> None:
        try:
            event = tokens.event()
        except ValueError as error:
            raise bad_token(self._role, str(error)) from None
        self._take(event, tokens.position, tokens.times)

    def _take(
        self, event: TokenEvent, position: int | None = None, times: Times | None = None
    ) -> None:
        stages = self._state.stages
        if stages.phase is Phase.PREFILL:  # the node has computed the prompt itself
            stages.enter(Phase.DECODE, self._decode.id)
        if times is not None:
            in_steps, preempted, total = times
            queued = total - in_steps - preempted
            stages.told(
                Phase.DECODE, decode_compute=in_steps, preempted=preempted, decode_queue=queued
            )
        self._state.take(event, self._role, self._version, position)
        self._decode_use.progressed()

    # ---- as a `Receiver` of tokens -----------------------------------------------------------

    def take_tokens(self, tokens: JobTokens) -> None:
        self._stream.heard()
        if self._stream.failed:  # what follows a token that cannot be may fit by accident
            return
        try:
            if self._takes:
                self._take_streamed(tokens)
            elif self._early is not None and len(self._early) < self._state.most_events:
                self._early.append(tokens)
            else:
                raise protocol_error(self._decode.role, "tokens came too early")
        except Exception as error:  # of this request, and of no other in the message
            self._stream.fail(error)

    def tokens_lost(self, error: PdserveError) -> None:
        self._stream.fail(error)

    async def _hand_off(self, ticket: pb.Ticket | None) -> None:
        """Until the decode node has the KV: from one prefill node, or else from the next."""
        state = self._state
        state.stages.leave(Phase.RESERVE, to=Phase.QUEUE)
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
        """Whether the prefill node has handed the KV over; why not has been noted."""
        request = pb.PrefillRequest(job=self._job, ticket=ticket, first_token=self._first)
        client = NodeClient(self._channels, prefill, self._state.request_id)
        links, link = self._registry.links, (prefill.id, self._decode.id)
        links.begun(*link)
        use = self._in_flight(prefill, prefills=True)
        state, stages = self._state, self._state.stages
        try:
            with use, client.prefill(request) as stream:
                stages.enter(Phase.PREFILL, prefill.id)
                first = await stream.expect("first_token")
                stages.leave(Phase.PREFILL, to=Phase.STREAM)
                self._prefilled(first, prefill)
                self._take_first(first.token)
                if not state.finished:
                    stages.leave(Phase.STREAM, to=Phase.HAND_OFF, node=self._decode.id)
                use.progressed()
                if not self._state.finished:
                    handed_off = await stream.expect("handed_off")
                    self._state.handed_off(handed_off)
                    self._registry.flows.sent(*link, handed_off.transfer_s)
                    links.succeeded(*link)
        except PdserveError as error:
            if not self._state.finished:
                self._note_failure(error, prefill, use.first_in_line)
                return False
        return True

    async def _retarget(self, ticket: pb.Ticket) -> pb.Ticket | None:
        """A ticket for another prefill node; None when all KV has landed after all."""
        try:
            return await self._decode_client.retarget(ticket.transfer_id)
        except PdserveError as error:
            if error.code == "ALREADY_LANDED":
                if not self._state.prompt_scored:  # lost with the prefill node
                    raise AttemptFailed from error
                return None
            self._note_failure(error, self._decode, computing=False)
            raise AttemptFailed from error

    async def _finish_choices(self) -> None:
        """Tells the decode node which choices a stop string has ended, so that it computes no more
        of them."""
        while True:
            await self._decode_client.finish_choice(await self._state.stopped.get())

    def _take_first(self, token: pb.TokenEvent) -> None:
        """The prefill node's token, whoever sends it first."""
        if self._first is not None:
            return
        if len(token.tokens) != 1 or token.choice != self._job.choices[0].index:
            raise bad_token("prefill", "it is not the one that was asked for")
        event = convert.event_from_pb(token)
        self._state.take(event, "prefill", self._version)
        self._first = token

    # ---- its nodes ---------------------------------------------------------------------------

    def _in_flight(self, node: Node, prefills: bool) -> InFlight:
        state = self._state
        tokens = state.num_tokens if prefills else 0
        last_chance = state.request_id if state.retries.last_chance(node.role) else ""
        return InFlight(self._registry, node, tokens, last_chance)

    def _note_failure(self, error: PdserveError, node: Node, computing: bool) -> None:
        """What a node says of a transfer, or of its peer, is nobody's own failure.

        Raises:
            PdserveError: `error`, or that the request is poison: another attempt would not help.
        """
        if error.code == "ADAPTER_NOT_LOADED":
            self._registry.lacks_adapter(node, self._job.adapter)
        if error.blame.value == node.role and not isinstance(error, TransferError):
            self._state.retries.node_failed(error, node, computing)
        else:
            self._state.retries.transfer_failed(error, node)
            if self._prefill is not None and error.code in LINK_CODES:
                self._registry.links.failed(self._prefill.id, self._decode.id)
        self._metrics.migrations.labels(node.role, error.code).inc()
        if node is self._decode or self._state.stages.phase in (Phase.PREFILL, Phase.HAND_OFF):
            self._state.stages.failed()
        logger.warning("%s goes on elsewhere: %s", self._state.request_id, error)
