"""Identifiers: readable where people see them, unguessable where they grant something."""

from __future__ import annotations

import re
import secrets

_PLAIN = re.compile(r"[!-~]{1,128}")


def new_request_id(prefix: str) -> str:
    """For example `cmpl-5f0c…` (24 hex digits)."""
    return f"{prefix}-{secrets.token_hex(12)}"


def is_plain(given: str) -> bool:
    """Whether an id that others chose is a short word of ASCII: fit for headers, metadata, logs."""
    return _PLAIN.fullmatch(given) is not None


def new_node_id(role: str) -> str:
    """For example `prefill-3fa9c1`: new at every start, so a restarted node is another node."""
    return f"{role}-{secrets.token_hex(3)}"


def new_transfer_id() -> bytes:
    """16 random bytes; whoever knows them may write into the blocks they name."""
    return secrets.token_bytes(16)
