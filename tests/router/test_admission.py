"""Places: how many requests are served and wait, and whose turn it is."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from pdserve.common.core.errors import Overloaded, Unavailable
from pdserve.router.requests.admission import MAX_WAITING_TOKENS, Admission, Ask
from pdserve.router.requests.queue_bounds import Batch


def asking(batch, tokens=0, choices=1):
    return Ask(batch=batch, tokens=max(1, tokens), prompt_tokens=tokens, amount=choices)


class Queue:
    """Admission, and requests that hold a slot or wait for one until they are let go."""

    def __init__(self, **options):
        self.admission = Admission(**options)
        self.held = []

    async def hold(self, client, count=1, tokens=0, choices=1):
        """Requests of one client, or prompts of one body; the last one's task."""
        for _ in range(count):
            batch = client if isinstance(client, Batch) else Batch(client, tokens)
            release = asyncio.Event()
            task = asyncio.create_task(self._holder(release, batch, tokens, choices))
            self.held.append((release, task))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return task

    async def _holder(self, release, batch, tokens, choices):
        async with self.admission.slot(asking(batch, tokens, choices)):
            await release.wait()

    async def refuses(self, client, tokens=0, match=None):
        with pytest.raises(Overloaded, match=match):
            await self.admission.slot(asking(Batch(client, tokens), tokens)).__aenter__()

    async def let_go(self, *tasks):
        for release, task in self.held:
            if not tasks or task in tasks:
                release.set()
        await asyncio.gather(*(tasks or [task for _, task in self.held]), return_exceptions=True)
        await asyncio.sleep(0)

    @property
    def sizes(self):
        return self.admission.running, self.admission.waiting


@asynccontextmanager
async def queue(**options):
    made = Queue(**{"max_waiting": 100, "timeout": 5} | options)
    yield made
    await made.let_go()
    assert made.sizes == (0, 0)


async def test_admission_bounds_both_the_running_and_the_waiting():
    async with queue(max_running=1, max_waiting=1, timeout=0.5) as full:
        running, waiting = await full.hold("a"), await full.hold("a")
        await full.refuses("a")
        with pytest.raises(Unavailable, match=r"0\.5 s"):
            await waiting
        await full.let_go(running)
        await full.hold("a")
        assert full.sizes == (1, 0)


async def test_a_body_of_many_prompts_is_admitted_as_a_whole():
    async with queue(max_running=2, max_waiting=3) as full:
        await full.hold(Batch("a"), 20)  # far more than may wait
        assert full.sizes == (2, 18)
        await full.refuses("a")  # another one is not


async def test_a_body_that_proceeds_does_not_time_out():
    async with queue(max_running=1, max_waiting=3, timeout=0.02) as full:
        body = Batch("a")
        await full.hold(body)
        second = await full.hold(body)
        for _ in range(3):  # time-outs of others, one after another
            with pytest.raises(Unavailable):
                await (await full.hold("b"))
        assert not second.done()


async def test_one_client_leaves_places_and_room_in_the_queue_to_others():
    async with queue(max_running=4, max_waiting=4, max_client_share=0.75) as full:
        greedy = Batch("greedy")
        first = await full.hold(greedy)
        await full.hold(greedy, 99)
        assert full.sizes == (3, 97)
        await full.hold("other")
        assert full.sizes == (4, 97)  # at once: its place was kept free
        await full.hold("other")  # and so was a place in the queue
        assert full.sizes == (4, 98)
        await full.refuses("greedy", match="this client")
        await full.let_go(first)
        assert full.sizes == (4, 97)  # the client that holds fewest has the next free slot


async def test_clients_that_hold_much_leave_places_to_who_holds_none():
    async with queue(max_running=16, max_client_share=0.75) as full:
        await full.hold("a", 20)
        assert full.admission.running == 12  # as one client alone may have
        await full.hold("b", 20)
        assert full.admission.running == 14
        newcomer = await full.hold("c")
        await full.hold("d")
        await full.hold("e")
        assert full.admission.running == 16  # two of them at once
        await full.let_go(newcomer)
        assert full.admission.running == 16  # and the third as soon as one of them leaves


async def test_slots_are_counted_by_choices_and_large_requests_do_not_block_others():
    async with queue(max_running=8, max_client_share=0.75) as full:
        await full.hold("greedy", 3, choices=128)
        assert full.sizes == (1, 2)
        for name in "bc":  # one request takes its client's share
            await full.hold(name)
        assert full.sizes == (3, 2)
        await full.let_go()
        await full.hold("a", choices=5)
        await full.hold("b", choices=128)  # begins with the three places left
        assert full.sizes == (2, 0)


async def test_a_priority_is_for_the_client_s_own_queue():
    admission = Admission(max_running=1, max_waiting=100, timeout=5)
    order = []

    async def ask(client, priority):
        async with admission.slot(Ask(batch=Batch(client), priority=priority)):
            order.append((client, priority))
            await asyncio.sleep(0)

    asked = [("a", 0), ("a", 2), ("a", -1), ("a", 0), ("a", -2), ("b", 9), ("b", 3)]
    async with asyncio.TaskGroup() as group:
        for each in asked:
            group.create_task(ask(*each))
    assert order[0] == ("a", 0)  # came when no request waited
    assert [p for client, p in order[1:] if client == "a"] == [-2, -1, 0, 2]
    assert [p for client, p in order if client == "b"] == [3, 9]
    assert {client for client, _ in order[1:5]} == {"a", "b"}  # in turn


async def test_the_tokens_that_wait_are_bounded():
    async with queue(max_running=1) as full:
        await full.hold("a")
        await full.hold("a", tokens=5)
        large = await full.hold("a", tokens=MAX_WAITING_TOKENS - 5)
        await full.refuses("a", 1, match="prompt tokens of this client")
        await full.hold("b", tokens=9)  # who has more than that gives way
        with pytest.raises(Overloaded, match=f"{MAX_WAITING_TOKENS} prompt tokens are waiting"):
            await large
        assert full.sizes == (1, 2)


async def test_in_a_full_queue_the_client_with_most_of_it_gives_way():
    async with queue(max_running=1, max_waiting=4) as full:
        await full.hold("a")
        many = [await full.hold("a") for _ in range(4)]
        others = [await full.hold(client) for client in "bbc"]
        for gone in many[1:]:  # the newest first
            with pytest.raises(Overloaded, match="4 requests are waiting already"):
                await gone
        assert full.sizes == (1, 4) and not many[0].done()
        await full.refuses("b")  # who has as many as any
        await full.hold("d")  # of equals that have more, one
        assert full.sizes == (1, 4)
        with pytest.raises(Overloaded):
            await others[1]
        await full.refuses("e")  # clients without end do not make the queue longer


async def test_a_body_that_has_begun_does_not_give_way_and_does_not_block_others():
    async with queue(max_running=2, max_waiting=4, max_client_share=0.75) as full:
        await full.hold(Batch("a"), 20)
        await full.hold("b", 2)  # half of the queue, as two clients share it
        await full.refuses("b")
        assert not any(task.done() for _, task in full.held)


async def test_a_body_gives_way_as_a_whole():
    async with queue(max_running=1, max_waiting=4) as full:
        body = Batch("a")
        await full.hold("a")
        prompts = [await full.hold(body) for _ in range(4)]
        await full.hold("b")
        for gone in [*prompts, await full.hold(body)]:  # one that comes after it, too
            with pytest.raises(Overloaded):
                await gone
        assert full.sizes == (1, 1)


async def test_a_refusal_of_a_leaving_request_is_not_reported():
    async with queue(max_running=1, max_waiting=2) as full:
        await full.hold("a", 2)
        leaving = await full.hold("a")
        leaving.cancel()  # and before its task runs
        await full.hold("b")
        assert (await asyncio.gather(leaving, return_exceptions=True))[0] is not None
        assert full.sizes == (1, 2)


async def test_a_place_granted_to_a_request_that_leaves_is_given_back():
    async with queue(max_running=1) as full:
        first, leaving, _ = [await full.hold("a") for _ in range(3)]
        (release,) = [release for release, task in full.held if task is first]
        release.set()
        asyncio.get_running_loop().call_soon(leaving.cancel)  # it has the place and has not run
        await first
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0)
        assert full.sizes == (1, 0)


async def test_slots_are_shared_with_other_routers():
    """Each keeps an equal part; slots that others give back go to waiting requests."""
    admission = Admission(max_running=8, max_waiting=4, timeout=5)
    admission.placed_by_others(8, 2)
    release, held = asyncio.Event(), []

    async def request(number):
        async with admission.slot(Ask()):
            held.append(number)
            await release.wait()

    tasks = [asyncio.create_task(request(number)) for number in range(8)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(held) == 4 and admission.waiting == 4
    with pytest.raises(Overloaded):
        async with admission.slot(Ask()):
            pass
    admission.placed_by_others(2, 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(held) == 6 and admission.waiting == 2
    admission.placed_by_others(8, 1)  # the other one is gone, whatever a node has yet to free
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(held) == 8
    release.set()
    await asyncio.gather(*tasks)
