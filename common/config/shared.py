"""Options that all roles have (TLS, cluster key, logging), and `option`, which declares one.

Each option is declared once, as a field of a dataclass in this folder. `sources.py` derives flags,
environment and YAML: the field `max_model_len` is the flag `--max-model-len`, the variable
`PDSERVE_MAX_MODEL_LEN` and the YAML key `max-model-len`. Names follow vLLM where it has one.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from pdserve.common.core.errors import ConfigError


def option(default: Any, help: str, **extra: Any) -> Any:
    """Declares a dataclass field as an option. Optional keyword arguments: `short` flag, `choices`
    and `aliases` of them, `known` names among others, `metavar`, `minimum` and `maximum` (both
    inclusive), and `secret`, which keeps the value off command lines."""
    if isinstance(default, (list, dict)):
        kind = type(default)
        return field(default_factory=lambda: kind(default), metadata={"help": help, **extra})
    return field(default=default, metadata={"help": help, **extra})


def same_option(owner: type, name: str, help: str | None = None) -> Any:
    """Declares the same option as `owner.name`, optionally with another help text."""
    (found,) = (each for each in fields(owner) if each.name == name)
    made = found.default_factory
    default = found.default if made is MISSING else made()
    return option(default, **{**found.metadata, **({"help": help} if help else {})})


PORT = {"minimum": 0, "maximum": 65535}


@dataclass(frozen=True, slots=True, kw_only=True)
class TLSConfig:
    """TLS between roles"""

    tls_cert: str | None = option(
        None,
        "certificate of this role (PEM, for server and client use) with the host names that peers "
        "connect to; enables mutual TLS for all gRPC",
        metavar="FILE",
    )
    tls_key: str | None = option(None, "private key of --tls-cert (PEM)", metavar="FILE")
    tls_ca: str | None = option(
        None, "CA that signed the other roles' certificates (PEM)", metavar="FILE"
    )

    def __post_init__(self) -> None:
        given = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(given) and not all(given):
            raise ConfigError(
                "--tls-cert, --tls-key and --tls-ca belong together: give all three or none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Trust between roles"""

    cluster_key: str | None = option(
        None,
        "secret of the cluster, which authenticates every call between roles (of several separated "
        "by commas all are accepted and the first is used); prefer the variable, as other users of "
        "the host can see flags",
        metavar="KEY",
        secret=True,
    )
    insecure: bool = option(
        False,
        "allow a role that other hosts can reach to start without --cluster-key and --tls-*: "
        "anyone who reaches it can read prompts and use the model",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logging"""

    log_level: str = option(
        "info", "lowest level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "text", "text: readable lines; json: one object per line", choices=("text", "json")
    )


PDSERVE, VLLM, BOTH = METRICS_PREFIXES = ("pdserve", "vllm", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """Observability"""

    metrics_prefix: str = option(
        PDSERVE,
        "prefix of the metrics that vLLM also has; pdserve: pdserve_NAME; vllm: vllm:NAME, for "
        "vLLM's dashboards; both: both. Other metrics are always pdserve_NAME",
        choices=METRICS_PREFIXES,
    )
    otlp_endpoint: str | None = option(
        None,
        "OTLP endpoint for traces, e.g. http://localhost:4317; needs the extra `otel` (default: no "
        "tracing)",
        short="--otlp-traces-endpoint",
        metavar="URL",
    )


def counts(
    flag: str, text: str, least: int = 1, most: int = 10**9, most_flag: str = ""
) -> list[int]:
    """Returns the counts of a list with commas, ascending, each once. `most_flag` has set `most`.

    Raises:
        ConfigError: it has anything else, or a count beyond `least` or `most`.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,10}", word) and least <= int(word) <= most for word in words):
        above = f", none above {most_flag} {most}" if most_flag else ""
        raise ConfigError(f"{flag} {text!r} is not a list of counts such as 1,8,32{above}")
    return sorted({int(word) for word in words})
