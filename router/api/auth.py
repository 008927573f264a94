"""API keys of clients and of operators, over HTTP and gRPC alike."""

from __future__ import annotations

import hmac
import ipaddress
from hashlib import sha256

from pdserve.common.core.errors import ConfigError, PermissionDenied, Unauthenticated
from pdserve.common.core.parameters import PARAMETERS

HEADER = "authorization"
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6


class APIKeys:
    """The keys that clients and operators send; without `--api-key` no key is needed. This holds
    digests only, so that no key can slip into a log."""

    def __init__(
        self,
        keys: str | None = None,
        admin_keys: str | None = None,
        *,
        salted: bool = False,
        weights: str | None = None,
    ) -> None:
        """`keys` is `--api-key` and `admin_keys` is `--admin-api-key`: one key, or several
        separated by commas. `salted`: each key has its own prefix cache. `weights` is
        `--api-key-weights`: a number for each of `keys`.

        Raises:
            ConfigError: a key is empty, or is both a client's and an operator's; the number of
                weights differs from the number of keys, or a weight is not positive.
        """
        self._salted = salted
        self._digests = _digests("--api-key", keys)
        self._admin_digests = _digests("--admin-api-key", admin_keys)
        if set(self._digests) & set(self._admin_digests):
            raise ConfigError(
                "--admin-api-key has a key of --api-key: every client with that key would be an "
                "operator; take another one"
            )

        self.weights = dict(
            zip(map(_name, self._digests), _weights(weights, len(self._digests)), strict=False)
        )

    def check(self, authorization: str | None) -> None:
        """`authorization` is the value of that header or metadata.

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
        """Returns whether this key may make calls that affect other clients, and see their
        requests. With `--admin-api-key` only its keys may. Without it every client may, unless
        `--api-key` has several keys (of several parties). Call `check` first."""
        if self._admin_digests:
            return _shows(authorization, self._admin_digests)
        return len(self._digests) <= 1

    def check_operator(self, authorization: str | None) -> None:
        """Raises PermissionDenied: `is_operator` is false."""
        if not self.is_operator(authorization):
            raise PermissionDenied(
                "this is for operators: it needs a key of --admin-api-key"
                if self._admin_digests
                else "this is for operators, and off: the server has several keys in --api-key and "
                "no --admin-api-key"
            )

    def client(self, authorization: str | None, address: str | None) -> str:
        """Returns the client's name in shares of this server: its key, or without keys its host."""
        if self._digests:
            return _name(_digest((authorization or "").partition(" ")[2].strip()))
        return host_of(address)

    def cache_salt(self, client: str, given: str | None) -> str:
        """Returns the salt of a request's cached blocks; `client` is the result of `client`,
        `given` the request's own salt.

        Raises:
            InvalidRequest: it is empty or too long.
        """
        if given is not None:
            PARAMETERS["cache_salt"].check_length(given)
        return f"{client} {given or ''}" if self._salted else given or ""


def host_of(address: str | None) -> str:
    """Returns the host's name in shares. For IPv6 it is the network, as one host may have any
    number of addresses."""
    try:
        host = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:  # a Unix socket, or a connection that is gone
        return address or ""
    if isinstance(host, ipaddress.IPv6Address) and host.ipv4_mapped is None:
        return str(ipaddress.ip_network((host, 64), strict=False))
    return str(host)


def _digests(flag: str, keys: str | None) -> list[bytes]:
    words = [] if keys is None else [key.strip() for key in keys.split(",")]
    if not all(words):
        raise ConfigError(f"{flag} has an empty key; remove the comma too many")
    return [_digest(key) for key in words]


def _weights(given: str | None, most: int) -> list[float]:
    words = [] if given is None else given.split(",")
    try:
        weights = [float(word) for word in words]
    except ValueError:
        weights = [0.0]
    if not all(MIN_WEIGHT <= each <= MAX_WEIGHT for each in weights):
        raise ConfigError(
            f"--api-key-weights {given} must be numbers from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, "
            "separated by commas"
        )
    if given is not None and len(weights) != most:
        raise ConfigError(
            f"--api-key-weights has {len(weights)} weights and --api-key {most} keys: give one "
            "for each"
        )
    return weights


def _name(digest: bytes) -> str:
    """Returns the name of a key's client."""
    return "key " + digest.hex()[:16]


def _shows(authorization: str | None, digests: list[bytes]) -> bool:
    """Returns whether the value is `Bearer` and one of the keys."""
    scheme, _, key = (authorization or "").partition(" ")
    given = _digest(key.strip())
    # All digests are compared and have one length, so that the time gives no key away.
    known = [hmac.compare_digest(given, digest) for digest in digests]
    return scheme.lower() == "bearer" and any(known)


def _digest(key: str) -> bytes:
    # Headers that are not UTF-8 arrive with surrogates.
    return sha256(key.encode(errors="surrogateescape")).digest()
