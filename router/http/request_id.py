"""The name under which a client knows its request: the header X-Request-Id."""

from __future__ import annotations

import re
from contextvars import ContextVar

from common.core.ids import new_request_id

HEADER = "X-Request-Id"

public_id: ContextVar[str] = ContextVar("public_id", default="-")
"""Of the request that the current task answers. The log's `request_id_var` is another: a
request of several prompts has several ids inside the cluster."""

_PLAIN = re.compile(r"[!-~]{1,128}")


def adopt(given: str) -> str:
    """The client's own id, if it is a plain word, or a new one."""
    return given if _PLAIN.fullmatch(given) else new_request_id("req")
