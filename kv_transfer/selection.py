"""Which connectors there are and which a node speaks: `--kv-connector`, resolved at start."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.common.config.node import TransferConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import resolve
from pdserve.kv_transfer.connector import API_VERSION, Capabilities, KVConnector

BUILTIN = {
    "cuda_ipc": "pdserve.kv_transfer.connectors.cuda_ipc:CudaIpcConnector",
    "nccl": "pdserve.kv_transfer.connectors.nccl.connector:NCCLConnector",
    "shm": "pdserve.kv_transfer.connectors.shm:ShmConnector",
    "tcp": "pdserve.kv_transfer.connectors.tcp:TCPConnector",
}
ENTRY_POINTS = "pdserve.kv_connectors"
REMOVED = {"shared": "use shm, or serve a CPU host with pdserve up --both, which moves no KV"}
# What `auto` stands for, by the device of the cache; the best first. cuda_ipc and nccl have not
# run on a GPU yet: they join when they have; until then they must be named.
AUTO = {"cpu": ("shm", "tcp"), "cuda": ("tcp",)}

Connectors = dict[str, dict[str, Any]]
"""The options of each connector by its name, the preferred first."""

logger = logging.getLogger(__name__)


def load_connector(name: str) -> type[KVConnector]:
    """The connector a name stands for: a built-in, an entry point or "module:Class".

    Raises:
        ConfigError: there is none, or it speaks another API version.
    """
    if name in REMOVED:
        raise ConfigError(f"--kv-connector {name} was removed: {REMOVED[name]}")
    kind: type[KVConnector] = resolve(name, BUILTIN, ENTRY_POINTS)
    if kind.api_version != API_VERSION:
        raise ConfigError(
            f"connector {name!r} speaks API version {kind.api_version}, "
            f"this is {API_VERSION}; install a matching release of it"
        )
    return kind


def choose_connectors(config: TransferConfig, device: str) -> Connectors:
    """The connectors of a node whose cache is on `device` ("cpu", "cuda"), best first.

    Raises:
        ConfigError: no such connector, named twice, or options for none of them.
    """
    auto = config.kv_connector == "auto"
    asked = AUTO[device] if auto else [name.strip() for name in config.kv_connector.split(",")]
    known = {name: load_connector(name).capabilities for name in asked}
    if len(known) < len(asked):
        raise ConfigError(f"--kv-connector {config.kv_connector}: a name comes twice")
    names = auto_connectors(device, known) if auto else asked
    why = f" (auto: {device.upper()} cache)" if auto else ""
    logger.info("KV connectors: %s%s", ", ".join(names), why)
    if len(names) == 1 and not auto:
        return {names[0]: config.kv_connector_config}
    return _with_options(names, config.kv_connector_config)


def auto_connectors(device: str, known: Mapping[str, Capabilities]) -> tuple[str, ...]:
    """The preferred connectors that declare that they can move a cache on `device`, best first.
    Whether a peer is on the same host, as some need, is seen transfer by transfer."""
    return tuple(name for name in AUTO[device] if device in known[name].devices)


def _with_options(names: Sequence[str], given: Mapping[str, Any]) -> Connectors:
    """Options of several connectors, by name."""
    if strangers := sorted(set(given) - set(names)):
        raise ConfigError(
            f"--kv-connector-config has options for {', '.join(strangers)}, but the connectors "
            f'are {", ".join(names)}; for several it is {{"NAME": {{…}}}}'
        )
    for name, options in given.items():
        if not isinstance(options, dict):
            raise ConfigError(f"--kv-connector-config: the options of {name} are no JSON object")
    return {name: given.get(name, {}) for name in names}
