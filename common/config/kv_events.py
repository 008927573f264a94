"""The option of KV events for others' tools and the fields of its JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pdserve.common.config.shared import option
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import nearest

FLAG = "--kv-events-config"
MAX_KEPT = 1_000_000  # batches
_ENDPOINT = re.compile(r"tcp://\S+:(?P<port>\d+)|ipc://\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsOptions:
    """KV events"""

    kv_events_config: dict[str, Any] = option(
        {},
        "publish changes of the prefix cache over ZeroMQ, as JSON with vLLM's fields: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://lo:5557", "replay_endpoint": '
        '"tcp://lo:5558", "topic": "", "buffer_steps": 10000, "hwm": 100000}; tcp://*:PORT lets '
        "other hosts connect, and anyone who connects can read the prompts' token ids; each "
        "further replica, and with up each further node, uses the next port",
    )

    def __post_init__(self) -> None:
        _ = self.kv_events

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """The parsed option, None if nothing is to be published. Raises ConfigError for invalid
        JSON fields."""
        parsed = KVEventsConfig.read(self.kv_events_config)
        return parsed if parsed.enable_kv_cache_events and parsed.publisher == "zmq" else None

    def moved(self, count: int) -> KVEventsOptions:
        """Returns the option with ports moved up by `count`, for a node on a host where `count`
        replicas of earlier nodes use the ports below."""
        if self.kv_events is None:
            return self
        endpoint, replay = self.kv_events.of_replica(count)
        ends = {"endpoint": endpoint, "replay_endpoint": replay}
        return KVEventsOptions(kv_events_config={**self.kv_events_config, **ends})


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The fields of --kv-events-config; names and defaults are vLLM's."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://lo:5557"  # bound or connected to: `is_bound`
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches that are kept for replay
    hwm: int = 100_000  # batches queued for a slow subscriber; further ones are dropped
    max_queue_size: int = 100_000  # without effect: batches wait in no other queue
    topic: str = ""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> KVEventsConfig:
        kinds = {each.name: each.default for each in fields(cls)}
        for key, value in given.items():
            if key not in kinds:
                advice = nearest(key, kinds) or f"choose one of: {', '.join(kinds)}"
                raise ConfigError(f"{FLAG}: unknown key {key!r}; {advice}")
            _check(key, value, kinds[key])
        if given and "enable_kv_cache_events" not in given:
            raise ConfigError(f"{FLAG}: nothing is published without enable_kv_cache_events")
        return cls(**given)

    def of_replica(self, replica: int) -> tuple[str, str | None]:
        """Returns the endpoints of a replica."""
        replay = self.replay_endpoint
        return _moved(self.endpoint, replica), replay and _moved(replay, replica)


def is_bound(endpoint: str) -> bool:
    """Returns whether subscribers connect to the endpoint, as vLLM decides, or on the loopback
    interface; otherwise the node connects to a subscriber there."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "tcp://lo:"))


def _check(key: str, value: Any, default: Any) -> None:
    if key.endswith("endpoint"):
        if value is None and key == "replay_endpoint":
            return
        found = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
        if found is None or int(found["port"] or 1) > 65535:
            raise ConfigError(f"{FLAG}: {key} must be like tcp://*:5557 or ipc:///path")
    elif key == "publisher":
        if value not in ("zmq", "null"):
            raise ConfigError(f"{FLAG}: publisher must be zmq or null")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{FLAG}: {key} must be true or false")
    elif isinstance(default, int):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_KEPT:
            raise ConfigError(f"{FLAG}: {key} must be a whole number from 1 to {MAX_KEPT}")
    elif not isinstance(value, str):
        raise ConfigError(f"{FLAG}: {key} must be text")


def _moved(endpoint: str, replica: int) -> str:
    if not replica:
        return endpoint
    if endpoint.startswith("ipc:"):
        return f"{endpoint}_dp{replica}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + replica}"
