"""API keys: who may ask for tokens, and who may do what all clients feel, over HTTP and gRPC
alike."""

from __future__ import annotations

import hmac
import ipaddress
from hashlib import sha256

from pdserve.common.core.errors import ConfigError, PermissionDenied, Unauthenticated
from pdserve.common.core.parameters import PARAMETERS

HEADER = "authorization"


class APIKeys:
    """The keys clients and operators may show; without a client's key everybody may ask. Holds
    digests only: the keys themselves cannot slip into a log."""

    def __init__(
        self, keys: str | None = None, admin_keys: str | None = None, *, salted: bool = False
    ) -> None:
        """`keys` is `--api-key`: one, or several separated by commas; `admin_keys` is
        `--admin-api-key`, likewise. `salted`: what one key has asked is cached for that key alone.

        Raises:
            ConfigError: one of them is empty, or is a client's and an operator's.
        """
        self._salted = salted
        self._digests = _digests("--api-key", keys)
        self._admin_digests = _digests("--admin-api-key", admin_keys)
        if set(self._digests) & set(self._admin_digests):
            raise ConfigError(
                "--admin-api-key has a key of --api-key: who shows that would be an operator; "
                "take another one"
            )

    def check(self, authorization: str | None) -> None:
        """`authorization` is the value of the header, or the metadata, of that name.

        Raises:
            Unauthenticated: it is not `Bearer` and one of the keys.
        """
        if self._digests and not _shows(authorization, self._digests + self._admin_digests):
            raise Unauthenticated(
                "Incorrect API key: send one this server knows as `Authorization: Bearer KEY`"
                if authorization
                else "No API key: send one as `Authorization: Bearer KEY`"
            )

    def is_operator(self, authorization: str | None) -> bool:
        """Whether who shows this may do what others feel, and see what is others': with
        `--admin-api-key` who has one; without it whoever may ask, unless several keys say that
        these are several parties. `check` comes first."""
        if self._admin_digests:
            return _shows(authorization, self._admin_digests)
        return len(self._digests) <= 1

    def check_operator(self, authorization: str | None) -> None:
        """Raises PermissionDenied: not `is_operator`."""
        if not self.is_operator(authorization):
            raise PermissionDenied(
                "this is for operators: it needs a key of --admin-api-key"
                if self._admin_digests
                else "this is for operators, and off: the server has several keys in --api-key and "
                "no --admin-api-key"
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


def _digests(flag: str, keys: str | None) -> list[bytes]:
    words = [] if keys is None else [key.strip() for key in keys.split(",")]
    if not all(words):
        raise ConfigError(f"{flag} has an empty key; remove the comma too many")
    return [_digest(key) for key in words]


def _shows(authorization: str | None, digests: list[bytes]) -> bool:
    """Whether it is `Bearer` and one of the keys."""
    scheme, _, key = (authorization or "").partition(" ")
    given = _digest(key.strip())
    # Digests of equal length, all of them compared: the time tells nothing of the keys.
    known = [hmac.compare_digest(given, digest) for digest in digests]
    return scheme.lower() == "bearer" and any(known)


def _digest(key: str) -> bytes:
    # Headers that are not UTF-8 arrive with surrogates.
    return sha256(key.encode(errors="surrogateescape")).digest()
