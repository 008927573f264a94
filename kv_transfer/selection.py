"""The connectors of a node: the known ones, those it uses (`--kv-connector`) and the configuration
from which its ranks build them. All of it is settled before the ranks start."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from pdserve.common.config.node import TransferConfig, WorkerNodeConfig
from pdserve.common.config.shared import TLSConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import resolve
from pdserve.common.rpc.auth import ClusterKey
from pdserve.kv_transfer.connector import API_VERSION, Capabilities, KVConnector
from pdserve.kv_transfer.layout import fingerprint

BUILTIN = {
    "cuda_ipc": "pdserve.kv_transfer.connectors.cuda_ipc:CudaIpcConnector",
    "nccl": "pdserve.kv_transfer.connectors.nccl.connector:NCCLConnector",
    "shm": "pdserve.kv_transfer.connectors.shm:ShmConnector",
    "tcp": "pdserve.kv_transfer.connectors.tcp:TCPConnector",
}
ENTRY_POINTS = "pdserve.kv_connectors"
REMOVED = {"shared": "use shm, or serve a CPU host with pdserve up --both, which moves no KV"}
# The connectors of `auto`, by the device of the cache, the best first.
PREFERRED = {"cpu": ("shm", "tcp"), "cuda": ("cuda_ipc", "nccl", "tcp")}
# Those that have not moved KV on their hardware yet must be named. One leaves this set once its
# tests in `tests/gpu` have passed on a GPU.
NEVER_RUN = frozenset({"cuda_ipc", "nccl"})
AUTO = {
    device: tuple(name for name in names if name not in NEVER_RUN)
    for device, names in PREFERRED.items()
}
KEY_PURPOSE = "KV connections"  # ranks and plugins get a key for this, not the cluster's
RANK_FACTORY = "pdserve.kv_transfer.rank.worker_connector:build_worker_connector"

Connectors = dict[str, dict[str, Any]]
"""Options by connector, the preferred connector first."""

logger = logging.getLogger(__name__)


def load_connector(name: str) -> type[KVConnector]:
    """Loads the connector of a name: a built-in, an entry point or "module:Class".

    Raises:
        ConfigError: there is no such connector, or it has another API version.
    """
    if name in REMOVED:
        raise ConfigError(f"--kv-connector {name} was removed: {REMOVED[name]}")
    kind: type[KVConnector] = resolve(name, BUILTIN, ENTRY_POINTS, "--kv-connector")
    if kind.api_version != API_VERSION:
        raise ConfigError(
            f"connector {name!r} speaks API version {kind.api_version}, "
            f"this is {API_VERSION}; install a matching release of it"
        )
    return kind


def choose_connectors(config: TransferConfig, device: str) -> Connectors:
    """Returns the connectors of a node whose cache is on `device` ("cpu", "cuda"), best first.

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
    """Returns the preferred connectors that can move a cache on `device`, best first. Some need a
    peer on the same host; that is checked transfer by transfer."""
    return tuple(name for name in AUTO[device] if device in known[name].devices)


def _with_options(names: Sequence[str], given: Mapping[str, Any]) -> Connectors:
    """Returns the options of several connectors, by name."""
    if strangers := sorted(set(given) - set(names)):
        raise ConfigError(
            f"--kv-connector-config has options for {', '.join(strangers)}, but the connectors "
            f'are {", ".join(names)}; for several it is {{"NAME": {{…}}}}'
        )
    for name, options in given.items():
        if not isinstance(options, dict):
            raise ConfigError(f"--kv-connector-config: the options of {name} are no JSON object")
    return {name: given.get(name, {}) for name in names}


# ---- what a node's ranks need ----


@dataclass(frozen=True, slots=True)
class TransferSetup:
    """Says how a node takes part in KV transfers."""

    fingerprint: str  # nodes pair only when theirs are equal
    connectors: tuple[str, ...] = ()  # the preferred first; empty: it neither sends nor takes KV
    rank_factory: str = RANK_FACTORY
    rank_config: bytes = field(default=b"", repr=False)  # it may hold secrets


def set_up(
    config: WorkerNodeConfig,
    device: str,
    kv_identity: Mapping[str, str],
    key: ClusterKey | None,
    *,
    source: bool,
) -> TransferSetup:
    """Sets up a node whose cache is on `device`, as one that sends KV (`source`) or takes it.

    Raises:
        ConfigError: as `choose_connectors` and `rank_config`.
    """
    connectors, identity = choose_connectors(config.transfer, device), fingerprint(kv_identity)
    encoded = rank_config(connectors, identity, config.tls, source=source, key=key)
    return TransferSetup(identity, tuple(connectors), rank_config=encoded)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Holds everything a rank needs to build its connectors; msgpack in the worker's
    configuration."""

    connectors: Connectors
    fingerprint: str
    source: bool = False  # a source announces no endpoint
    keys: tuple[bytes, ...] = field(default=(), repr=False)  # as `RankContext` has them


def rank_config(
    connectors: Connectors,
    fingerprint: str,
    tls: TLSConfig,
    *,
    source: bool,
    key: ClusterKey | None = None,
) -> bytes:
    """Encodes the `RankConfig` of a node's options; the bytes are a secret if there is a `key`. KV
    that leaves the host is encrypted where gRPC is, and its ports ask for the key. A connector that
    cannot do so, or is configured not to, is named in the log.

    Raises:
        ConfigError: a connector is to use TLS and the node has no certificate.
    """
    for name in connectors if key is not None else ():
        if not load_connector(name).capabilities.authenticates:
            logger.warning("gRPC asks for the cluster key, but KV that goes by %s does not", name)
    options = {
        name: connector_options(_encrypted(name, given, tls), tls)
        for name, given in connectors.items()
    }
    keys = () if key is None else key.derive(KEY_PURPOSE)
    return msgspec.msgpack.encode(RankConfig(options, fingerprint, source, keys))


def _encrypted(name: str, options: Mapping[str, Any], tls: TLSConfig) -> Mapping[str, Any]:
    """Returns the options of a connector, with TLS unless they say otherwise."""
    if tls.tls_cert is None or load_connector(name).capabilities.same_host:
        return options
    if name == "tcp" and not any(key.startswith("tls") for key in options):
        return {**options, "tls": True}
    if name != "tcp" or options.get("tls") is False:
        logger.warning("gRPC is encrypted, but KV that goes by %s is not", name)
    return options


def connector_options(options: Mapping[str, Any], tls: TLSConfig) -> dict[str, Any]:
    """Returns a connector's options with `"tls": true` replaced by the paths of the node's
    files."""
    rest = {name: value for name, value in options.items() if name != "tls"}
    if options.get("tls", False) is False:
        return rest
    if tls.tls_cert is None or options["tls"] is not True:
        raise ConfigError(
            '--kv-connector-config: "tls" is true or false; true needs --tls-cert, --tls-key and '
            "--tls-ca"
        )
    return {**asdict(tls), **rest}
