"""All around the generations: requests that are none, other origins, names, the description of the
API, and what a checkpoint's files say of requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fakes_pipeline import byte_level_folder
from http_site import CHAT, Site, serve
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.router.api.sampling import make_sampling
from pdserve.router.api.trial import load_tried
from pdserve.router.cluster.served_model import load_served_model
from pdserve.router.http.app import ROUTES

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def raw(site: Site, request: bytes) -> tuple[int, dict[str, str], dict[str, Any], bool]:
    """Status, headers, body, and whether the connection stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(request)
    async with asyncio.timeout(30):
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        is_open = (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    return int(status.split()[1]), headers, body, is_open


MALFORMED: dict[str, bytes] = {
    "no HTTP": b"garbage\r\n\r\n",
    "unknown method": b"FOO /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "long line": b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    "bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "escapes": b"GET / HTTP/1.1\r\nHost: a\r\nno colon \x1b[31m\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED)
async def test_invalid_requests_get_an_error_and_a_log_line(
    site: Site, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    caplog.set_level(logging.INFO)
    status, headers, body, is_open = await raw(site, request_)
    assert status == 400 and not is_open
    assert set(body) == {"error"} and body["error"]["type"] == "invalid_request_error"
    assert headers["content-type"] == "application/json" and headers["x-request-id"]
    (record,) = [each for each in caplog.records if each.name.startswith("pdserve")]
    assert record.levelno == logging.INFO and not record.exc_info
    assert "\n" not in record.getMessage() and "\x1b" not in record.getMessage()


# ---- methods and origins --------------------------------------------------------------------


async def options(site: Site, path: str, **headers: str) -> dict[str, str]:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with site.session.options(site.url + path, headers=headers) as response:
        return {"status": str(response.status), **response.headers}


async def test_options_and_head(site: Site) -> None:
    assert (await options(site, "/v1/completions"))["Allow"] == "OPTIONS, POST"
    assert (await options(site, "/v1/models"))["Allow"] == "GET, HEAD, OPTIONS"
    assert (await options(site, "/nothing"))["status"] == "404"
    for path, status in (("/health", 200), ("/v1/models", 200), ("/v1/completions", 405)):
        async with site.session.head(site.url + path) as response:
            assert response.status == status and not await response.read()
    async with site.session.get(site.url + "/v1/completions") as response:
        assert response.status == 405 and "POST" in response.headers["Allow"]


# ---- names and numbers ----------------------------------------------------------------------


async def get(site: Site, path: str) -> Any:
    async with site.session.get(site.url + path) as response:
        assert response.status == 200
        return json.loads(await response.read() or b"null")


async def test_load_and_ping(site: Site) -> None:
    assert await get(site, "/load") == {"server_load": 0}
    assert await get(site, "/ping") is None
    assert (await site.post("/ping", b"")).status == 200


async def test_a_root_path(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path), root_path="/llm") as site:
        for prefix in ("", "/llm"):
            assert (await site.post(f"{prefix}/v1/completions", {"prompt": "a"})).status == 200
            assert await get(site, f"{prefix}/health") is None
        assert (await get(site, "/openapi.json"))["servers"] == [{"url": "/llm"}]


# ---- the description ------------------------------------------------------------------------


async def test_the_description_has_every_route_and_body(site: Site) -> None:
    spec = await get(site, "/openapi.json")
    paths = {(method.upper(), path) for path, one in spec["paths"].items() for method in one}
    assert paths == {(route.method, route.path) for route in ROUTES}
    for name in set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(spec))):
        assert name in spec["components"]["schemas"]
    schemas = spec["components"]["schemas"]
    temperature = schemas["CompletionBody"]["properties"]["temperature"]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 100)
    for name, body in (
        ("ChatBody", {"messages": CHAT, "n": 2}),
        ("CompletionBody", {"prompt": [1]}),
    ):
        schema = {"$ref": f"#/components/schemas/{name}", "components": spec["components"]}
        validator = Draft202012Validator(schema)
        validator.validate({**body, "stop": ["a"], "temperature": 0.5})
        assert not validator.is_valid({**body, "temperature": 101})


async def test_the_page_needs_no_other_host(site: Site) -> None:
    async with site.session.get(site.url + "/docs") as response:
        page = await response.text()
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "/v1/chat/completions" in page and "max_completion_tokens" in page
    assert not re.findall(r"(?:src|href)=.(?:https?:)?//", page)


# ---- --generation-config, --chat-template ----------------------------------------------------


def written(folder: Path, **found: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(found))
    return str(folder)


def model_config(**options: Any) -> ModelConfig:
    return ModelConfig(model=str(MODELS / "llama-gqa"), **options)


def test_a_checkpoints_defaults(tmp_path: Path) -> None:
    folder = written(tmp_path, temperature=0.25, top_k=7, do_sample=True, max_length=9)
    model = load_served_model(model_config(generation_config=folder))
    assert make_sampling({}, model, 5).temperature == 0.25
    assert make_sampling({"temperature": None}, model, 5).top_k == 7
    assert make_sampling({"temperature": 1, "top_k": -1}, model, 5).top_k == 0
    plain = load_served_model(model_config(generation_config="vllm", served_model_name=["a", "b"]))
    assert make_sampling({}, plain, 5).temperature == 1 and plain.names == ("a", "b")


@pytest.mark.parametrize(
    "options",
    [
        {"generation_config": "/nowhere"},
        {"chat_template": "/nowhere.jinja"},
        {"chat_template": "{% if %}"},
    ],
)
def test_files_that_cannot_be_used(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        load_tried(model_config(**options))


def test_a_checkpoints_default_that_no_request_may_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="temperature must be"):
        load_served_model(model_config(generation_config=written(tmp_path, temperature=-1)))


def test_another_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "t.jinja").write_text(template)
    for given in (template, str(tmp_path / "t.jinja")):
        tokenizer = load_served_model(model_config(chat_template=given)).tokenizer
        assert tokenizer.render_chat_template(CHAT) == "[hello]"
