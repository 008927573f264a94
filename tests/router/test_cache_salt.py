"""Whose cached blocks a request may find: `cache_salt`, and a salt of its own for each API key."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.config.router import RouterConfig, RoutingConfig, ServerConfig
from pdserve.common.core.block_hash import hash_blocks
from pdserve.common.core.errors import ConfigError, InvalidRequest
from pdserve.common.core.parameters import MAX_CACHE_SALT
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.sequence import Sequence
from pdserve.common.rpc.convert import job_from_pb, job_to_pb
from pdserve.router.api.auth import APIKeys
from pdserve.router.cluster.adapters import Adapter
from pdserve.router.requests.generation import GenerationRequest
from pdserve.router.requests.request_state import RequestState

TOKENS = list(range(20))


def test_hashes_of_two_adapters_are_never_equal() -> None:
    pairs = [(salt, adapter) for salt in ("", "a", "b") for adapter in ("", "a", "b", "0" * 32)]
    seen = {each for pair in pairs for each in hash_blocks(TOKENS, 4, *pair)}
    assert len(seen) == 5 * len(pairs)
    of_a = Sequence(0, SamplingParams(), list(TOKENS), len(TOKENS), adapter="a")
    assert of_a.hashes(4) == hash_blocks(TOKENS, 4, adapter="a")


def test_a_job_carries_its_salt_wherever_it_goes_on() -> None:
    job = GenerateJob("r", (1, 2, 3), SamplingParams(), cache_salt="a", adapter="b")
    assert job_from_pb(job_to_pb(job)) == job
    adapter = Adapter("name", "/folder", digest="b")
    request = GenerationRequest(
        "r", (1, 2, 3), SamplingParams(), skip_special_tokens=False, cache_salt="a", adapter=adapter
    )
    after_failure: Any = RequestState(
        request,
        lambda update: None,
        None,  # type: ignore[arg-type]
        RoutingConfig(),
    )
    same = {"adapter": "b", "client": request.batch.alias}
    again = GenerateJob("r", (1, 2, 3), SamplingParams(), (Choice(),), "a", **same)
    assert after_failure.job == again


def salt(keys: APIKeys, key: str, given: str | None = None) -> str:
    return keys.cache_salt(keys.client(f"Bearer {key}", "10.0.0.1"), given)


def test_a_salt_is_the_request_s_own() -> None:
    keys = APIKeys("one, two")
    assert salt(keys, "one") == salt(keys, "two") == ""
    assert salt(keys, "one", "s") == salt(keys, "two", "s") == "s"


@pytest.mark.parametrize("given", ["", "x" * (MAX_CACHE_SALT + 1)])
def test_a_salt_that_is_none_is_the_clients_fault(given: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        APIKeys().cache_salt("", given)
    assert caught.value.param == "cache_salt"


def test_the_option_needs_keys() -> None:
    with pytest.raises(ConfigError, match="needs --api-key"):
        ServerConfig(cache_salt_per_key=True)
    RouterConfig(server=ServerConfig(cache_salt_per_key=True, api_key="one"))
