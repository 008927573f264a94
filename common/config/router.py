"""Options of the router: its HTTP and gRPC servers, and how it places requests on nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.lora import LoRAConfig
from pdserve.common.config.shared import (
    PORT,
    AuthConfig,
    LogConfig,
    ObservabilityConfig,
    TLSConfig,
    option,
)
from pdserve.common.core.errors import ConfigError

# Formats of tool calls and of reasoning, by vLLM's names; `router/api/parsers` reads them.
TOOL_PARSERS = (
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "functiongemma", "gemma4", "glm45", "glm47",
    "granite", "hermes", "kimi_k2", "llama3_json", "llama4_json", "llama4_pythonic", "minimax_m2",
    "mistral", "openai", "phi4_mini_json", "pythonic", "qwen3_coder", "qwen3_xml", "seed_oss",
)  # fmt: skip
REASONING_PARSERS = (
    "deepseek_r1", "deepseek_v3", "gemma4", "glm45", "glm47", "granite", "holo2", "kimi_k2",
    "minimax_m2", "mistral", "nemotron_v3", "olmo3", "openai_gptoss", "qwen3", "seed_oss", "step3",
)  # fmt: skip
POLICIES = (
    "round-robin",
    "least-load",
    "power-of-two",
    "prefix-aware",
    "cost",
)  # `router.cluster.policies`
HARMONY, HARMONY_TOOLS = "openai_gptoss", "openai"  # the two names of one format
AUTO, NONE = "auto", "none"  # the parser that the chat template shows; no parser

OPEN_FILES = 256  # files a router needs besides a connection per request
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
    router_workers: int = option(
        1,
        "router processes behind these ports; each serves a part of the connections; nodes "
        "register with each of them, at --registry-port and the ports after it",
        minimum=1,
    )
    ports_file: str | None = option(
        None, "file to write the ports to once they are open, as JSON", metavar="FILE"
    )
    timeout_keep_alive: float = option(
        # Longer than clients keep idle connections (aiohttp 15 s, httpx 5 s, balancers 60 s): if
        # the server closed first, a client could send a request on a connection just closed.
        75.0,
        "seconds until an idle HTTP connection is closed; longer than clients and load balancers "
        "keep them",
        minimum=0.1,
    )
    write_timeout: float = option(
        30.0,
        "seconds after which the connection of a client that reads nothing is closed",
        minimum=0.1,
    )
    stream_interval: int = option(
        1,
        "tokens of a choice between two events of a stream; the first token is sent at once, the "
        "last ones when the choice ends",
        minimum=1,
        maximum=1024,
    )
    max_body_size: int = option(32 * 2**20, "most bytes in an HTTP request body", minimum=1)
    api_key: str | None = option(
        None,
        "key, or several separated by commas; clients must send one as `Authorization: Bearer "
        "KEY`; prefer the variable, as other users of the host can see flags",
        metavar="KEY",
        secret=True,
    )
    admin_api_key: str | None = option(
        None,
        "key of operators, or several separated by commas; also valid as API keys. Loading "
        "adapters, /reset_prefix_cache, /v1/cluster and other clients' timelines need one "
        "(default: --api-key if it is a single key; several keys get no operator rights); prefer "
        "the variable",
        metavar="KEY",
        secret=True,
    )
    api_key_weights: str | None = option(
        None,
        "weights of the keys of --api-key, in their order, separated by commas: while several "
        "keys wait, a key of weight 2 gets twice the tokens of a key of weight 1 (default: all 1)",
        metavar="N,N",
    )
    cache_salt_per_key: bool = option(
        False,
        "share cached prefixes only among requests with the same API key, so that other keys "
        "cannot detect them by latency or cached_tokens",
    )
    allowed_origins: list[str] | None = option(
        None,
        "origins whose pages may use this server (CORS), besides its own; other origins are "
        "refused (default: all with --api-key, else only pages on localhost)",
        metavar="ORIGIN",
    )
    allowed_methods: list[str] = option(["*"], "CORS: methods pages may use", metavar="METHOD")
    allowed_headers: list[str] = option(["*"], "CORS: headers pages may send", metavar="HEADER")
    allow_credentials: bool = option(False, "CORS: pages may send cookies and other credentials")
    root_path: str | None = option(
        None,
        "path under which a proxy serves this server; the proxy may strip it from requests or not",
        metavar="/PATH",
    )
    ui: bool = option(True, "serve a page at /ui that shows the cluster and a chat")
    runtime_lora_dir: str | None = option(
        None,
        "folder from which clients may load LoRA adapters (POST /v1/load_lora_adapter, "
        "/v1/unload_lora_adapter) (default: they may not)",
        metavar="FOLDER",
    )
    ssl_certfile: str | None = option(
        None, "certificate chain for the HTTP port (PEM), which enables HTTPS", metavar="FILE"
    )
    ssl_keyfile: str | None = option(
        None, "private key of --ssl-certfile (default: in the same file)", metavar="FILE"
    )
    drain_timeout: float = option(
        30.0, "seconds to wait for requests in flight after SIGTERM", minimum=0.0
    )

    def __post_init__(self) -> None:
        if self.root_path is not None and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"--root-path {self.root_path} must look like /path or /path/more")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile, the certificate it belongs to")
        if self.api_key_weights is not None and not self.api_key:
            raise ConfigError("--api-key-weights needs --api-key")
        if self.cache_salt_per_key and not self.api_key:
            raise ConfigError("--cache-salt-per-key needs --api-key")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Chat"""

    chat_template_content_format: str = option(
        "auto",
        "how the template gets a message's content: as a string, as a list of parts in OpenAI's "
        "format, or as the template takes what the client sent",
        choices=("auto", "string", "openai"),
    )
    strict_parameters: bool = option(
        False,
        "answer 400 to requests with fields or tools that would be ignored (default: leave them "
        "out and name them in the header X-Ignored-Parameters)",
    )
    trust_request_chat_template: bool = option(
        False, "accept `chat_template` in requests (a template can use much CPU)"
    )
    enable_auto_tool_choice: bool = option(
        True, "let the model decide whether to call a tool; off: `tool_choice: auto` is refused"
    )
    tool_call_parser: str = option(
        AUTO,
        "format of the model's tool calls; auto: by the chat template; none: calls stay text; or "
        "an entry point in pdserve.tool_parsers, or module:Class",
        known=(*TOOL_PARSERS, AUTO, NONE),
    )
    reasoning_parser: str = option(
        AUTO,
        "how the model marks its reasoning, which is then returned as `reasoning_content`; auto: "
        "by the chat template; none: it stays in `content`",
        choices=(*REASONING_PARSERS, AUTO, NONE),
    )

    def __post_init__(self) -> None:
        if self.reasoning_parser == HARMONY and self.tool_call_parser not in _BESIDE_HARMONY:
            raise ConfigError(
                f"--reasoning-parser {HARMONY} goes with --tool-call-parser {HARMONY_TOOLS}: one "
                "format has both"
            )
        if self.tool_call_parser == HARMONY_TOOLS and self.reasoning_parser not in (HARMONY, AUTO):
            raise ConfigError(
                f"--tool-call-parser {HARMONY_TOOLS} goes with --reasoning-parser {HARMONY}: one "
                "format has both"
            )

    @property
    def calls(self) -> str | None:
        """The tool parser's name; None: calls stay text."""
        return _named(self.tool_call_parser)

    @property
    def reasoning(self) -> str | None:
        """The reasoning parser's name; for Harmony's tool calls it is Harmony's."""
        return HARMONY if self.calls == HARMONY_TOOLS else _named(self.reasoning_parser)


_BESIDE_HARMONY = (HARMONY_TOOLS, AUTO, NONE)


def _named(parser: str) -> str | None:
    """Returns None for no parser, and for `auto` before `detect.resolved` has found one."""
    return None if parser in (AUTO, NONE) else parser


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Routing"""

    prefill_policy: str = option(
        "cost",
        "how prefill nodes are chosen; also an entry point in pdserve.placement_policies, or "
        "module:Class",
        known=POLICIES,
    )
    decode_policy: str = option(
        "cost",
        "how decode nodes and nodes of both roles are chosen, as --prefill-policy",
        known=POLICIES,
    )
    local_prefill_threshold: int = option(
        0,
        "prompts with fewer uncached tokens on the decode node than this skip the prefill node "
        "(0: none)",
        minimum=0,
    )
    max_concurrent_requests: int = option(
        256,
        "most running choices (a request has n), for all routers of the same nodes together; "
        "each keeps an equal part",
        minimum=1,
    )
    max_queued_requests: int = option(256, "most waiting requests; more get 429", minimum=0)
    max_client_share: float = option(
        0.75,
        "largest share of requests in flight, of the queue and of body memory that one client (an "
        "API key, or without keys an address) may use; 1 if all clients come through one proxy",
        minimum=0.01,
        maximum=1.0,
    )
    scheduling_policy: str = option(
        "fcfs",
        "order of a client's waiting requests: first come, first served, or lowest `priority` "
        "first; clients take turns",
        choices=("fcfs", "priority"),
    )
    slo_ttft: float = option(
        0.0,
        "largest TTFT in seconds: a request with a longer predicted TTFT is refused with 429; a "
        "prompt that takes more than half of it alone gets twice its own time; `X-SLO-TTFT-Ms` "
        "of a request takes precedence (0: no limit)",
        minimum=0.0,
    )
    slo_itl: float = option(
        0.0,
        "largest mean ITL of a choice in seconds: bounds the running choices, by recent "
        "measurements (0: no limit)",
        minimum=0.0,
    )
    prefill_backlog: float | None = option(
        None,
        "seconds of prefill work that nodes hold, by recent measurements; further prompts wait "
        "in the router, where weights, priorities and SLOs decide (default: a quarter of "
        "--slo-ttft; without it no limit)",
        minimum=0.0,
    )
    queue_timeout: float = option(
        30.0,
        "seconds a request may wait in total before its first token, for admission and for nodes; "
        "then 503",
        minimum=0.0,
    )
    request_timeout: float = option(
        300.0,
        "seconds without progress after which a request fails with 504, also while a started "
        "request waits for a node (0: no limit)",
        minimum=0.0,
    )
    heartbeat_interval: float = option(1.0, "seconds between a node's heartbeats", minimum=0.05)
    heartbeat_timeout: float = option(
        5.0, "seconds without a heartbeat after which a node is not used", minimum=0.1
    )
    migration_limit: int = option(
        2,
        "how many nodes may die in a row while they compute a request, without a new token in "
        "between; one more and the request fails, as it may be the cause",
        minimum=0,
    )
    kept_timelines: int = option(
        1000,
        "finished requests whose timelines are kept for `pdserve trace`; about 3 kB each",
        minimum=0,
        maximum=100_000,
    )
    breaker_failures: int = option(
        3, "consecutive failures that open a node's circuit breaker", minimum=1
    )
    breaker_cooldown: float = option(
        5.0, "seconds until an open circuit breaker allows one trial request", minimum=0.0
    )

    @property
    def prefill_work(self) -> float | None:
        """The limit on prefill work queued on nodes, in seconds; None: no limit."""
        quarter = self.slo_ttft / 4 if self.slo_ttft else None
        return quarter if self.prefill_backlog is None else self.prefill_backlog

    def __post_init__(self) -> None:
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ConfigError(
                f"--heartbeat-timeout {self.heartbeat_timeout} must exceed "
                f"--heartbeat-interval {self.heartbeat_interval}, or live nodes count as dead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of the router."""

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
        if folder is not None and self.server.router_workers > 1:
            raise ConfigError(
                "--runtime-lora-dir goes with one of --router-workers, because what a client loads "
                "is one worker's: give --lora-modules, or run one worker"
            )
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"--runtime-lora-dir {folder} is not a folder")
