"""What one process proves with who it is: the channels through which it calls other roles, and the
check of those that call it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable
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
    # A peer that restarts at its old address is found again at once, however long it was away.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # despite its name: how long one attempt may take
    ("grpc.dns_ares_query_timeout", 3_000),  # a name that does not resolve fails soon …
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # … and is tried again soon
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of a role, under the id by which logs name this process."""

    role: str
    node_id: str
    tls: TLS | None = None
    key: ClusterKey | None = None

    @classmethod
    def load(
        cls, role: str, node_id: str, tls: TLSConfig, auth: AuthConfig, hosts: Iterable[str]
    ) -> Credentials:
        """`hosts` are the addresses this process will bind to.

        Raises:
            ConfigError: as `TLS.load` and `ClusterKey`; or others could reach a host, and nothing
                would tell them from this cluster's roles.
        """
        files = TLS.load(tls)
        key = None if auth.cluster_key is None else ClusterKey(auth.cluster_key)
        if key is None and files is not None and role not in files.roles():
            raise ConfigError(
                f"--tls-cert {files.cert} does not name the role {role}: make certificates with "
                "`pdserve certs`, or give all roles the same --cluster-key as well"
            )
        open_host = next((host for host in hosts if not is_loopback(host)), None)
        if key is None and files is None and open_host is not None and not auth.insecure:
            raise ConfigError(
                f"other hosts reach {open_host}, and nothing keeps strangers out: give all roles "
                "the same --cluster-key (PDSERVE_CLUSTER_KEY; `openssl rand -hex 32` makes one) or "
                "--tls-cert, --tls-key and --tls-ca; or say --insecure where no stranger is"
            )
        return cls(role, node_id, files, key)

    def interceptor(self) -> AuthInterceptor:
        """For a server that other roles call."""
        return AuthInterceptor(self.key, by_certificate=self.tls is not None)

    def channels(self) -> Channels:
        """For this process's calls of other roles."""
        if self.key is None:
            return Channels(self.tls)
        return Channels(self.tls, partial(Signer, self.key, self.role, self.node_id))


class Channels:
    """Channels by address, made on first use and kept; mutual TLS with `tls`."""

    def __init__(
        self, tls: TLS | None = None, signer: Callable[[str], Signer] | None = None
    ) -> None:
        """`signer` makes what signs the calls of an address."""
        self._credentials = None if tls is None else _channel_credentials(tls)
        self._signer = signer
        self._channels: dict[str, grpc.aio.Channel | SignedChannel] = {}

    def get(self, address: str) -> Any:
        """A `grpc.aio.Channel`, or what stands for one with those who sign their calls."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._signed(address)
        return channel

    def _signed(self, address: str) -> grpc.aio.Channel | SignedChannel:
        channel = self._open(address)
        return channel if self._signer is None else SignedChannel(channel, self._signer(address))

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)

    async def drop(self, addresses: Iterable[str]) -> None:
        for address in list(addresses):
            channel = self._channels.pop(address, None)
            if channel is not None:
                await channel.close(None)

    async def keep(self, addresses: Collection[str]) -> None:
        """Drops the channels to all others: each costs a connection, and trying for ever to
        reach what is gone."""
        await self.drop([address for address in self._channels if address not in addresses])

    def __len__(self) -> int:
        return len(self._channels)

    async def close(self) -> None:
        await self.drop(list(self._channels))


def _channel_credentials(tls: TLS) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
    )


class SignedChannel:
    """A channel each of whose calls carries a token of its own; as much of `grpc.aio.Channel` as
    our stubs use. A call that was refused for its time is made again, once, by the server's
    clock: nothing of it was read."""

    def __init__(self, channel: grpc.aio.Channel, signer: Signer) -> None:
        self._channel = channel
        self._signer = signer

    def unary_unary(
        self, method: str, request_serializer: Serializer, *args: Any, **options: Any
    ) -> Callable[..., Any]:
        call = self._channel.unary_unary(method, None, *args, **options)

        async def signed(request: Any, **options: Any) -> Any:
            message = request_serializer(request)
            token = self._signer.sign(method, message)
            try:
                return await call(message, **_with(token, options))
            except grpc.aio.AioRpcError as error:
                if not self._learnt(token, error):
                    raise
            return await call(message, **_with(self._signer.sign(method, message), options))

        return signed

    def unary_stream(
        self, method: str, request_serializer: Serializer, *args: Any, **options: Any
    ) -> Callable[..., Any]:
        call = self._channel.unary_stream(method, None, *args, **options)

        def signed(request: Any, **options: Any) -> SignedStream:
            message = request_serializer(request)

            def start() -> tuple[str, Any]:
                token = self._signer.sign(method, message)
                return token, call(message, **_with(token, options))

            return SignedStream(start, self._learnt)

        return signed

    def _learnt(self, token: str, error: grpc.aio.AioRpcError) -> bool:
        """Whether a call with this token was refused for its time, and the next will not be."""
        metadata: Any = error.trailing_metadata() or ()
        clock = dict(metadata).get(CLOCK_KEY)
        return isinstance(clock, str) and self._signer.learn(token, clock)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)


class SignedStream:
    """A call whose answer is a stream; as much of `grpc.aio.UnaryStreamCall` as we use."""

    def __init__(
        self,
        start: Callable[[], tuple[str, Any]],
        learnt: Callable[[str, grpc.aio.AioRpcError], bool],
    ) -> None:
        """`start` makes the call: its token, and what gRPC has of it."""
        self._start, self._learnt = start, learnt
        self._token, self._call = start()
        self._may_repeat = True

    async def read(self) -> Any:
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            if not (self._may_repeat and self._learnt(self._token, error)):
                raise
            _, self._call = self._start()
            event = await self._call.read()
        finally:
            self._may_repeat = False
        return event

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (event := await self.read()) is not EOF:
            yield event

    def cancel(self) -> bool:
        cancelled: bool = self._call.cancel()
        return cancelled


def _with(token: str, options: dict[str, Any]) -> dict[str, Any]:
    """A call's options, the token among its metadata."""
    return {**options, "metadata": (*(options.get("metadata") or ()), (TOKEN_KEY, token))}
