"""API keys: who may ask for tokens, over HTTP and gRPC alike."""

from __future__ import annotations

import hmac
import ipaddress
from hashlib import sha256

from pdserve.common.core.errors import ConfigError, Unauthenticated
from pdserve.common.core.parameters import PARAMETERS

HEADER = "authorization"


class APIKeys:
    """The keys clients may show; with none, everybody may ask. Holds digests only: the keys
    themselves cannot slip into a log."""

    def __init__(self, keys: str | None = None, *, salted: bool = False) -> None:
        """`keys` is `--api-key`: one, or several separated by commas. `salted`: what one key has
        asked is cached for that key alone.

        Raises:
            ConfigError: one of them is empty.
        """
        words = [] if keys is None else [key.strip() for key in keys.split(",")]
        if not all(words):
            raise ConfigError("--api-key has an empty key; remove the comma too many")
        self._salted = salted
        self._digests = [_digest(key) for key in words]

    def check(self, authorization: str | None) -> None:
        """`authorization` is the value of the header, or the metadata, of that name.

        Raises:
            Unauthenticated: it is not `Bearer` and one of the keys.
        """
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        # Digests of equal length, all of them compared: the time tells nothing of the keys.
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if known and not (scheme.lower() == "bearer" and any(known)):
            raise Unauthenticated(
                "Incorrect API key: send one this server knows as `Authorization: Bearer KEY`"
                if authorization
                else "No API key: send one as `Authorization: Bearer KEY`"
            )

    def client(self, authorization: str | None, address: str | None) -> str:
        """Who asks, for shares of this server: the key it has shown, or without keys the host
        (of IPv6, whose hosts have addresses without number, the network)."""
        if self._digests:
            return "key " + _digest((authorization or "").partition(" ")[2].strip()).hex()[:16]
        try:
            host = ipaddress.ip_address((address or "").partition("%")[0])
        except ValueError:  # a Unix socket, or a connection that is gone
            return address or ""
        if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is None:
            return str(ipaddress.ip_network((host, 64), strict=False))
        return str(host)

    def cache_salt(self, client: str, given: str | None) -> str:
        """The salt of a request's cached blocks; `client` is as `client` says, `given` what the
        request says.

        Raises:
            InvalidRequest: it is empty or too long.
        """
        if given is not None:
            PARAMETERS["cache_salt"].check_length(given)
        return f"{client} {given or ''}" if self._salted else given or ""


def _digest(key: str) -> bytes:
    # Headers that are not UTF-8 arrive with surrogates.
    return sha256(key.encode(errors="surrogateescape")).digest()
