"""B8: what all clients feel is for operators, and a timeline is there for the key that asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry
from yarl import URL

from fake_nodes import VOCAB_SIZE, FakeCluster, fake_cluster
from fakes_pipeline import byte_level_folder, served_model
from pdserve.cli import top, trace
from pdserve.cli.cluster import own_session
from pdserve.common.config.options import to_environment, to_flags
from pdserve.common.config.router import RouterConfig, ServerConfig
from pdserve.common.core.errors import ConfigError, PdserveError, PermissionDenied
from pdserve.common.rpc.pb import inference_pb2, inference_pb2_grpc
from pdserve.common.rpc.server import GrpcServer
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.offline.local import with_keys
from pdserve.router.api.app_state import AppState
from pdserve.router.api.auth import APIKeys
from pdserve.router.cluster.adapter_sync import AdapterSync
from pdserve.router.grpc.service import InferenceServicer
from pdserve.router.http.app import make_app
from pdserve.router.http.server import HTTPServer

OPERATORS_PATHS = {
    "/v1/cluster": "GET",
    "/v1/cluster/history": "GET",
    "/v1/cluster/targets": "GET",
    "/reset_prefix_cache": "POST",
    "/v1/load_lora_adapter": "POST",
    "/v1/unload_lora_adapter": "POST",
}
BODY = {"prompt": "a", "max_tokens": 4}


class Site:
    """A router's HTTP and gRPC ports over a pipeline whose nodes are fake."""

    def __init__(self, cluster: FakeCluster, url: str, grpc_port: int, session: ClientSession):
        self.cluster, self.url, self.grpc_port, self.session = cluster, url, grpc_port, session

    async def call(
        self, method: str, path: str, key: str | None, **options: Any
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= options.pop("headers", {})
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, headers=headers, **options) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else {}

    async def complete(self, key: str | None, name: str) -> None:
        headers = {"X-Request-Id": name}
        status, body = await self.call("POST", "/v1/completions", key, json=BODY, headers=headers)
        assert status == 200, body

    async def found(self, key: str | None, name: str) -> list[int]:
        """The lengths of the prompts of the timelines of this name."""
        status, body = await self.call("GET", f"/v1/timelines/{name}", key)
        assert status == (200 if "data" in body else 404)
        return [each["prompt_tokens"] for each in body.get("data", ())]


@asynccontextmanager
async def serve(
    folder: Path, keys: APIKeys, root_path: str = "", **options: Any
) -> AsyncIterator[Site]:
    tokenizer = Tokenizer.from_folder(byte_level_folder(folder / "tokenizer"))
    async with fake_cluster(folder / "cluster", ("p0", "d0"), **options) as cluster:
        model = served_model(tokenizer, vocab_size=VOCAB_SIZE)
        serving = AppState(pipeline=cluster.pipeline, served=model, keys=keys)
        no_adapters = cast(AdapterSync, object())  # bodies without a name do not come so far
        registry = CollectorRegistry()
        app = make_app(serving, registry, 1 << 16, root_path=root_path, adapters=no_adapters)
        server = await HTTPServer.start(app, "127.0.0.1", 0)
        grpc_server = GrpcServer()
        grpc_server.add(
            inference_pb2.DESCRIPTOR.services_by_name["Inference"],
            inference_pb2_grpc.add_InferenceServicer_to_server,
            InferenceServicer(serving),
        )
        port = grpc_server.bind("127.0.0.1", 0)
        await grpc_server.start()
        try:
            async with ClientSession() as session:
                yield Site(cluster, f"http://127.0.0.1:{server.port}", port, session)
        finally:
            await grpc_server.stop(0)
            await server.stop(drain_timeout=0)


@pytest.mark.parametrize(
    ("keys", "admin_keys", "may", "may_not"),
    [
        (None, None, [None, "any"], []),
        ("one", None, ["one"], []),
        ("one, two", None, [], ["one", "two"]),
        ("one, two", "boss, spare", ["boss", "spare"], ["one", "two"]),
        ("one", "boss", ["boss"], ["one"]),
        (None, "boss", ["boss"], [None, "any"]),
    ],
)
async def test_paths_that_affect_all_clients_are_for_operators(
    tmp_path: Path, keys: str | None, admin_keys: str | None, may: list[str], may_not: list[str]
) -> None:
    async with serve(tmp_path, APIKeys(keys, admin_keys)) as site:
        for path, method in OPERATORS_PATHS.items():
            options: dict[str, Any] = {} if method == "GET" else {"json": {}}
            for key in may:
                status, body = await site.call(method, path, key, **options)
                assert status == (400 if "lora" in path else 200), (path, key, body)
            for key in may_not:
                status, body = await site.call(method, path, key, **options)
                assert status == 403, (path, key)
                error = body["error"]
                assert (error["type"], error["code"]) == ("permission_error", "permission_denied")
                assert "--admin-api-key" in error["message"]
        for key in [*may, *may_not]:  # all of them may ask for tokens
            await site.complete(key, "mine")
            assert (await site.call("GET", "/v1/models", key))[0] == 200


async def test_no_spelling_of_a_path_leads_around_it(tmp_path: Path) -> None:
    keys = APIKeys("one, two", "boss")
    async with serve(tmp_path, keys, root_path="/v1") as site:
        for path in ("/v1/cluster", "/v1/v1/cluster", "/v1/clu%73ter", "/%76%31/cluster"):
            for method in ("GET", "HEAD"):
                assert (await site.call(method, path, "one"))[0] == 403, path
                assert (await site.call(method, path, "boss"))[0] == 200, path
        for path in ("//v1/cluster", "/v1/cluster/", "/v1/models/../cluster"):
            assert (await site.call("GET", path, "one"))[0] in (403, 404), path
        headers = {"X-Api-Key": "boss"}  # as Anthropic's clients show a key
        assert (await site.call("GET", "/v1/cluster", None, headers=headers))[0] == 200


@pytest.mark.parametrize("admin_keys", [None, "boss"])
async def test_a_timeline_is_there_for_its_key_alone(
    tmp_path: Path, admin_keys: str | None
) -> None:
    """Though another one asks under the same name, and while it is served, too."""
    async with serve(tmp_path, APIKeys("one, two", admin_keys)) as site:
        await site.complete("one", "mine")
        assert await site.found("one", "mine") == [1]
        assert await site.found("two", "mine") == []
        unknown = await site.call("GET", "/v1/timelines/none", "two")
        others = await site.call("GET", "/v1/timelines/mine", "two")
        assert others[0] == 404
        told = others[1]["error"]["message"].replace("'mine'", "'none'")
        assert told == unknown[1]["error"]["message"]  # it says nothing of whether there is one
        gate = asyncio.Event()

        async def waits(context: object) -> None:
            await gate.wait()

        site.cluster["d0"].on_token[2] = waits
        served = asyncio.create_task(site.complete("two", "mine"))
        while not await site.found("two", "mine"):
            await asyncio.sleep(0.01)
        assert len(await site.found("one", "mine")) == 1
        if admin_keys:
            assert len(await site.found("boss", "mine")) == 2
        gate.set()
        await served


async def test_a_timeline_of_a_call_over_grpc_is_its_keys(tmp_path: Path) -> None:
    async with serve(tmp_path, APIKeys("one, two", "boss")) as site:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{site.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(
                text="ab", request_id="mine", sampling=inference_pb2.SamplingParams(max_tokens=3)
            )
            for key in ("one", "boss"):  # an admin key is an API key
                metadata = (("authorization", f"Bearer {key}"),)
                assert [each async for each in stub.Generate(request, metadata=metadata)]
        assert [len(await site.found(key, "mine")) for key in ("one", "two", "boss")] == [1, 0, 2]


async def test_with_an_admin_key_alone_a_timeline_is_its_addresses(tmp_path: Path) -> None:
    async with serve(tmp_path, APIKeys(None, "boss")) as site:
        await site.complete(None, "mine")
        assert await site.found(None, "mine") == await site.found("boss", "mine") == [1]
        found = site.cluster.pipeline.timelines.find
        assert not found("mine", "192.0.2.1") and found("mine", "127.0.0.1")


async def test_tools_of_operators_show_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(command: Callable[[Sequence[str]], int], *arguments: str) -> int:
        return await asyncio.to_thread(command, [*arguments, "--url", site.url])

    monkeypatch.delenv("PDSERVE_ADMIN_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "one")
    async with serve(tmp_path, APIKeys("one, two", "boss, spare")) as site:
        await site.complete("two", "mine")
        with pytest.raises(PermissionDenied, match="it needs a key of --admin-api-key"):
            await run(top.main, "--once")
        with pytest.raises(PdserveError, match="no request in flight"):
            await run(trace.main, "mine")
        monkeypatch.setenv("PDSERVE_ADMIN_API_KEY", "boss, spare\n")
        assert await run(top.main, "--once", "--json") == 0
        assert await run(trace.main, "mine") == 0
        assert "finished" in capsys.readouterr().out
        monkeypatch.delenv("PDSERVE_ADMIN_API_KEY")
        monkeypatch.setenv("OPENAI_API_KEY", "spare")  # which is one, too
        assert await run(top.main, "--once", "--json") == 0


def test_keys_of_operators_are_as_secret_as_clients() -> None:
    config = RouterConfig(server=ServerConfig(api_key="one", admin_api_key="boss"))
    assert to_flags(config) == []
    environment = {"PDSERVE_API_KEY": "one", "PDSERVE_ADMIN_API_KEY": "boss"}
    assert to_environment(config) == environment
    keys = APIKeys("one", "boss")
    assert "boss" not in repr(vars(keys))
    for wrong in (None, "", "boss", "Basic boss", "Bearer ", "Bearer bos", "Bearer \udc80"):
        with pytest.raises(PermissionDenied):
            keys.check_operator(wrong)
    for empty in ("", "a,", " "):
        with pytest.raises(ConfigError, match="--admin-api-key has an empty key"):
            APIKeys("one", empty)
    with pytest.raises(ConfigError, match="--admin-api-key has a key of --api-key"):
        APIKeys("one, two", "three, two")


@pytest.mark.parametrize(
    ("keys", "admin_keys", "shown"),
    [("one", None, "one"), ("one,two", "boss, spare", "boss"), ("one", "boss", "boss")],
)
async def test_a_cluster_of_ones_own_is_asked_as_an_operator(
    keys: str, admin_keys: str | None, shown: str
) -> None:
    async with own_session(with_keys(ServerConfig(api_key=keys, admin_api_key=admin_keys))) as own:
        assert own.headers["Authorization"] == f"Bearer {shown}"
    server = with_keys(ServerConfig(api_key="one,two"))
    made = APIKeys(server.api_key, server.admin_api_key)
    async with own_session(server) as own:
        made.check_operator(own.headers["Authorization"])


async def test_a_client_that_asks_much_does_not_drive_out_timelines_of_others(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path, APIKeys("one, two"), kept_timelines=4) as site:
        await site.complete("one", "early")
        for number in range(6):
            await site.complete("two", f"of-two-{number}")
        assert len(await site.found("one", "early")) == 1
        kept = [len(await site.found("two", f"of-two-{number}")) for number in range(6)]
        assert kept == [0, 0, 0, 1, 1, 1]
        await site.complete("one", "late")
        assert [len(await site.found("one", name)) for name in ("early", "late")] == [1, 1]
        assert await site.found("two", "of-two-3") == []
