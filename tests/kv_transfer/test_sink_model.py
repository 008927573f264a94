"""The model the explorer checks is the sink that runs: both are led down the same random paths,
and say the same at every step."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from handoff.decode_node import DecodeNode
from handoff.party import CRASH, Message, Move, Rules
from handoff.sink import Sink
from pdserve.common.core.errors import PdserveError, TransferError
from pdserve.kv_transfer.commands import (
    Accept,
    Command,
    Quiesce,
    RankError,
    Release,
    Reply,
    Verify,
    encode_event,
)
from pdserve.kv_transfer.connector import BlockRun, Failed, Landed
from pdserve.kv_transfer.control.sink import KVSink
from pdserve.kv_transfer.control.ticket import RankEndpoint
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import Rect

RULES = Rules(asks=2)
WRONG = RunDigest(0, Rect(0, 1, 0, 1), BlockRun(0, 1), b"wrong")
REFUSAL = RankError("no", "CONNECTOR_FAILED", "decode", True)
_commands = msgspec.msgpack.Decoder(Command)


class Ranks:
    """Answer when they are told to."""

    def __init__(self) -> None:
        self._calls: list[tuple[type, int, asyncio.Future[bytes]]] = []
        self._at_once = False

    async def call(self, rank: int, message: bytes) -> bytes:
        command = _commands.decode(message)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._at_once or isinstance(command, Release):
            return msgspec.msgpack.encode(Reply())
        self._calls.append((type(command), rank, answer))
        return await answer

    def are_asked(self, kind: type) -> bool:
        return any(each[0] is kind for each in self._calls)

    def answer_all(self) -> None:
        """From now on, at once."""
        self._at_once = True
        for kind, rank, _ in list(self._calls):
            self.answer(kind, rank, Reply())

    def answer(self, kind: type, rank: int, reply: Reply) -> None:
        """To the first call of the kind that has none."""
        call = next(each for each in self._calls if each[:2] == (kind, rank))
        self._calls.remove(call)
        call[2].set_result(msgspec.msgpack.encode(reply))


class Twins:
    """The sink and its model, in step."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        endpoints = [RankEndpoint(rank, Rect(rank, rank + 1, 0, 1), b"") for rank in range(2)]
        self.sink = KVSink(
            endpoints, fingerprint="", block_size=4, address="", lease_s=1e6, call=self._ranks.call
        )
        self.node = DecodeNode(RULES)
        self.part: Sink = self.node.start()
        self.freed = 0
        self.said: Counter[tuple[str, str, int]] = Counter()  # by the model
        self.heard: Counter[tuple[str, str, int]] = Counter()  # from the sink
        self._tasks: list[asyncio.Task[None]] = []
        self._asked: set[Message] = set()
        self._issued: set[int] = set()  # epochs whose ticket is out

    async def reserve(self) -> None:
        self._start("R", 0, self.sink.reserve(8, 0, (0, 1), self._free))
        await self._settle()
        [(self._id, self._entry)] = self.sink._live.items()

    def _free(self) -> None:
        self.freed += 1

    def _start(self, who: str, number: int, work: Any, told: str = "refused") -> None:
        """`told` is what the caller makes of wrong digests."""

        async def listen() -> None:
            try:
                answer = "acked" if isinstance(await work, int) else "ticket"
            except PdserveError as error:
                answer = told if error.code == "DIGEST_MISMATCH" else "refused"
            self.heard[who, answer, number] += 1

        self._tasks.append(asyncio.create_task(listen()))

    async def step(self, choose: random.Random) -> str:
        options: list[Move | Message] = [*self._moves(), *self._messages()]
        [option] = choose.choices(options, [_likelihood(each, self.part) for each in options])
        if isinstance(option, Message):
            self._asked.add(option)
            self._deliver(option)
            option = self.node.receive(self.part, option)
        else:
            self._obey(option)
        self.part = option.part
        self.said.update((each.to, each.kind, _call(each)) for each in option.sends)
        self._issued |= {each.epoch for each in option.sends if each.kind == "ticket"}
        await self._settle()
        return option.label

    def _moves(self) -> Iterator[Move]:
        return (move for move in self.node.moves(self.part) if move.cost != CRASH)

    def _messages(self) -> Iterator[Message]:
        """Each source's and the router's, each once. Some come before their epoch is open."""
        found = [Message("D", "retarget", "R", 0, number) for number in (101, 102)]
        for epoch in range(1, self.part.epoch + 1):
            source = "BA"[epoch % 2]
            found += [Message("D", kind, source, epoch) for kind in ("commit", "abort")]
            found.append(Message("D", "retarget", source, epoch, 10 + epoch))
            found += [
                Message("D", "write", source, epoch, rank, good)
                for rank in range(2)
                for good in (True, False)
            ]
        return (each for each in found if each not in self._asked)

    def _deliver(self, message: Message) -> None:
        _, kind, who, epoch, number, _ = message
        match kind:
            case "commit":
                # A cause outlives its epoch until the next ticket is out.
                told = "mismatch" if epoch in self._issued else "refused"
                self._start(who, epoch, self.sink.commit(self._id, epoch, who), told)
            case "retarget":
                self._start(who, number, self.sink.retarget(self._id, epoch))
            case "abort":
                try:
                    self.sink.abort(self._id, epoch, "")
                except TransferError as error:
                    assert error.code == "STALE_EPOCH"

    def _obey(self, move: Move) -> None:
        label, rank = move.label, int((re.findall(r"rank (\d)", move.label) or "0")[0])
        epoch = self.part.epoch
        if label.endswith(("have accepted", "not accepted")):
            refusal = REFUSAL if label.endswith("not accepted") else None
            self._ranks.answer(Accept, 0, Reply(error=refusal))
            self._ranks.answer(Accept, 1, Reply())
        elif label.endswith("has all"):
            self.sink.on_event(rank, encode_event(Landed(self._id, epoch, 8)))
        elif label.endswith(("True)", "False)")):
            wrong = () if label.endswith("True)") else (WRONG,)
            self._ranks.answer(Verify, 0, Reply(digests=wrong))
            self._ranks.answer(Verify, 1, Reply())
        elif label.endswith("is quiet"):
            self._ranks.answer(Quiesce, rank, Reply())
        elif label.endswith("fails"):
            lost = Failed(self._id, epoch, "PEER_LOST", "prefill", True, "")
            self.sink.on_event(rank, encode_event(lost))
        elif label.endswith("leaves"):
            self._tasks.append(asyncio.create_task(self.sink.cancel(self._id)))
        elif label.endswith("lapses"):
            self._entry._lapse()

    async def _settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    def check(self) -> None:
        machine = self._entry.machine
        assert (machine.state, machine.epoch) == (self.part.state, self.part.epoch)
        assert self.heard == self.said
        quiescing = bool(self.part.quiescing) and self.part.opening is None
        assert self._ranks.are_asked(Quiesce) == quiescing
        assert self._ranks.are_asked(Accept) == (self.part.opening is not None)
        given = self._entry.arrival.done() and ("freed" if self.freed else "activated")
        assert (given or "") == self.part.given
        assert self.freed == (self.part.given == "freed")
        if given == "activated":
            assert self.part.payload is not None
            assert self._entry.arrival.result().first_token == self.part.payload.sender

    async def end(self) -> None:
        """Nobody is left waiting."""
        self._ranks.answer_all()
        await self.sink.close()
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)


def _likelihood(option: Move | Message, part: Sink) -> float:
    """What ends an epoch, or comes before it is open, is rare, so that some get somewhere."""
    if isinstance(option, Move):
        return 0.02 if option.cost else 1.0
    welcome = option.kind in ("commit", "write") and option.good and part.state != "opening"
    return 1.0 if welcome else 0.02


def _call(reply: Message) -> int:
    """Which call is answered: a ticket's own epoch is not its number."""
    return reply.number if reply.kind == "ticket" or reply.number else reply.epoch


@pytest.mark.parametrize("seed", range(8))
async def test_the_sink_does_what_its_model_does(seed: int) -> None:
    choose = random.Random(seed)
    ends: Counter[str] = Counter()
    for _ in range(40):
        twins = Twins()
        await twins.reserve()
        path: list[str] = []
        while len(path) < 60 and not twins.part.given:
            path.append(await twins.step(choose))
            try:
                twins.check()
            except AssertionError as error:
                pytest.fail("\n".join((*path, f"{twins.part}", f"{error}")))
        ends[twins.part.given] += 1
        await twins.end()
    assert ends["freed"] and ends["activated"]
