"""Options of every process: TLS, the cluster key, logging; and how an option is written.

Every option is written once, as a field of a dataclass in this folder. Flags, environment and YAML
derive from it (`sources.py`): a field `max_model_len` is the flag `--max-model-len`, the variable
`PDSERVE_MAX_MODEL_LEN` and the YAML key `max-model-len`. Names follow vLLM where it has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pdserve.common.core.errors import ConfigError


def option(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with its help text; `short`, `choices` (`aliases` are other names of
    some), `metavar`, `minimum` and `maximum` (both inclusive) are optional. A `secret` never goes
    onto a command line."""
    if isinstance(default, (list, dict)):
        kind = type(default)
        return field(default_factory=lambda: kind(default), metadata={"help": help, **extra})
    return field(default=default, metadata={"help": help, **extra})


def same_option(owner: type, name: str, help: str | None = None) -> Any:
    """Another class's option `name` once more; `help` in other words, if given."""
    (found,) = (each for each in fields(owner) if each.name == name)
    return option(found.default, **{**found.metadata, **({"help": help} if help else {})})


PORT = {"minimum": 0, "maximum": 65535}


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """TLS between roles"""

    tls_cert: str | None = option(
        None,
        "certificate this role shows to the others (PEM, for servers and clients), naming the "
        "hosts under which it is dialled; with it all gRPC is mutual TLS",
        metavar="FILE",
    )
    tls_key: str | None = option(None, "private key of --tls-cert (PEM)", metavar="FILE")
    tls_ca: str | None = option(
        None, "CA that must have signed the other roles' certificates (PEM)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        given = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(given) and not all(given):
            raise ConfigError(
                "--tls-cert, --tls-key and --tls-ca go together: give all three or none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Trust between roles"""

    cluster_key: str | None = option(
        None,
        "secret that all roles of a cluster share and prove to know in every call (several with "
        "commas between: all are taken, the first is used); prefer the variable: other users of "
        "the host can see flags",
        metavar="KEY",
        secret=True,
    )
    insecure: bool = option(
        False,
        "let a role that other hosts reach start with neither --cluster-key nor --tls-*: whoever "
        "reaches it may read prompts and use the model",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logging"""

    log_level: str = option(
        "info", "least level shown", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "text", "text: one readable line; json: one object", choices=("text", "json")
    )


PDSERVE, VLLM, BOTH = METRICS_PREFIXES = ("pdserve", "vllm", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """Observability"""

    metrics_prefix: str = option(
        PDSERVE,
        "names under which /metrics shows what vLLM has, too; pdserve: pdserve_NAME; vllm: "
        "vllm:NAME, as its dashboards ask; both: both; all else is pdserve_NAME",
        choices=METRICS_PREFIXES,
    )
    otlp_endpoint: str | None = option(
        None,
        "where spans of every request go, as OTLP, e.g. http://localhost:4317; needs the extra "
        "`otel` (default: nowhere)",
        short="--otlp-traces-endpoint",
        metavar="URL",
    )
