"""The hostile clients, in processes of their own: in the soak's process, they and the load would
delay each other, and a late client cannot tell a late server from one that hangs.

    python -m benchmarks.soak.attackers    # reads orders, writes outcomes: a line of JSON each
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.access import Access
from benchmarks.soak.attack import Attack, Fault, Hostile, NotNow, Outcome, Patience
from benchmarks.soak.floods import FLOOD_ATTACKS
from benchmarks.soak.greed import GREED_ATTACKS
from benchmarks.soak.hostile import HOSTILE_ATTACKS
from benchmarks.soak.strangers import STRANGER_ATTACKS

ATTACKS: Mapping[str, Hostile] = {
    **HOSTILE_ATTACKS,
    **FLOOD_ATTACKS,
    **GREED_ATTACKS,
    **STRANGER_ATTACKS,
}
READY = b"ready\n"
LINE = 1 << 20  # most bytes of a line: a crowd's outcome
ROOT = Path(__file__).parents[2]


class Attackers:
    """The processes: one for each kind of attack that needs its own, and one for all others."""

    def __init__(self, fleet: Access, patience: Patience | None = None) -> None:
        self._fleet = fleet
        self._patience = patience or Patience()
        self._processes: dict[str, _Process] = {}

    @asynccontextmanager
    async def running(self, kinds: Iterable[str]) -> AsyncIterator[None]:
        """Runs the processes for these kinds of attacks, and of other faults. They are ready
        before the load begins: in it, they take a minute to start."""
        try:
            for name in {_process_of(kind) for kind in kinds if kind in ATTACKS}:
                self._processes[name] = await _Process.start()
            yield
        finally:
            for process in self._processes.values():
                await process.close()

    async def attack(self, fault: Fault) -> Outcome:
        """Raises NotNow."""
        outcome = await self._processes[_process_of(fault.kind)].order(
            {
                "fleet": self._fleet.packed(),
                "fault": asdict(fault),
                "patience": asdict(self._patience),
            }
        )
        if outcome.not_now:
            raise NotNow
        return outcome


def _process_of(kind: str) -> str:
    return kind if ATTACKS[kind].apart else ""


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._orders, self._outcomes = process.stdin, process.stdout
        self._numbers = count()
        self._ordered: dict[int, asyncio.Future[Outcome]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls) -> _Process:
        """Returns it when it reads orders."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE,
        )
        assert process.stdout is not None
        if await process.stdout.readline() != READY:
            raise RuntimeError("the hostile clients do not start")
        return cls(process)

    async def order(self, order: dict[str, Any]) -> Outcome:
        number = next(self._numbers)
        if self._reading.done():
            raise RuntimeError(f"the hostile clients ended with {self._process.returncode}")
        self._ordered[number] = asyncio.get_running_loop().create_future()
        self._orders.write(json.dumps({"number": number, **order}).encode() + b"\n")
        return await self._ordered[number]

    async def _read(self) -> None:
        async for line in self._outcomes:
            told = json.loads(line)
            self._ordered.pop(told.pop("number")).set_result(Outcome(**told))
        code = await self._process.wait()
        for outcome in self._ordered.values():
            outcome.set_exception(RuntimeError(f"the hostile clients ended with {code}"))

    async def close(self) -> None:
        for outcome in self._ordered.values():
            outcome.cancel()
        self._ordered.clear()
        self._orders.close()
        await self._reading


# ---- their process ----


async def main() -> None:
    orders = asyncio.StreamReader(limit=LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    print(READY.decode(), end="", flush=True)
    async with asyncio.TaskGroup() as group:
        attacks: set[asyncio.Task[None]] = set()
        async for line in orders:
            attacks.add(group.create_task(_carry_out(**json.loads(line))))
        for attack in attacks:  # the soak is over
            attack.cancel()


async def _carry_out(
    number: int, fleet: dict[str, Any], fault: dict[str, Any], patience: dict[str, Any]
) -> None:
    attack = Attack(Access(**fleet), Fault(**fault), Patience(**patience))
    try:
        await ATTACKS[fault["kind"]].attack(attack)
    except NotNow:
        attack.outcome.not_now = True
    print(json.dumps({"number": number, **asdict(attack.outcome)}), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
