"""Pages of other origins: which may use the server, and that requests of the others have no
effect."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from http_site import Site
from pdserve.common.config.router import ServerConfig
from pdserve.common.core.errors import PermissionDenied
from pdserve.router.http.cors import ALL, CORS

EVIL = "https://evil.example"
BODY = b'{"prompt": "a"}'
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def send(site: Site, method: str, path: str, **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and error of a request without a Content-Type."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with site.session.request(
        method, site.url + path, data=BODY, headers=headers, skip_auto_headers=["Content-Type"]
    ) as response:
        is_error = response.status >= 400
        return (
            response.status,
            response.headers,
            (await response.json())["error"] if is_error else 0,
        )


def no_cors(headers: Mapping[str, str]) -> bool:
    return not [name for name in headers if name.startswith("Access-Control-")]


REQUESTS = [
    ("POST", "/v1/completions"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/ping"),
    ("GET", "/v1/models"),
    ("OPTIONS", "/v1/completions"),
    ("POST", "/nothing"),
]


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_a_foreign_page_s_request_has_no_effect(site: Site, method: str, path: str) -> None:
    """Without a Content-Type browsers send it without asking first."""
    for origin in (EVIL, "null", "http://localhost.evil.example", "file://", "localhost", "*"):
        status, headers, error = await send(site, method, path, Origin=origin, **PREFLIGHT)
        assert (status, error["code"]) == (403, "origin_not_allowed"), origin
        assert error["type"] == "permission_error" and "--allowed-origins" in error["message"]
        assert no_cors(headers) and headers["Vary"] == "Origin"
    assert not site.generator.requests


@pytest.mark.parametrize(
    "origin",
    ["http://localhost", "https://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:1"],
)
async def test_pages_on_localhost_may_ask_with_an_sdks_headers(site: Site, origin: str) -> None:
    path = "/v1/completions"
    assert (await send(site, "POST", path, Origin=origin))[0] == 200
    status, headers, _ = await send(site, "OPTIONS", path, Origin=origin, **PREFLIGHT)
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, origin)
    assert headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert headers["Access-Control-Allow-Methods"] == "OPTIONS, POST"


async def test_its_own_pages_may_ask(site: Site) -> None:
    host = {"Host": "gpu.example:8000"}
    for path in ("/", "/ui", "/docs"):  # a link on any page leads there
        assert (await send(site, "GET", path, **host, Sec_Fetch_Site="cross-site"))[0] == 200
    path = "/v1/completions"
    assert (await send(site, "POST", path, **host, Origin="http://gpu.example:8000"))[0] == 200
    for origin in ("http://gpu.example", "http://gpu.example:8001", "http://example:8000"):
        assert (await send(site, "POST", path, **host, Origin=origin))[0] == 403


async def test_a_proxy_that_changes_the_host(site: Site) -> None:
    """The browser itself says that it is the same origin; other headers say what a client likes."""
    path, page = "/v1/completions", {"Origin": "https://llm.example"}
    assert (await send(site, "POST", path, **page, Sec_Fetch_Site="same-origin"))[0] == 200
    told = {"X_Forwarded_Host": "llm.example", "Forwarded": "host=llm.example"}
    assert (await send(site, "POST", path, **page, **told))[0] == 403
    assert (await send(site, "POST", path, **page, Host="llm.example"))[0] == 200
    assert (await send(site, "POST", path, **page, Host="llm.example:443"))[0] == 200


async def test_a_form_of_another_site_without_an_origin_is_refused(site: Site) -> None:
    path = "/reset_prefix_cache"
    for value, expected in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        assert (await send(site, "POST", path, Sec_Fetch_Site=value))[0] == expected
    assert (await send(site, "POST", path))[0] == 200  # no browser


async def test_every_answer_to_a_page_that_may_not_ask_is_without_leave(site: Site) -> None:
    """Answers to requests that do not parse have them, too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"GET / HTTP/1.1\r\nOrigin: https://evil.example\r\nno colon\r\n\r\n")
    async with asyncio.timeout(60):
        assert b"access-control" not in (await reader.read()).lower()
    writer.close()


# ---- which pages ----------------------------------------------------------------------------


def may(cors: CORS, method: str = "POST", **headers: str) -> bool:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        cors.check(method, given)
    except PermissionDenied:
        return False
    return True


def test_with_keys_every_page_may_ask_as_with_vllm_and_named_origins_win() -> None:
    assert may(CORS.of(ServerConfig(api_key="secret")), Origin=EVIL)
    assert not may(CORS.of(ServerConfig()), Origin=EVIL)
    named = CORS.of(ServerConfig(api_key="secret", allowed_origins=["http://a", "null"]))
    assert may(named, Origin="http://a") and may(named, Origin="null")
    assert not may(named, Origin=EVIL) and not may(named, Origin="http://localhost")
    assert may(named, Origin="http://b:1", Host="b:1", Sec_Fetch_Site="same-origin")
    everyone = CORS.of(ServerConfig(allowed_origins=["*"]))
    assert may(everyone, Origin=EVIL) and may(everyone, Sec_Fetch_Site="cross-site")
    assert everyone.allowed({"Origin": EVIL})["Access-Control-Allow-Origin"] == "*"


def test_a_name_that_was_made_to_lead_to_loopback_is_foreign() -> None:
    """DNS rebinding: the page's own name leads to this host by now."""
    rebound = {"Origin": "http://evil.example:8000", "Host": "evil.example:8000"}
    assert not may(CORS.of(ServerConfig(host="127.0.0.1")), **rebound)
    assert may(CORS.of(ServerConfig(host="0.0.0.0")), **rebound)  # it may be this host's name
    named = ["http://evil.example:8000"]
    assert may(CORS.of(ServerConfig(host="127.0.0.1", allowed_origins=named)), **rebound)
    for host in ("10.0.0.5:8000", "[fe80::1]:8000", "pd.localhost:8000"):
        assert may(CORS.of(ServerConfig(host="127.0.0.1")), Origin=f"http://{host}", Host=host)


def test_only_these_origins() -> None:
    cors = CORS(["http://a"], ["POST"], ["X-A"], credentials=True)
    allowed = cors.allowed({"Origin": "http://a"})
    assert allowed["Access-Control-Allow-Origin"] == "http://a"
    assert (allowed["Access-Control-Allow-Credentials"], allowed["Vary"]) == ("true", "Origin")
    assert cors.allowed({"Origin": "http://b"}) == cors.allowed({}) == {"Vary": "Origin"}
    told = cors.preflight({"Access-Control-Request-Headers": "X-B"}, ["GET", "POST"])
    assert told["Access-Control-Allow-Headers"] == "X-A"
    assert told["Access-Control-Allow-Methods"] == "POST"
    # With cookies `*` would be no answer.
    anyone = CORS(ALL, credentials=True).allowed({"Origin": "http://b"})
    assert anyone["Access-Control-Allow-Origin"] == "http://b"
