"""D: what may happen on a decode node."""

from __future__ import annotations

from collections.abc import Iterator

from handoff.party import CRASH, D_ENDS, Invariant, Message, Move, Party, Rules, broken, during
from handoff.sink import Rank, Sink, SinkStep
from pdserve.kv_transfer.control.protocol import SinkEvent, SinkState


class DecodeNode(Party):
    name = "D"

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def start(self) -> Sink:
        ranks = (Rank(),) * self._rules.ranks
        return Sink(ranks=ranks, opening=tuple(range(self._rules.ranks)))

    def moves(self, part: Sink) -> Iterator[Move]:
        if part.crashed:
            return
        yield Move("D: crashes", Sink(crashed=True, asker=None, given="crashed"), cost=CRASH)
        yield from self._answers(part)
        if part.given:
            return
        if any(rank.accepted == part.epoch for rank in part.ranks):
            failed = self._step(part).on(SinkEvent.FAILED, part.epoch)
            yield failed.move("a rank fails", D_ENDS)
        cancelled = self._step(part).on(SinkEvent.CANCEL)
        if cancelled.part.state not in (SinkState.DRAINING, SinkState.FREED):
            with during("D: the client leaves"):
                broken(Invariant.CANCEL_ENDS_IT, cancelled.part.state)
        yield cancelled.move("the client leaves", D_ENDS)
        if self._rules.sink_lease:
            yield self._lapse(part)

    def _lapse(self, part: Sink) -> Move:
        return self._step(part).on(SinkEvent.LEASE_LAPSED).move("the lease lapses", D_ENDS)

    def _step(self, part: Sink) -> SinkStep:
        return SinkStep(self._rules, part)

    def _answers(self, part: Sink) -> Iterator[Move]:
        """What ranks do, and what the node hears of it."""
        for number in part.opening or ():
            yield self._step(part).accept(number).move(f"rank {number} accepts {part.epoch}")
        if part.opening == ():
            yield self._step(part).opened(SinkEvent.OPENED).move("all ranks have accepted")
            refused = self._step(part).opened(SinkEvent.FAILED)
            yield refused.move("a rank has not accepted", D_ENDS)
        for number, rank in enumerate(part.ranks):
            if rank.landed == 1:
                yield self._step(part).landed(number).move(f"hears that rank {number} has all")
        for check in part.verifying:
            yield self._step(part).verified(check).move(f"verifies {check}")
        if part.opening is None or not self._rules.quiesce_waits:
            for number in part.quiescing:
                yield self._step(part).quiet(number).move(f"rank {number} is quiet")

    def timely(self, part: Sink) -> Move | None:
        if (answer := next(self._answers(part), None)) is not None:
            return answer
        if part.given or not self._rules.sink_lease:
            return None
        return self._lapse(part)

    def check_end(self, part: Sink) -> None:
        if not part.given or part.waiting or part.asker:
            broken(Invariant.TERMINATION, f"the sink stays {part.state}")

    def receive(self, part: Sink, message: Message) -> Move:
        step = self._step(part)
        match message.kind:
            case "commit":
                step.commit(message)
            case "abort":
                step.abort(message)
            case "renew":
                step.renew(message)
            case "retarget" if part.crashed:
                step.refuse((message.sender, message.number))
            case "retarget":
                step.retarget(message)
            case "write":
                step.write(message)
        return step.move(f"gets {message}")

    def matters(self, part: Sink, message: Message) -> bool:
        if message.kind != "write" or not self._rules.rank_checks_epoch:
            return not (part.crashed and message.kind in ("abort", "write"))
        if part.crashed:
            return False
        rank = part.ranks[message.number]
        if rank.accepted == message.epoch:
            return not (rank.landed and self._rules.landed_is_final)
        # Epochs only grow: an old one's data is never wanted again.
        return message.epoch >= part.epoch and not part.given
