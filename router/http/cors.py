"""Decides which pages of other origins may use this server: `--allowed-origins` and the like.

A browser sends a page's requests from the user's own host and network, and names the page's origin
in `Origin`, which no page can change. Without CORS the browser keeps the answer from the page, but
by then the request has had its effect. So this server refuses requests of pages that may not use
it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from aiohttp import hdrs

from pdserve.common.config.router import ServerConfig
from pdserve.common.core.errors import PermissionDenied
from pdserve.common.core.host import is_loopback
from pdserve.common.core.printable import printable

ALL = ("*",)
_MAX_AGE = "86400"  # seconds a browser may remember the answer
IGNORED_HEADER = "X-Ignored-Parameters"  # names what an answer was made without
_EXPOSED = f"X-Request-Id, Request-Id, Retry-After, X-PDServe-Path, {IGNORED_HEADER}"
_MAX_NAMES = 4096  # characters of the headers that a page may ask for
_MAX_SHOWN = 200  # characters of an origin that an error repeats
_ORIGIN = re.compile(r"(https?)://([^/:@]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", re.IGNORECASE)
_PORTS = {"http": "80", "https": "443"}
_SITE = "Sec-Fetch-Site"
_HARMLESS = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})


@dataclass(frozen=True, slots=True)
class CORS:
    """Allows the pages of `origins`, and this server's own, by default with any header, because
    SDKs send their own, such as `X-Stainless-Lang`, but without cookies."""

    origins: Collection[str] | None = None  # None: pages that this host serves
    methods: Collection[str] = ALL
    headers: Collection[str] = ALL
    credentials: bool = False
    on_loopback: bool = False  # only this host reaches the server

    @classmethod
    def of(cls, config: ServerConfig) -> CORS:
        # A foreign page does not know a key.
        default = ALL if config.api_key else None
        return cls(
            default if config.allowed_origins is None else config.allowed_origins,
            config.allowed_methods,
            config.allowed_headers,
            config.allow_credentials,
            is_loopback(config.host),
        )

    def check(self, method: str, given: Mapping[str, str]) -> None:
        """Raises PermissionDenied: the request comes from a page that may not use this server."""
        origin = given.get(hdrs.ORIGIN)
        if origin is None:
            # Old browsers omit it for forms; browsers that send the other header never do.
            is_foreign = given.get(_SITE) in ("cross-site", "same-site")
            may = method in _HARMLESS or not is_foreign or "*" in (self.origins or ())
        else:
            may = self._may(origin, given)
        if not may:
            shown = printable(origin or "another site", _MAX_SHOWN)
            raise PermissionDenied(
                f"pages of {shown} may not use this server unless --allowed-origins names them",
                code="ORIGIN_NOT_ALLOWED",
            )

    def _may(self, origin: str, given: Mapping[str, str]) -> bool:
        if self.origins is None:
            found = _ORIGIN.fullmatch(origin)
            if found is not None and is_loopback(found[2].lower()):
                return True
        elif "*" in self.origins or origin in self.origins:
            return True
        return given.get(_SITE) == "same-origin" or self._is_own(origin, given.get(hdrs.HOST, ""))

    def _is_own(self, origin: str, host: str) -> bool:
        """Returns whether the page came from this server: from the host and port in the request.

        DNS rebinding makes a foreign name lead here. A server on loopback therefore accepts names
        of loopback only, and addresses, which no DNS server answers for."""
        found = _ORIGIN.fullmatch(origin)
        if found is None:
            return False
        asked = _ORIGIN.fullmatch(f"{found[1]}://{host}")
        is_same = asked is not None and _address(asked) == _address(found)
        return is_same and (not self.on_loopback or _is_local(found[2].lower()))

    def allowed(self, given: Mapping[str, str]) -> dict[str, str]:
        """Returns the CORS headers of the answer to a request with the headers `given`."""
        origin = given.get(hdrs.ORIGIN)
        anyone = "*" in (self.origins or ())
        if anyone and not self.credentials:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED}
        headers = {"Vary": "Origin"}
        if origin is not None and self._may(origin, given):
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = _EXPOSED
            if self.credentials:
                headers["Access-Control-Allow-Credentials"] = "true"
        return headers

    def preflight(self, given: Mapping[str, str], methods: Collection[str]) -> dict[str, str]:
        """Returns more headers for a preflight of a path that takes these methods."""
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


def _address(found: re.Match[str]) -> tuple[str, str]:
    """Returns the host and port of an origin."""
    return found[2].lower(), found[3] or _PORTS[found[1].lower()]


def _is_local(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return True
