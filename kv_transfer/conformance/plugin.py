"""The kit's command line, registered with pytest by the entry point `pdserve-kv`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pdserve", "the KV connector conformance kit")
    group.addoption(
        "--kv-connector",
        action="append",
        default=[],
        metavar="NAME",
        help="connector that pdserve.kv_transfer.conformance checks: a built-in name, an entry "
        "point of pdserve.kv_connectors or module:Class; may be given several times",
    )
    group.addoption(
        "--kv-connector-config",
        default="{}",
        metavar="JSON",
        help="the connector's options, as for a node",
    )
