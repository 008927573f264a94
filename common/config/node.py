"""Options of nodes: the KV transfer, addresses, and the roles' configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.common.config.engine import EngineConfig
from pdserve.common.config.kv_events import KVEventsOptions
from pdserve.common.config.shared import (
    PORT,
    AuthConfig,
    LogConfig,
    ObservabilityConfig,
    TLSConfig,
    option,
)
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import is_address


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """KV transfer"""

    kv_connector: str = option(
        "auto",
        "KV connectors in order of preference, separated by commas; also an entry point or "
        "module:Class; auto: shm,tcp for CPU caches, tcp for CUDA",
        known=("auto", "shm", "tcp", "cuda_ipc", "nccl"),
    )
    kv_connector_config: dict[str, Any] = option(
        {}, 'the connector\'s own options, as JSON; for several or auto {"NAME": {...}}'
    )
    kv_host: str = option(
        "127.0.0.1",
        "address the KV data plane binds to and announces; auto: the address at which other hosts "
        "reach each rank's host",
    )
    kv_lease: float = option(
        10.0,
        "seconds without progress after which KV blocks are freed",
        minimum=0.1,
        maximum=86_400.0,
    )
    enable_kv_digests: bool = option(
        True, "decode nodes verify the checksums of received KV before they use it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Node"""

    router: str = option(
        "127.0.0.1:8002",
        "routers to register with (their --registry-port), separated by commas; a name with "
        "several addresses means a router at each, and is resolved again regularly",
        metavar="HOST:PORT,...",
    )
    host: str = option("127.0.0.1", "address to bind to")
    advertise_host: str | None = option(
        None,
        "address announced to the router (default: --host); auto: this host's name, which other "
        "hosts must be able to resolve, as containers on one network can",
    )
    grpc_port: int = option(0, "port of the node's gRPC server (0: a free one)", **PORT)
    metrics_port: int = option(0, "port of /metrics and /health (0: a free one)", **PORT)
    drain_timeout: float = option(
        30.0, "seconds to wait for work in flight after SIGTERM", minimum=0.0
    )
    orphan_lease: float = option(
        10.0,
        "seconds for which a decode node continues the answer of an Idempotency-Key after its "
        "router died, and keeps a finished one; 0: not at all",
        minimum=0.0,
        maximum=3600.0,
    )

    def __post_init__(self) -> None:
        for router in self.routers:
            if not is_address(router):
                raise ConfigError(
                    f"--router {self.router}: {router or 'nothing'} must be HOST:PORT, like "
                    "127.0.0.1:8002"
                )
        if len(set(self.routers)) < len(self.routers):
            raise ConfigError(f"--router {self.router} names a router twice: name each once")

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(router.strip() for router in self.router.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class BothNodeConfig:
    """Options of a node of both roles, which transfers no KV."""

    node: NodeConfig = field(default_factory=NodeConfig)
    tls: TLSConfig = field(default_factory=TLSConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    events: KVEventsOptions = field(default_factory=KVEventsOptions)
    log: LogConfig = field(default_factory=LogConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNodeConfig(BothNodeConfig):
    """Options of a prefill or decode node."""

    transfer: TransferConfig = field(default_factory=TransferConfig)
