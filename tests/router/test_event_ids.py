"""Ids of a stream's events: which of them a router takes up, and what they say."""

from __future__ import annotations

import asyncio
import hmac
import json
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import CHAT, Site, serve
from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import InvalidRequest, PermissionDenied
from pdserve.common.core.request import FinishReason, TokenEvent
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.auth import APIKeys
from pdserve.router.api.schema import CompletionBody, StreamOptions
from pdserve.router.cluster.claims import AnswerKey
from pdserve.router.grpc.resume import resumable as grpc_resumable
from pdserve.router.http.completions import CompletionChoiceWriter
from pdserve.router.http.response import OpenAIWriter
from pdserve.router.requests import event_ids
from pdserve.router.requests.event_ids import MANY, Drawn, EventIds, Resumable, resumable
from pdserve.router.requests.generation import GenerationRequest, Past, Replayed, TextDelta
from pdserve.router.requests.request_state import RequestState

SECRETS = (b"the newest", b"an older one")
DIGEST = b"of the request and its key"
DRAWN = Drawn("cmpl-1", 1_700_000_000, [5, 6])


def generations() -> list[GenerationRequest]:
    return [GenerationRequest(f"r{i}", [1, 2], SamplingParams(max_tokens=9)) for i in range(2)]


async def resume(
    ids: Sequence[bytes], digest: bytes = DIGEST, secrets: Sequence[bytes] = SECRETS
) -> Resumable:
    return await resumable(secrets, digest, ids, generations(), DRAWN)


async def stream(count: int) -> list[bytes]:
    """The ids of a stream with so many events."""
    begun = await resume([])
    found = []
    for i in range(count):
        reason = FinishReason.STOP if i == count - 1 else None
        begun.ids.add(i % 2, TextDelta(0, "x", (SampledToken(10 + i),), reason, None, "v"))
        found.append(begun.ids.next())
    return found


@pytest.mark.parametrize("count", [1, 4, MANY + 1])
async def test_a_stream_goes_on_with_what_its_events_added(count: int) -> None:
    found = await resume(await stream(count))
    assert found.drawn == DRAWN
    for prompt, each in enumerate(found.generations):
        assert each.sampling.seed == DRAWN.seeds[prompt]
        token_ids = [token_id for past in each.past for token_id in past.token_ids]
        assert token_ids == [10 + i for i in range(prompt, count, 2)]
        assert {past.version for past in each.past} <= {"v"}
    last: Past = found.generations[(count - 1) % 2].past[-1]
    assert last.finish_reason is FinishReason.STOP


async def test_its_next_ids_are_those_of_the_stream_that_broke_off() -> None:
    ids = await stream(4)
    found = await resume(ids[:3])
    found.ids.add(1, TextDelta(0, "x", (SampledToken(13),), FinishReason.STOP, None, "v"))
    assert found.ids.next() == ids[3]


async def test_ids_that_are_changed_left_out_or_moved_fit_nowhere() -> None:
    first, second, third, fourth = await stream(4)
    flipped = [bytes([*second[:i], second[i] ^ 1, *second[i + 1 :]]) for i in range(len(second))]
    for wrong in (
        *([first, each] for each in flipped),
        *([second, first], [first, third], [first, first], [second], [fourth]),
        *([first, second, third, third], [first, b""], [b""], [first, second + first]),
    ):
        with pytest.raises(PermissionDenied):
            await resume(wrong)


async def test_ids_are_of_one_request_and_of_a_secret_that_is_known() -> None:
    ids = await stream(2)
    with pytest.raises(PermissionDenied):
        await resume(ids, digest=b"of another")
    with pytest.raises(PermissionDenied):
        await resume(ids, secrets=SECRETS[1:])
    found = await resume(ids, secrets=(b"newer yet", *SECRETS))
    assert found.drawn == DRAWN
    with pytest.raises(InvalidRequest):
        await resume(ids, secrets=())


# ---- long answers ----

# Events of a token each.
long = pytest.mark.parametrize("count", [40_000, pytest.param(200_000, marks=pytest.mark.slow)])


def long_ids(digest: bytes, secret: bytes, count: int) -> list[bytes]:
    ids = EventIds(hmac.digest(secret, digest, "sha256"), Drawn("id", 1_700_000_000, [5]))
    found = []
    for i in range(count):
        ids.add(0, TextDelta(0, "x", (SampledToken(i % 50_000),), None, None, "v"))
        found.append(ids.next())
    return found


def tokens_of(request: GenerationRequest) -> int:
    return sum(len(past.token_ids) for past in request.past)


async def turns_during(work: Awaitable[Any]) -> tuple[Any, int]:
    """The result, and how often the event loop turned meanwhile."""
    task, turns = asyncio.ensure_future(work), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0.001)
    return task.result(), turns


@long
async def test_a_long_stream_goes_on_and_the_loop_meanwhile(count: int) -> None:
    """More than some 31,000 were refused, by a bound that the error did not name."""
    ids = long_ids(DIGEST, SECRETS[0], count)
    found, turns = await turns_during(resumable(SECRETS, DIGEST, ids, generations()[:1], DRAWN))
    (goes_on,) = found.generations
    assert tokens_of(goes_on) == count and len(goes_on.past) < count / 500
    assert turns > count / MANY / 2


async def test_tokens_of_the_client_are_replayed_in_pieces(tmp_path: Path) -> None:
    past = tuple(Past(0, tuple(range(10, 60)) * 10, None, "v") for _ in range(40))
    request = replace(generations()[0], past=past, sampling=SamplingParams(max_tokens=20_000))
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    puts: list[Any] = []
    state = RequestState(request, puts.append, tokenizer, RoutingConfig())
    _, turns = await turns_during(state.replay())
    assert len(puts) == 40 and state.generated == [20_000] and state.version == "v"
    assert turns > 1


# ---- over HTTP and gRPC ----

SECRET = (b"a secret of the routers",)


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Site]:
    """Two clients' keys, `one` and `two`."""
    folder = byte_level_folder(tmp_path)
    async with serve(folder, keys=APIKeys("one,two"), event_keys=SECRET) as site:
        yield site


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_no_other_client_takes_up_a_stream(keyed: Site, path: str) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT}
    body = asked | {"stream": True, "resumable": True}
    begun = await keyed.post(path, body, Authorization="Bearer one")
    ids = [line[4:] for line in (await begun.text()).splitlines() if line.startswith("id: ")]
    assert begun.status == 200 and len(ids) > 2
    for key, changed, status in (
        ("one", {}, 200),
        ("two", {}, 403),
        ("one", {"max_tokens": 3}, 403),
        ("one", {"seed": 3}, 403),
        ("one", {"stop": "x"}, 403),
    ):
        taken = body | changed | {"resume": ids[:2]}
        answer = await keyed.post(path, taken, Authorization=f"Bearer {key}")
        assert answer.status == status, (key, changed)


async def test_no_other_client_or_request_shares_an_idempotency_key(keyed: Site) -> None:
    """An answer that is kept is found by its orphan key alone."""
    body = {"prompt": "a"}

    async def ask(key: str, name: str, **fields: Any) -> bytes:
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": name}
        answer = await keyed.post("/v1/completions", body | fields, **headers)
        assert answer.status == 200
        found = keyed.generator.requests[-1].key
        assert found is not None
        return found.job

    first = await ask("one", "k")
    assert first and await ask("one", "k") == first
    others = [
        await ask("two", "k"),
        await ask("one", "l"),
        await ask("one", "k", prompt="b"),
        await ask("one", "k", max_tokens=3),
    ]
    assert len({first, *others}) == 5


@long
@pytest.mark.parametrize("path", ["/v1/completions", "grpc"])
async def test_a_long_stream_is_taken_up(
    tmp_path: Path, path: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[bytes] = []
    real = event_ids.resumable

    async def noting(secrets: Any, digest: bytes, *others: Any) -> Resumable:
        digests.append(digest)
        return await real(secrets, digest, *others)

    monkeypatch.setattr(event_ids, "resumable", noting)
    if path == "grpc":
        request = pb.GenerateRequest(text="a", resumable=True)
        generation = GenerationRequest("r", (1, 2), SamplingParams(seed=1))
        await grpc_resumable(SECRET, request, "one", generation, "id")
        request.resume.extend(long_ids(digests[0], SECRET[0], count))
        assert request.ByteSize() < 48 * count  # `RouterServer` takes so much for such a window
        found = await grpc_resumable(SECRET, request, "one", generation, "id")
        assert found is not None and tokens_of(found.generations[0]) == count
        return
    async with serve(byte_level_folder(tmp_path), event_keys=SECRET, limit=32 * 2**20) as site:
        body = {"prompt": "a", "stream": True, "resumable": True}
        await site.post(path, body)
        ids = [urlsafe_b64encode(each).decode() for each in long_ids(digests[0], SECRET[0], count)]
        answer = await site.post(path, body | {"resume": ids})
        assert answer.status == 200, await answer.text()
        assert tokens_of(site.generator.requests[-1]) == count


@pytest.mark.parametrize("change", ["api_key", "text", "max_tokens", "prompt"])
async def test_a_stream_over_grpc_is_of_one_request_and_key(change: str) -> None:
    asked: dict[str, Any] = {"api_key": "one", "text": "a", "max_tokens": 9, "prompt": (1, 2)}

    async def take(ids: Sequence[bytes], asked: dict[str, Any]) -> Resumable | None:
        sampling = pb.SamplingParams(max_tokens=asked["max_tokens"])
        request = pb.GenerateRequest(
            text=asked["text"], sampling=sampling, resumable=True, resume=ids
        )
        generation = GenerationRequest("r", asked["prompt"], SamplingParams(seed=1))
        return await grpc_resumable(SECRET, request, asked["api_key"], generation, "id")

    begun = await take([], asked)
    assert begun is not None
    begun.ids.add(0, TextDelta(0, "x", (SampledToken(7),)))
    ids = [begun.ids.next()]
    assert await take(ids, asked) is not None
    other = {"api_key": "two", "text": "b", "max_tokens": 8, "prompt": (1, 3)}
    with pytest.raises(PermissionDenied):
        await take(ids, asked | {change: other[change]})


def test_an_answer_that_has_begun_is_left_to_no_other_router(tmp_path: Path) -> None:
    """A node that goes on with it has not made its first tokens, which an adopter would need."""
    request = replace(generations()[0], key=AnswerKey(claim=b"c", job=b"j"))
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    state = RequestState(request, lambda _: None, tokenizer, RoutingConfig())
    assert state.job.orphan_key == b"j"
    state.take(TokenEvent(0, (SampledToken(7),)), "prefill", "v")
    assert state.job.orphan_key == b""


def test_a_stream_that_goes_on_counts_each_token_once(tmp_path: Path) -> None:
    """The client has what is replayed, so nothing is sent of it."""
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    body = CompletionBody(prompt="a", stream=True, stream_options=options)
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    choices = CompletionChoiceWriter(tokenizer, body, [], [[1, 2]])
    writer = OpenAIWriter("id", "m", body, choices, generations()[:1])
    deltas = [TextDelta(0, "x", (SampledToken(7), SampledToken(8))) for _ in range(3)]
    assert writer.write([(0, Replayed(deltas[0])), (0, Replayed(deltas[1]))]) == b""
    (event,) = writer.write([(0, deltas[2])]).split(b"\n\n")[:-1]
    usage = json.loads(event.removeprefix(b"data: "))["usage"]
    assert usage == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
