"""LoRA adapters of an `LLM`: vLLM's `LoRARequest`, and loading adapters on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from os.path import realpath

from pdserve.client.server import Server
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.core.errors import InvalidRequest, ModelNotFound
from pdserve.offline.local import TRIES


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter's name and its folder; the folder may be left out if it is loaded already."""

    lora_name: str
    lora_int_id: int = 0  # accepted for vLLM's programs; the name identifies the adapter
    lora_path: str | PathLike[str] = ""


Adapter = str | LoRARequest | None
"""The name of a loaded adapter, or a request to load one; None: the base model."""


def listed(given: Adapter | Sequence[Adapter], count: int) -> list[LoRARequest | None]:
    """Returns one entry per prompt.

    Raises:
        InvalidRequest: the number of adapters is not `count`, or one has another type.
    """
    each = [given] * count if given is None or isinstance(given, (str, LoRARequest)) else [*given]
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts have {len(each)} lora_requests")
    if bad := [one for one in each if not isinstance(one, (str, LoRARequest, type(None)))]:
        raise InvalidRequest(f"a lora_request is a name or a LoRARequest, not {bad[0]!r:.100}")
    return [LoRARequest(one) if isinstance(one, str) else one for one in each]


class LoadedAdapters:
    """Loads the adapters of `LoRARequest`s into a server and unloads the least recently used ones
    to make room. It asks the server what is loaded, because the server may have restarted."""

    def __init__(self, config: LoRAConfig) -> None:
        self._config = config
        self._brought: dict[str, None] = {}  # names loaded here, least recently used first
        self._in_use: Counter[str] = Counter()  # calls per adapter
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def using(
        self, server: Server, requests: Iterable[LoRARequest | None]
    ) -> AsyncIterator[None]:
        """Keeps the requests' adapters loaded inside the `async with` block.

        Raises:
            PdserveError: the server cannot load one, or not that many at once.
        """
        wanted = _paths(filter(None, requests))
        if wanted and not self._config.enable_lora:
            raise InvalidRequest("lora_request needs LLM(enable_lora=True)")
        self._in_use.update(wanted.keys())
        try:
            if any(wanted.values()):
                async with self._changing:
                    await self._bring(server, wanted)
            yield
        finally:
            self._in_use -= Counter(wanted.keys())

    async def _bring(self, server: Server, wanted: Mapping[str, str]) -> None:
        """Loads what is missing. All calls are idempotent, so they are retried."""
        cards = (await server.get("/v1/models", tries=TRIES))["data"]
        served = {card["id"]: card["root"] for card in cards if card["parent"] is not None}
        for name, path in wanted.items():
            if path and served.get(name) != path:
                spare = [
                    each for each in self._brought if each in served and not self._in_use[each]
                ]
                full = max(0, len(served) + 1 - self._config.max_loras)
                for each in [name] if name in served else spare[:full]:
                    with suppress(ModelNotFound):
                        await server.post(
                            "/v1/unload_lora_adapter", {"lora_name": each}, tries=TRIES
                        )
                    del served[each]
                    self._brought.pop(each, None)
                load = {"lora_name": name, "lora_path": path, "load_inplace": True}
                await server.post("/v1/load_lora_adapter", load, tries=TRIES)
                served[name] = path
                self._brought[name] = None
            if name in self._brought:
                self._brought[name] = self._brought.pop(name)


def _paths(requests: Iterable[LoRARequest]) -> dict[str, str]:
    """Returns name → folder; "" for an adapter that must be loaded already."""
    found: dict[str, str] = {}
    for each in requests:
        path = realpath(each.lora_path) if each.lora_path else ""
        if found.setdefault(each.lora_name, path) != path:
            raise InvalidRequest(f"lora_request: {each.lora_name} has two paths")
    return found
