"""Absent endpoints say so, and point to the table of what is there."""

from __future__ import annotations

import pytest

from http_site import Site, check_error
from pdserve.router.http.absent import ABSENT
from pdserve.router.http.app import LORA_ROUTES, ROUTES


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/embeddings", "embeddings"),
        ("GET", "/v1/files", "files"),
        ("GET", "/v1/files/file-1/content", "files"),
        ("POST", "/v1/batches", "run-batch"),
        ("POST", "/v1/audio/transcriptions", "audio"),
        ("POST", "/v1/images/generations", "images"),
        ("POST", "/v1/moderations", "moderation"),
        ("POST", "/v1/rerank", "reranking"),
        ("POST", "/score", "scores"),
        ("POST", "/pooling", "pooling"),
        ("POST", "/v1/threads", "threads"),
        ("GET", "/v1/responses/resp-1", "stored"),
        ("DELETE", "/v1/responses/resp-1", "stored"),
        ("POST", "/v1/responses/compact", "stored"),
        ("GET", "/api/tags", "Ollama"),
    ],
)
async def test_absent_endpoints_name_themselves(
    site: Site, method: str, path: str, words: str
) -> None:
    async with site.session.request(method, site.url + path) as response:
        await response.read()
        error = await check_error(response, 404)
    assert error["code"] == "unsupported_endpoint" and error["type"] == "invalid_request_error"
    assert words in error["message"] and "docs/clients.md#supported-and-not" in error["message"]


async def test_other_unknown_paths_are_plain(site: Site) -> None:
    for path in ("/v1/embeddingsx", "/nothing", "/v1/filesystem"):
        async with site.session.get(site.url + path) as response:
            await response.read()
            assert (await check_error(response, 404))["code"] == "not_found"


async def test_absent_endpoints_of_anthropics_have_its_form(site: Site) -> None:
    body = await (await site.post("/v1/messages/batches", {})).json()
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert "run-batch" in body["error"]["message"]


def test_no_route_is_said_to_be_absent() -> None:
    for route in (*ROUTES, *LORA_ROUTES):
        assert not any(each.has(route.path) for each in ABSENT), route.path


async def test_models_have_anthropics_form_for_its_clients(site: Site) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    more = {"created_at": "2023-11-14T22:13:20Z", "max_input_tokens": 100, "lifecycle": "active"}
    cards = [
        {"type": "model", "id": name, "display_name": name, **more}
        for name in ("tiny/model", "alias")
    ]
    async with site.session.get(site.url + "/v1/models", headers=headers) as response:
        ends = {"first_id": "tiny/model", "last_id": "alias", "has_more": False}
        assert await response.json() == {"data": cards, **ends}
        assert response.headers["request-id"]
    path = site.url + "/v1/models/tiny/model"
    async with site.session.get(path, headers=headers) as response:
        assert await response.json() == cards[0]
    async with site.session.get(site.url + "/v1/models/odd", headers=headers) as response:
        assert (response.status, (await response.json())["error"]["type"]) == (
            404,
            "not_found_error",
        )
    async with site.session.get(path) as response:
        assert (await response.json())["object"] == "model"
