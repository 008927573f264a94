"""The name under which a client knows its request: the header X-Request-Id."""

from __future__ import annotations

from common.core.ids import is_plain, new_request_id

HEADER = "X-Request-Id"


def adopt(given: str) -> str:
    """The client's own id, if it is a plain word, or a new one."""
    return given if is_plain(given) else new_request_id("req")
