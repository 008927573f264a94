"""Which pages of other origins a browser lets use this server: `--allowed-origins` and its like."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from aiohttp import hdrs

ALL = ("*",)
_MAX_AGE = "86400"  # seconds a browser may remember the answer
_EXPOSED = "X-Request-Id, Request-Id, Retry-After"
_MAX_NAMES = 4096  # characters of the headers that a page may ask for


@dataclass(frozen=True, slots=True)
class CORS:
    """By default every page may ask, with any header (SDKs send their own, such as
    `X-Stainless-Lang`), but without cookies."""

    origins: Collection[str] = ALL
    methods: Collection[str] = ALL
    headers: Collection[str] = ALL
    credentials: bool = False

    def allowed(self, given: Mapping[str, str]) -> dict[str, str]:
        """Headers of every answer to a request with the headers `given`."""
        origin = given.get(hdrs.ORIGIN)
        anyone = "*" in self.origins
        if anyone and not self.credentials:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        headers = {"Vary": "Origin"}
        if origin is not None and (anyone or origin in self.origins):
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _EXPOSED
            if self.credentials:
                headers["Access-Control-Allow-Credentials"] = "true"
        return headers

    def preflight(self, given: Mapping[str, str], methods: Collection[str]) -> dict[str, str]:
        """Beside `allowed`, for OPTIONS of a path that takes these methods."""
        asked = given.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        if "*" in self.headers:  # by name: `*` does not cover Authorization
            headers = asked if 0 < len(asked) <= _MAX_NAMES else "Authorization, Content-Type"
        else:
            headers = ", ".join(self.headers)
        may = set(methods) if "*" in self.methods else set(methods) & set(self.methods)
        return {
            "Access-Control-Allow-Methods": ", ".join(sorted(may)),
            "Access-Control-Allow-Headers": headers,
            "Access-Control-Max-Age": _MAX_AGE,
        }
