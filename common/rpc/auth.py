"""How one role knows another: a token in the metadata of each call, made with the cluster key.

    v1 ROLE ID ADDRESS TIME NONCE.DIGEST MAC

MAC is HMAC-SHA256 under the key over the method and all fields before it, DIGEST is the message's
SHA-256 (the version before has none, and takes it as part of the nonce). A token is good for one
message to one method of one server, once (the server remembers the nonces), while it is less than
WINDOW_S old by the server's clock. A server that refuses a call for its time says in the refusal
what its own clock shows, with a MAC over that and the call's nonce: the caller makes the call
again, signed by the server's clock. Clocks are read when a process starts; setting a host's clock
later changes nothing in it.

A node's server knows where it is dialled and takes no token for another address. The registry does
not: nodes dial a name that their resolver, a proxy or a service of Kubernetes makes up. There the
digest is what stops whoever gets hold of a node's registration and passes it on: it registers that
node, as it said itself, and nothing else.

A token does not hide what is said, and answers have none: on a network where others can listen or
change packets use TLS as well.
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

TOKEN_KEY = "pdserve-token"  # the metadata's name
WINDOW_S = 30.0
MIN_KEY_LENGTH = 16  # characters
MAX_NONCES = 1 << 17  # of the last 2 × WINDOW_S; beyond it the oldest may be used again
MAX_REFUSED = 1 << 12  # nonces of the last tokens that came before their time
_VERSION = "v1"

ROUTER, PREFILL, DECODE, BOTH = "router", "prefill", "decode", "both"
_NODES = frozenset({PREFILL, DECODE, BOTH})
# Who may call what. Every role may ask for the contracts, and everybody whether a server is well.
CALLERS: dict[str, frozenset[str]] = {
    "/pdserve.v1.Registry/Register": _NODES,
    "/pdserve.v1.Registry/Heartbeat": _NODES,
    "/pdserve.v1.Registry/Deregister": _NODES,
    "/pdserve.v1.Adapters/Set": frozenset({ROUTER}),
    "/pdserve.v1.Prefill/Run": frozenset({ROUTER}),
    "/pdserve.v1.Decode/Run": frozenset({ROUTER}),
    "/pdserve.v1.Decode/Events": frozenset({ROUTER}),
    "/pdserve.v1.Decode/FinishChoice": frozenset({ROUTER}),
    "/pdserve.v1.KVTransfer/Commit": frozenset({PREFILL}),
    "/pdserve.v1.KVTransfer/Renew": frozenset({PREFILL}),
    "/pdserve.v1.KVTransfer/Abort": frozenset({PREFILL}),
    "/pdserve.v1.KVTransfer/Retarget": frozenset({ROUTER, PREFILL}),
}
REFLECTION = "/grpc.reflection."


def new_node_id(role: str) -> str:
    """For example `prefill-3fa9c1`: new at every start, so a restarted node is another node."""
    return f"{role}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who made a call, as far as it was proved."""

    roles: frozenset[str]
    node_id: str = ""  # empty: a certificate does not say
    digest: str = ""  # of the message that the caller sends; empty: it does not say

    def is_node(self, role: str, node_id: str) -> bool:
        return role in self.roles and self.node_id in ("", node_id)


caller_var: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Who made the call that the current task answers; None: nobody was asked to prove it."""


def steady_time() -> Callable[[], float]:
    """A clock that shows Unix time now, and from now on goes by one that is never set."""
    kind = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # which counts a host's sleep
    ahead = time.time() - time.clock_gettime(kind)
    return lambda: ahead + time.clock_gettime(kind)


class ClusterKey:
    """Signs this process's calls and checks those of others. One for each process: it remembers
    which tokens it has seen."""

    def __init__(self, keys: str, now: Callable[[], float] | None = None) -> None:
        """`keys` is `--cluster-key`.

        Raises:
            ConfigError: one of them is too short to withstand guessing.
        """
        words = [key.strip() for key in keys.split(",")]
        if min(map(len, words)) < MIN_KEY_LENGTH:
            raise ConfigError(
                f"--cluster-key has a key of fewer than {MIN_KEY_LENGTH} characters: make one, for "
                "example with `openssl rand -hex 32`"
            )
        self._keys = [word.encode() for word in words]
        self._now = now or steady_time()
        self._seen: OrderedDict[str, float] = OrderedDict()  # nonce → when it may be forgotten
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
        """The token of one call of `method` of the server dialled at `address`, whose clock is
        `ahead` seconds ahead of this process's; good for `message` alone."""
        nonce = secrets.token_hex(8) + ("" if message is None else f".{_digest(message)}")
        made = self._now() + ahead
        fields = f"{_VERSION} {role} {node_id} {address} {made:.3f} {nonce}"
        return f"{fields} {_mac(self._keys[0], method, fields).decode()}"

    def check(self, token: str | None, method: str, address: str = "") -> Caller:
        """Who made this call of `method`; `address` is where this server is dialled, if it knows.
        Its message is the caller's only if `check_message` says so, too.

        Raises:
            ClusterAuthError: the token does not prove that this caller may make this call, now.
        """
        if not token:
            raise _refusal("the call shows no cluster key", _SAME_KEY)
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
            raise _refusal(f"the call was meant for {dialled}, this is {address}", _ONE_ADDRESS)
        check_role(frozenset({role}), method)
        self._check_nonce(nonce)
        return Caller(frozenset({role}), node_id, nonce.partition(".")[2])

    def clock_ahead(self, token: str, clock: str) -> float | None:
        """By how many seconds the clock is ahead of the server that refused `token` with
        `ClockSkew.clock`; None: it does not prove that it is this cluster's."""
        shown, _, mac = clock.rpartition(" ")
        nonce, given = token.split(" ")[-2], mac.encode(errors="replace")
        if not any(hmac.compare_digest(_clock_mac(k, nonce, shown), given) for k in self._keys):
            return None
        return float(shown) - self._now()

    def _check_time(self, made: float, nonce: str, key: bytes) -> None:
        now = self._now()
        if abs(now - made) <= WINDOW_S:
            return
        self._refused[nonce] = None  # its time may come
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
        shown = f"{now:.3f}"
        raise ClockSkew(
            f"by the clocks of the two hosts the call was made {now - made:.0f} s ago, and "
            f"{WINDOW_S:.0f} s may lie between: set the clocks (NTP)",
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
        """Keys for something else than calls, one for each of the list and in its order. They do
        not give the list away, and sign no call."""
        use = f"pdserve key for {purpose}".encode()  # no method of gRPC begins like this
        return tuple(hmac.digest(key, use, "sha256") for key in self._keys)


class Signer:
    """Signs a process's calls of one server, by that server's clock once it has shown it."""

    def __init__(self, key: ClusterKey, role: str, node_id: str, address: str) -> None:
        self._key = key
        self._role, self._node_id, self._address = role, node_id, address
        self._ahead = 0.0  # seconds by which the server's clock is

    def sign(self, method: str, message: bytes) -> str:
        """The token of a call of `method` with `message`."""
        return self._key.sign(
            self._role, self._node_id, method, self._address, message, self._ahead
        )

    def learn(self, token: str, clock: str) -> bool:
        """Whether the server, which refused `token` with this `ClockSkew.clock`, takes the next."""
        ahead = self._key.clock_ahead(token, clock)
        if ahead is None:
            return False
        logger.info(
            "the clock of the server at %s is %.0f s %s this process's: calls go by that one",
            self._address, abs(ahead), "ahead of" if ahead > 0 else "behind",
        )  # fmt: skip
        self._ahead = ahead
        return True


_SAME_KEY = "give all roles the same --cluster-key (PDSERVE_CLUSTER_KEY)"
_SAME_RELEASE = "run one release of pdserve on all hosts"
_PROXY = "look for a proxy that changes what roles tell each other"
_ONE_ADDRESS = "give each node an --advertise-host of its own"
_ROLES = "name the role in its certificate, as `pdserve certs` does, or use --cluster-key"


def check_role(roles: frozenset[str], method: str) -> None:
    """Raises ClusterAuthError: none of the roles may call the method."""
    callers = (
        _NODES | {ROUTER} if method.startswith(REFLECTION) else CALLERS.get(method, frozenset())
    )
    if not roles & callers:
        who = " or ".join(sorted(roles)) or "a peer without a role"
        raise _refusal(f"{who} may not call {method}", _ROLES)


def check_message(caller: Caller, message: bytes) -> None:
    """Raises ClusterAuthError: the caller's token is of a call with another message."""
    if caller.digest and not hmac.compare_digest(caller.digest, _digest(message)):
        raise _refusal("the call's message is not the one that its token was made for", _PROXY)


def no_key_here() -> ClusterAuthError:
    """For a call that shows a token to a server without a key, which could not answer in kind."""
    return _refusal("the call shows a cluster key, and this server has none", _SAME_KEY)


def _refusal(what: str, mend: str) -> ClusterAuthError:
    return ClusterAuthError(f"{what}: {mend}")


def _clock_mac(key: bytes, nonce: str, shown: str) -> bytes:
    return _mac(key, "clock", f"{nonce} {shown}")  # no method is named so


def _digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def _mac(key: bytes, method: str, fields: str) -> bytes:
    message = f"{method}\n{fields}".encode(errors="replace")
    return hmac.digest(key, message, "sha256").hex().encode()
