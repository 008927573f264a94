"""Authentication between roles: a token in the metadata of each call, made with the cluster key.

    v1 ROLE ID ADDRESS TIME NONCE.DIGEST MAC

MAC is HMAC-SHA256 under the key over the method and all fields before it; DIGEST is the message's
SHA-256; a stream of messages has none, and its token is for all of them (older versions have none
and treat it as part of the nonce). A token is valid once (the server remembers nonces), for one
message to one method of one server, while it is less than WINDOW_S old by the server's clock. If a
server refuses a call because of its time, the refusal contains the server's time, with a MAC over
it and the call's nonce; the caller then repeats the call with that time. Clocks are read when a
process starts, so setting a host's clock later has no effect.

A node's server knows its own address and refuses tokens for others. The registry does not, because
nodes connect to names from a resolver, a proxy or a Kubernetes service. There the digest limits a
replay of a captured registration: it can only register that same node.

Tokens do not encrypt, and answers have none. Use TLS as well on a network where others can read or
change packets.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from pdserve.common.core.errors import ClockSkew, ClusterAuthError, ConfigError

logger = logging.getLogger(__name__)

TOKEN_KEY = "pdserve-token"  # metadata key
WINDOW_S = 30.0
MIN_KEY_LENGTH = 16  # characters
MAX_NONCES = 1 << 17  # remembered from the last 2 × WINDOW_S; the oldest are forgotten first
MAX_REFUSED = 1 << 12  # nonces of the last tokens refused because of their time
_VERSION = "v1"

ROUTER, PREFILL, DECODE, BOTH = "router", "prefill", "decode", "both"
_NODES = frozenset({PREFILL, DECODE, BOTH})
# Which roles may call which method. Every role may use reflection; health is open to all.
CALLERS: dict[str, frozenset[str]] = {
    "/pdserve.v1.Registry/Register": _NODES,
    "/pdserve.v1.Registry/Heartbeats": _NODES,
    "/pdserve.v1.Registry/Deregister": _NODES,
    "/pdserve.v1.Adapters/Set": frozenset({ROUTER}),
    "/pdserve.v1.KVEvents/Subscribe": frozenset({ROUTER}),
    "/pdserve.v1.Prefill/Run": frozenset({ROUTER}),
    "/pdserve.v1.Decode/Run": frozenset({ROUTER}),
    "/pdserve.v1.Decode/Events": frozenset({ROUTER}),
    "/pdserve.v1.Decode/Claim": frozenset({ROUTER}),
    "/pdserve.v1.Decode/TellKept": frozenset({ROUTER}),
    "/pdserve.v1.Decode/FinishChoice": frozenset({ROUTER}),
    "/pdserve.v1.KVTransfer/Commit": frozenset({PREFILL}),
    "/pdserve.v1.KVTransfer/Renew": frozenset({PREFILL}),
    "/pdserve.v1.KVTransfer/Abort": frozenset({PREFILL}),
    "/pdserve.v1.KVTransfer/Retarget": frozenset({ROUTER, PREFILL}),
}
REFLECTION = "/grpc.reflection."


def new_node_id(role: str) -> str:
    """Returns an id such as `prefill-3fa9c1`, new at every start: a restarted node is a new
    node."""
    return f"{role}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated caller of a call."""

    roles: frozenset[str]
    node_id: str = ""  # empty if authenticated by a certificate
    digest: str = ""  # of the caller's message; empty if not given

    def is_node(self, role: str, node_id: str) -> bool:
        return role in self.roles and self.node_id in ("", node_id)


caller_var: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller of the current task's call; None: the server does not authenticate."""


def steady_time() -> Callable[[], float]:
    """Returns a clock that starts with Unix time and is not affected by setting the host's
    clock."""
    kind = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # includes suspend time
    ahead = time.time() - time.clock_gettime(kind)
    return lambda: ahead + time.clock_gettime(kind)


class ClusterKey:
    """Signs this process's calls and checks those of others. One per process, because it remembers
    the nonces it has seen."""

    def __init__(self, keys: str, now: Callable[[], float] | None = None) -> None:
        """`keys`: --cluster-key.

        Raises:
            ConfigError: one of them is too short to resist guessing.
        """
        words = [key.strip() for key in keys.split(",")]
        if min(map(len, words)) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"--cluster-key has fewer than {MIN_KEY_LENGTH} characters: make one, for example "
                "with `openssl rand -hex 32`"
            )
        self._keys = [word.encode() for word in words]
        self._now = now or steady_time()
        self._seen: OrderedDict[str, float] = OrderedDict()  # nonce → time to forget it
        self._refused: OrderedDict[str, None] = OrderedDict()  # nonces

    def sign(
        self,
        role: str,
        node_id: str,
        method: str,
        address: str,
        message: bytes | None = None,
        ahead: float = 0.0,
    ) -> str:
        """Returns the token of a call of `method` with `message` to the server at `address`, whose
        clock is `ahead` seconds ahead of this process's."""
        nonce = secrets.token_hex(8) + ("" if message is None else f".{_digest(message)}")
        made = self._now() + ahead
        fields = f"{_VERSION} {role} {node_id} {address} {made:.3f} {nonce}"
        return f"{fields} {_mac(self._keys[0], method, fields).decode()}"

    def check(self, token: str | None, method: str, address: str = "") -> Caller:
        """Returns the caller of this call of `method`. `address`: this server's, if it knows it.
        The message still has to be checked with `check_message`.

        Raises:
            ClusterAuthError: the token is not valid for this call.
        """
        if not token:
            raise _refusal("the call has no token of the cluster key", _SAME_KEY)
        fields, _, mac = token.rpartition(" ")
        given = mac.encode(errors="replace")
        keys = (k for k in self._keys if hmac.compare_digest(_mac(k, method, fields), given))
        if (key := next(keys, None)) is None:
            raise _refusal("the call was made with another cluster key, or for another method",
                           _SAME_KEY)  # fmt: skip
        version, *rest = fields.split(" ")
        if version != _VERSION or len(rest) != 5:
            raise _refusal(f"the token is of version {version}, not {_VERSION}", _SAME_RELEASE)
        role, node_id, dialled, made, nonce = rest
        self._check_time(float(made), nonce, key)
        if address and dialled != address:
            raise _refusal(f"the call is for {dialled}, but this is {address}", _ONE_ADDRESS)
        check_role(frozenset({role}), method)
        self._check_nonce(nonce)
        return Caller(frozenset({role}), node_id, nonce.partition(".")[2])

    def clock_ahead(self, token: str, clock: str) -> float | None:
        """Returns by how many seconds the clock of the server that refused `token` with
        `ClockSkew.clock` is ahead; None if `clock` is not authentic."""
        shown, _, mac = clock.rpartition(" ")
        nonce, given = token.split(" ")[-2], mac.encode(errors="replace")
        if not any(hmac.compare_digest(_clock_mac(k, nonce, shown), given) for k in self._keys):
            return None
        return float(shown) - self._now()

    def _check_time(self, made: float, nonce: str, key: bytes) -> None:
        now = self._now()
        if abs(now - made) <= WINDOW_S:
            return
        self._refused[nonce] = None  # or it could be used when its time comes
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        shown = f"{now:.3f}"
        raise ClockSkew(
            f"by the clocks of the two hosts the call is {now - made:.0f} s old, and the limit is "
            f"{WINDOW_S:.0f} s: set the clocks (NTP)",
            f"{shown} {_clock_mac(key, nonce, shown).decode()}",
        )

    def _check_nonce(self, nonce: str) -> None:
        now = self._now()
        while self._seen and (
            next(iter(self._seen.values())) < now or len(self._seen) >= MAX_NONCES
        ):
            self._seen.popitem(last=False)
        if nonce in self._seen or nonce in self._refused:
            raise _refusal("the token was used before", "make a new one for each call")
        self._seen[nonce] = now + 2 * WINDOW_S

    def derive(self, purpose: str) -> tuple[bytes, ...]:
        """Returns keys for another purpose, one per cluster key in order. They reveal nothing of
        the cluster keys and cannot sign calls."""
        use = f"pdserve key for {purpose}".encode()  # cannot equal a gRPC method
        return tuple(hmac.digest(key, use, "sha256") for key in self._keys)


class Signer:
    """Signs a process's calls to one server, by that server's clock once it is known."""

    def __init__(self, key: ClusterKey, role: str, node_id: str, address: str) -> None:
        self._key = key
        self._role, self._node_id, self._address = role, node_id, address
        self._ahead = 0.0  # seconds by which the server's clock is ahead

    def sign(self, method: str, message: bytes | None) -> str:
        """Returns the token of a call of `method` with `message`, or with a stream of them."""
        return self._key.sign(
            self._role, self._node_id, method, self._address, message, self._ahead
        )

    def learn(self, token: str, clock: str) -> bool:
        """Adopts the clock of the server that refused `token` with `ClockSkew.clock`; returns
        whether it is authentic."""
        ahead = self._key.clock_ahead(token, clock)
        if ahead is None:
            return False
        logger.info(
            "the clock of the server at %s is %.0f s %s this process's: calls use the server's",
            self._address, abs(ahead), "ahead of" if ahead > 0 else "behind",
        )  # fmt: skip
        self._ahead = ahead
        return True


_SAME_KEY = "give all roles the same --cluster-key (PDSERVE_CLUSTER_KEY)"
_SAME_RELEASE = "run one release of pdserve on all hosts"
_PROXY = "look for a proxy that changes messages between roles"
_ONE_ADDRESS = "give each node an --advertise-host of its own"
_ROLES = "name the role in its certificate, as `pdserve certs` does, or use --cluster-key"
_OWN_PAIR = "give each role the certificate that names it, as `pdserve certs --by-role` makes them"


def check_role(roles: frozenset[str], method: str) -> None:
    """Raises ClusterAuthError unless one of the roles may call the method."""
    callers = (
        _NODES | {ROUTER} if method.startswith(REFLECTION) else CALLERS.get(method, frozenset())
    )
    if not roles & callers:
        who = " or ".join(sorted(roles)) or "a peer without a role"
        raise _refusal(f"{who} may not call {method}", _ROLES)


def check_certificate(caller: Caller, roles: frozenset[str]) -> None:
    """Raises ClusterAuthError if the caller's certificate names roles, and not the token's. One
    without roles says nothing of its holder's."""
    if roles and not roles & caller.roles:
        held, said = (" or ".join(sorted(each)) for each in (roles, caller.roles))
        raise _refusal(f"the call is a {said}'s, but its certificate is of {held}", _OWN_PAIR)


def check_message(caller: Caller, message: bytes) -> None:
    """Raises ClusterAuthError if the caller's token was made for another message."""
    if caller.digest and not hmac.compare_digest(caller.digest, _digest(message)):
        raise _refusal("the call's token was made for another message", _PROXY)


def no_key_here() -> ClusterAuthError:
    """Returns the error for a token on a call to a server without a key, which cannot check it."""
    return _refusal("the call has a token of a cluster key, but this server has no key", _SAME_KEY)


def _refusal(what: str, fix: str) -> ClusterAuthError:
    return ClusterAuthError(f"{what}: {fix}")


def _clock_mac(key: bytes, nonce: str, shown: str) -> bytes:
    return _mac(key, "clock", f"{nonce} {shown}")  # "clock" is not a method


def _digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def _mac(key: bytes, method: str, fields: str) -> bytes:
    message = f"{method}\n{fields}".encode(errors="replace")
    return hmac.digest(key, message, "sha256").hex().encode()
