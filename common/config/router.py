"""Options of the router: its HTTP and gRPC front, and how it places requests on nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.common.config.lora import LoRAConfig
from pdserve.common.config.node import ModelConfig
from pdserve.common.config.shared import (
    PORT,
    AuthConfig,
    LogConfig,
    ObservabilityConfig,
    TLSConfig,
    option,
)
from pdserve.common.core.errors import ConfigError

OPEN_FILES = 256  # of a router, besides a connection for each request it takes
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """HTTP and gRPC front"""

    host: str = option("127.0.0.1", "address to bind to")
    port: int = option(8000, "HTTP port (0: a free one)", **PORT)
    grpc_port: int = option(8001, "gRPC port, for clients (0: a free one)", **PORT)
    registry_port: int = option(
        8002, "gRPC port at which nodes register; not for clients (0: a free one)", **PORT
    )
    ports_file: str | None = option(
        None, "file to write the ports to once they are open, as JSON", metavar="FILE"
    )
    timeout_keep_alive: float = option(
        # Longer than clients keep theirs (aiohttp 15 s, httpx 5 s, balancers 60 s): who closes
        # first must be the one who would use it next, else a request meets a closed door.
        75.0,
        "seconds an HTTP connection may be idle before it is closed: longer than clients and load "
        "balancers keep theirs",
        minimum=0.1,
    )
    write_timeout: float = option(
        30.0,
        "seconds a client may take nothing of its answer before it is hung up on",
        minimum=0.1,
    )
    max_body_size: int = option(32 * 2**20, "bytes of one HTTP request", minimum=1)
    api_key: str | None = option(
        None,
        "key, or keys separated by commas, one of which clients must show as `Authorization: "
        "Bearer KEY`; prefer the variable: other users of the host can see flags",
        metavar="KEY",
        secret=True,
    )
    admin_api_key: str | None = option(
        None,
        "key, or keys separated by commas, of operators, which are API keys, too: adapters, "
        "/reset_prefix_cache, /v1/cluster, timelines of others need one (absent: the only key of "
        "--api-key does, or none; of several keys none may); prefer the variable",
        metavar="KEY",
        secret=True,
    )
    cache_salt_per_key: bool = option(
        False,
        "what one API key has asked is found in the prefix caches by that key alone, so that no "
        "other can tell by the time or by cached_tokens",
    )
    allowed_origins: list[str] | None = option(
        None,
        "origins whose pages may use this server (CORS), beside its own; requests of others are "
        "refused (default: with --api-key *, all; else those of pages on localhost)",
        metavar="ORIGIN",
    )
    allowed_methods: list[str] = option(["*"], "methods that such pages may use", metavar="METHOD")
    allowed_headers: list[str] = option(["*"], "headers that such pages may send", metavar="HEADER")
    allow_credentials: bool = option(False, "such pages may send cookies and the like")
    root_path: str | None = option(
        None,
        "path under which a proxy shows this server, and which it may leave in requests",
        metavar="/PATH",
    )
    ui: bool = option(True, "a page at /ui that shows the cluster and talks to it")
    runtime_lora_dir: str | None = option(
        None,
        "folder whose LoRA adapters clients may load and unload (POST /v1/load_lora_adapter, "
        "/v1/unload_lora_adapter); absent: they may not",
        metavar="FOLDER",
    )
    ssl_certfile: str | None = option(
        None, "certificate chain of the HTTP port (PEM); with it HTTP is HTTPS", metavar="FILE"
    )
    ssl_keyfile: str | None = option(
        None, "private key of --ssl-certfile (default: in the same file)", metavar="FILE"
    )
    drain_timeout: float = option(
        30.0, "seconds a SIGTERM waits for requests in flight", minimum=0.0
    )

    def __post_init__(self) -> None:
        if self.root_path is not None and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"--root-path {self.root_path} must be like /path, of plain words")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate it belongs to")
        if self.cache_salt_per_key and not self.api_key:
            raise ConfigError(
                "--cache-salt-per-key needs --api-key: there are no keys to tell apart"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Chat"""

    chat_template_content_format: str = option(
        "string",
        "what the template is given as a message's content: a string, or a list of parts as OpenAI "
        "has them",
        choices=("string", "openai"),
    )
    trust_request_chat_template: bool = option(
        False, "accept `chat_template` in requests (Jinja can use much CPU)"
    )
    enable_auto_tool_choice: bool = option(
        False, "let the model decide whether it calls a tool; needs --tool-call-parser"
    )
    tool_call_parser: str | None = option(
        None,
        "how the model writes tool calls: hermes, llama3_json, mistral, the name of an entry point "
        "in pdserve.tool_parsers, or module:Class",
        metavar="NAME",
    )
    reasoning_parser: str | None = option(
        None,
        "how the model writes what it thinks, which is then `reasoning_content` and no part of the "
        "content: deepseek_r1 (it always thinks first) or qwen3 (it may)",
        choices=("deepseek_r1", "qwen3"),
    )

    def __post_init__(self) -> None:
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Routing"""

    prefill_policy: str = option(
        "least-load", "placement of prefills", choices=("round-robin", "least-load")
    )
    decode_policy: str = option(
        "least-load", "placement of decodes", choices=("round-robin", "least-load")
    )
    local_prefill_threshold: int = option(
        0, "prompts of fewer tokens skip the prefill node (0: none do)", minimum=0
    )
    max_concurrent_requests: int = option(
        256, "choices (a request's n) that are computed at once", minimum=1
    )
    max_queued_requests: int = option(256, "requests waiting for a place; more get 429", minimum=0)
    max_client_share: float = option(
        0.75,
        "share of the places, of the queue and of the memory for bodies that one client (an API "
        "key, or without keys an address) may hold; 1 where all clients come through one proxy",
        minimum=0.01,
        maximum=1.0,
    )
    scheduling_policy: str = option(
        "fcfs",
        "whose turn it is: first come, first served, or of each client's requests those of the "
        "lowest priority first",
        choices=("fcfs", "priority"),
    )
    queue_timeout: float = option(
        30.0,
        "seconds a request waits in all, until its first token, for a place and for nodes; then "
        "503",
        minimum=0.0,
    )
    request_timeout: float = option(
        300.0,
        "seconds a request may go on without any progress, then 504; a request that has begun "
        "waits as long for a node that comes back (0: for ever)",
        minimum=0.0,
    )
    heartbeat_interval: float = option(1.0, "seconds between a node's heartbeats", minimum=0.05)
    heartbeat_timeout: float = option(
        5.0, "seconds of silence after which a node is not used", minimum=0.1
    )
    migration_limit: int = option(
        2,
        "how many nodes may die in a row while they compute a request, without a new token "
        "between them; one more, and it is poison and fails",
        minimum=0,
    )
    kept_timelines: int = option(
        1000,
        "requests that are over whose timelines can be asked for (pdserve trace); some 3 kB each",
        minimum=0,
        maximum=100_000,
    )
    breaker_failures: int = option(
        3, "failures in a row that open a node's circuit breaker", minimum=1
    )
    breaker_cooldown: float = option(
        5.0, "seconds an open breaker waits before one trial", minimum=0.0
    )

    def __post_init__(self) -> None:
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ConfigError(
                f"--heartbeat-timeout {self.heartbeat_timeout} must exceed "
                f"--heartbeat-interval {self.heartbeat_interval}: live nodes would look dead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router."""

    server: ServerConfig = field(default_factory=ServerConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    tls: TLSConfig = field(default_factory=TLSConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    log: LogConfig = field(default_factory=LogConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        folder = self.server.runtime_lora_dir
        if folder is not None and not self.lora.enable_lora:
            raise ConfigError("--runtime-lora-dir needs --enable-lora")
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"--runtime-lora-dir {folder} is no folder")
