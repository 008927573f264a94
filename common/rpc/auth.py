"""How one role knows another: a token in the metadata of each call, made with the cluster key.

    v1 ROLE ID ADDRESS TIME NONCE.DIGEST MAC

MAC is HMAC-SHA256 under the key over the method and all fields before it, DIGEST is the message's
SHA-256 (the version before has none, and takes it as part of the nonce). A token is good for one
message to one method of one server, once (the server remembers the nonces), while the clocks of the
two hosts differ by less than WINDOW_S.

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
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from pdserve.common.core.errors import ClusterAuthError, ConfigError

TOKEN_KEY = "pdserve-token"  # the metadata's name
WINDOW_S = 30.0
MIN_KEY_LENGTH = 16  # characters
MAX_NONCES = 1 << 17  # of the last 2 × WINDOW_S; beyond it the oldest may be used again
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
    "/pdserve.v1.Decode/Tokens": frozenset({ROUTER}),
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


class ClusterKey:
    """Signs this process's calls and checks those of others. One for each process: it remembers
    which tokens it has seen."""

    def __init__(self, keys: str, now: Callable[[], float] = time.time) -> None:
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
        self._now = now
        self._seen: OrderedDict[str, float] = OrderedDict()  # nonce → when it may be forgotten

    def sign(
        self, role: str, node_id: str, method: str, address: str, message: bytes | None = None
    ) -> str:
        """The token of one call of `method` of the server dialled at `address`, good for `message`
        alone."""
        nonce = secrets.token_hex(8) + ("" if message is None else f".{_digest(message)}")
        fields = f"{_VERSION} {role} {node_id} {address} {self._now():.3f} {nonce}"
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
        if not any(hmac.compare_digest(_mac(key, method, fields), given) for key in self._keys):
            raise _refusal("the call was made with another cluster key, or for another method",
                           _SAME_KEY)  # fmt: skip
        version, *rest = fields.split(" ")
        if version != _VERSION or len(rest) != 5:
            raise _refusal(f"the token is of version {version}, not {_VERSION}", _SAME_RELEASE)
        role, node_id, dialled, made, nonce = rest
        self._check_time(float(made))
        if address and dialled != address:
            raise _refusal(f"the call was meant for {dialled}, this is {address}", _ONE_ADDRESS)
        check_role(frozenset({role}), method)
        self._check_nonce(nonce)
        return Caller(frozenset({role}), node_id, nonce.partition(".")[2])

    def _check_time(self, made: float) -> None:
        late = self._now() - made
        if abs(late) > WINDOW_S:
            raise _refusal(
                f"by the clocks of the two hosts the call was made {late:.0f} s ago, and "
                f"{WINDOW_S:.0f} s may lie between", "set the clocks (NTP)"
            )  # fmt: skip

    def _check_nonce(self, nonce: str) -> None:
        now = self._now()
        while self._seen and (
            next(iter(self._seen.values())) < now or len(self._seen) >= MAX_NONCES
        ):
            self._seen.popitem(last=False)
        if nonce in self._seen:
            raise _refusal("the token was used before", "make a new one for each call")
        self._seen[nonce] = now + 2 * WINDOW_S


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


def _digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def _mac(key: bytes, method: str, fields: str) -> bytes:
    message = f"{method}\n{fields}".encode(errors="replace")
    return hmac.digest(key, message, "sha256").hex().encode()
