"""A process's credentials: its channels to other roles, and the interceptor that checks callers."""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterable,
)
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from pdserve.common.config.shared import AuthConfig, TLSConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import is_loopback
from pdserve.common.rpc.auth import TOKEN_KEY, ClusterKey, Signer
from pdserve.common.rpc.server import KEEPALIVE, MESSAGE_LIMITS, AuthInterceptor
from pdserve.common.rpc.status import CLOCK_KEY
from pdserve.common.rpc.tls import TLS

Serializer = Callable[[Any], bytes]

_OPTIONS = [
    *MESSAGE_LIMITS,
    *KEEPALIVE,
    # Reconnect at once to a peer that restarts at its old address.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # despite its name the time limit of an attempt
    ("grpc.dns_ares_query_timeout", 3_000),  # unresolvable names fail soon …
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # … and are retried soon
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a role and its process id in logs."""

    role: str
    node_id: str
    tls: TLS | None = None
    key: ClusterKey | None = None

    @classmethod
    def load(
        cls, role: str, node_id: str, tls: TLSConfig, auth: AuthConfig, hosts: Iterable[str]
    ) -> Credentials:
        """Reads the credentials. `hosts`: the addresses this process will bind to.

        Raises:
            ConfigError: as `TLS.load` and `ClusterKey` do; the certificate is another role's; or
                other hosts can reach one of `hosts` and there is neither a key nor TLS.
        """
        files = TLS.load(tls)
        key = None if auth.cluster_key is None else ClusterKey(auth.cluster_key)
        named = frozenset() if files is None else files.roles()
        # With a key a certificate that names no role is one of any.
        if files is not None and role not in named and (named or key is None):
            raise ConfigError(
                f"--tls-cert {files.cert} does not name the role {role}: give it one that does, "
                "as `pdserve certs` makes them, or one that names no role, and all roles the same "
                "--cluster-key as well"
            )
        open_host = next((host for host in hosts if not is_loopback(host)), None)
        if key is None and files is None and open_host is not None and not auth.insecure:
            raise ConfigError(
                f"other hosts can reach {open_host} without authentication: give all roles the "
                "same --cluster-key (PDSERVE_CLUSTER_KEY; `openssl rand -hex 32` makes one) or "
                "--tls-cert, --tls-key and --tls-ca; or pass --insecure on a trusted network"
            )
        return cls(role, node_id, files, key)

    def interceptor(self) -> AuthInterceptor:
        """Returns the interceptor for a server that other roles call."""
        return AuthInterceptor(self.key, by_certificate=self.tls is not None)

    def channels(self) -> Channels:
        """Returns the channels for calls to other roles."""
        if self.key is None:
            return Channels(self.tls)
        return Channels(self.tls, partial(Signer, self.key, self.role, self.node_id))


class Channels:
    """Channels by address, created on first use and kept; mutual TLS with `tls`."""

    def __init__(
        self, tls: TLS | None = None, signer: Callable[[str], Signer] | None = None
    ) -> None:
        """`signer`: creates the signer of calls to an address."""
        self._tls = tls
        self._files = None if tls is None else tls.renewals()
        self._credentials = None if tls is None else _channel_credentials(tls)
        # Channels with an older certificate: their calls continue.
        self._retired: dict[str, list[grpc.aio.Channel | SignedChannel]] = {}
        self._signer = signer
        self._channels: dict[str, grpc.aio.Channel | SignedChannel] = {}
        self._names: dict[str, str] = {}

    def name(self, address: str, host: str) -> None:
        """Expects the certificate of the server at this address to name `host`."""
        self._names[address] = host

    def get(self, address: str) -> Any:
        """Returns a `grpc.aio.Channel`, or a `SignedChannel`. It is another one after our
        certificate has been renewed; ask for it for each call."""
        self._renew()
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._signed(address)
        return channel

    def _renew(self) -> None:
        """Replaces the channels after our certificate was renewed: a server would refuse one that
        reconnects with a certificate that has expired since."""
        if self._tls is None or self._files is None or not self._files.renewed():
            return
        self._credentials = _channel_credentials(self._tls)
        for address, channel in self._channels.items():
            self._retired.setdefault(address, []).append(channel)
        self._channels.clear()

    def _signed(self, address: str) -> grpc.aio.Channel | SignedChannel:
        channel = self._open(address)
        return channel if self._signer is None else SignedChannel(channel, self._signer(address))

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        host = self._names.get(address)
        named = [("grpc.ssl_target_name_override", host)] if host else []
        return grpc.aio.secure_channel(address, self._credentials, options=[*_OPTIONS, *named])

    async def drop(self, addresses: Iterable[str]) -> None:
        for address in list(addresses):
            channels = self._retired.pop(address, [])
            if (channel := self._channels.pop(address, None)) is not None:
                channels.append(channel)
            for each in channels:
                await each.close(None)

    async def keep(self, addresses: Collection[str]) -> None:
        """Drops all other channels; each costs a connection, or endless attempts to reconnect."""
        known = {*self._channels, *self._retired}
        await self.drop(known.difference(addresses))

    @property
    def addresses(self) -> Collection[str]:
        """Where its channels lead."""
        return self._channels.keys()

    async def close(self) -> None:
        await self.drop({*self._channels, *self._retired})


def _channel_credentials(tls: TLS) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
    )


class SignedChannel:
    """A channel that adds a token to each call, with the part of `grpc.aio.Channel`'s interface
    that our stubs use. A call refused because of its time is repeated once with the server's
    clock."""

    def __init__(self, channel: grpc.aio.Channel, signer: Signer) -> None:
        self._channel = channel
        self._signer = signer

    def unary_unary(
        self, method: str, request_serializer: Serializer, *args: Any, **options: Any
    ) -> Callable[..., SignedCall]:
        call = self._channel.unary_unary(method, None, *args, **options)
        return partial(self._call, method, request_serializer, call)

    def unary_stream(
        self, method: str, request_serializer: Serializer, *args: Any, **options: Any
    ) -> Callable[..., SignedCall]:
        call = self._channel.unary_stream(method, None, *args, **options)
        return partial(self._call, method, request_serializer, call)

    def stream_stream(
        self, method: str, request_serializer: Serializer, *args: Any, **options: Any
    ) -> Callable[..., Any]:
        """Returns gRPC's own calls, which are not repeated."""
        call = self._channel.stream_stream(method, request_serializer, *args, **options)

        def start(**options: Any) -> Any:
            return call(**_with(self._signer.sign(method, None), options))

        return start

    def _call(
        self, method: str, serializer: Serializer, call: Any, request: Any, **options: Any
    ) -> SignedCall:
        message = serializer(request)

        def start() -> tuple[str, Any]:
            token = self._signer.sign(method, message)
            return token, call(message, **_with(token, options))

        return SignedCall(start, self._learnt)

    def _learnt(self, token: str, error: grpc.aio.AioRpcError) -> bool:
        """Returns whether the call was refused because of its time and may be repeated."""
        metadata: Any = error.trailing_metadata() or ()
        clock = dict(metadata).get(CLOCK_KEY)
        return isinstance(clock, str) and self._signer.learn(token, clock)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)


class SignedCall:
    """A call whose answer is awaited, or a stream that is read, with the part of the interface of
    `grpc.aio.UnaryUnaryCall` and `UnaryStreamCall` that we use."""

    def __init__(
        self,
        start: Callable[[], tuple[str, Any]],
        learnt: Callable[[str, grpc.aio.AioRpcError], bool],
    ) -> None:
        """`start`: starts the call and returns (its token, gRPC's call)."""
        self._start, self._learnt = start, learnt
        self._token, self._call = start()
        self._may_repeat = True

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer(lambda call: call).__await__()

    async def read(self) -> Any:
        return await self._answer(lambda call: call.read())

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (event := await self.read()) is not EOF:
            yield event

    async def _answer(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        try:
            return await ask(self._call)
        except grpc.aio.AioRpcError as error:
            if not (self._may_repeat and self._learnt(self._token, error)):
                raise
            _, self._call = self._start()
        finally:
            self._may_repeat = False
        return await ask(self._call)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls `callback` when the first attempt has ended; awaiting may start a second one."""
        self._call.add_done_callback(callback)

    def cancel(self) -> bool:
        cancelled: bool = self._call.cancel()
        return cancelled


def _with(token: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns a call's options with the token in its metadata."""
    return {**options, "metadata": (*(options.get("metadata") or ()), (TOKEN_KEY, token))}
