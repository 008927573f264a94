"""The name under which a client knows its request: the header X-Request-Id."""

from __future__ import annotations

import re

from common.core.ids import new_request_id

HEADER = "X-Request-Id"

_PLAIN = re.compile(r"[!-~]{1,128}")


def adopt(given: str) -> str:
    """The client's own id, if it is a plain word, or a new one."""
    return given if is_plain(given) else new_request_id("req")


def is_plain(given: str) -> bool:
    """Whether it may go into logs and headers as it is."""
    return _PLAIN.fullmatch(given) is not None
