"""KV blocks over TCP: without TLS, no copy in user space on either side."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import msgspec

from pdserve.common.config.shared import TLSConfig
from pdserve.common.core.errors import Blame, ConfigError, TransferError
from pdserve.common.rpc.tls import TLS
from pdserve.kv_transfer.connector import Capabilities
from pdserve.kv_transfer.connectors.base.channel import HashingPipeMover, Mover
from pdserve.kv_transfer.connectors.base.sockets import SocketListener, SocketPipe, TLSPipe
from pdserve.kv_transfer.connectors.pipe_connector import PipeConnector
from pdserve.kv_transfer.pipe import KVPipe, PipeListener, PipeTransport

CONNECT_TIMEOUT_S = 5.0
UNACKED_TIMEOUT_MS = 30_000  # after which a peer behind a cut link is lost
BUFFER_NBYTES = 4 << 20  # of all streams to a rank
BACKLOG = 1024  # connections that wait to be accepted; the kernel drops more


class Endpoint(msgspec.Struct):
    host: Annotated[str, msgspec.Meta(max_length=253)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tls: bool | None = None  # None: an older release


_endpoints = msgspec.msgpack.Decoder(Endpoint)


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """Holds `--kv-connector-config` of the tcp connector."""

    # Linux always allows Reno. BBR, which some hosts choose, halves the speed of a transfer within
    # a rack by its pacing. "" keeps the host's choice.
    congestion_control: str = "reno"
    # Connections between two ranks. One fills a loopback; a long or shared network may need more.
    streams: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # Mutual TLS, as between the roles: `"tls": true` stands for the node's own files.
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    def tls(self) -> TLS | None:
        """Raises ConfigError, as `TLS.load`."""
        return TLS.load(TLSConfig(tls_cert=self.tls_cert, tls_key=self.tls_key, tls_ca=self.tls_ca))


class TCPConnector(PipeConnector):
    capabilities: ClassVar[Capabilities] = replace(
        PipeConnector.capabilities, sink_writes=True, source_hashes=True
    )

    def transport(self, config: Mapping[str, Any]) -> PipeTransport:
        try:
            return TCPTransport(msgspec.convert(dict(config), Options))
        except msgspec.ValidationError as error:
            raise ConfigError(f"--kv-connector-config of tcp: {error}") from error

    def mover(self, pipe: KVPipe) -> Mover:
        assert isinstance(pipe, SocketPipe)  # our own transport made it
        return HashingPipeMover(self.context.view, pipe)


class TCPTransport(PipeTransport):
    """Raises ConfigError when this host lacks the congestion control, or the files for TLS are
    unusable."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._tls = options.tls()
        self._files = None if self._tls is None else self._tls.renewals()
        self._context = None if self._tls is None else self._tls.client_context()
        self.streams = options.streams
        with socket.socket() as probe:
            try:
                tune(probe, options)
            except OSError as error:
                algorithm = options.congestion_control
                raise ConfigError(f"congestion control {algorithm!r}: {error}") from error

    def listen(self, host: str) -> PipeListener:
        return TCPListener(host, self._options, self._tls)

    def dial(self, endpoint: bytes) -> SocketPipe:
        """Connects to a listener.

        Raises:
            OSError: the endpoint is invalid or does not answer, or, with TLS, the peer has no
                certificate for the host that was dialled.
            TransferError: TLS_MISMATCH, only one of the two uses TLS.
        """
        try:
            where = _endpoints.decode(endpoint)
            self._check_tls(where.tls)
            sock = socket.create_connection((where.host, where.port), CONNECT_TIMEOUT_S)
        except ValueError as error:  # msgspec.DecodeError is one; so is a host like "a..b"
            raise ConnectionError(f"not a TCP endpoint: {error}") from error
        try:
            tune(sock, self._options)
            if self._tls is None or self._files is None or self._context is None:
                return SocketPipe(sock)
            if self._files.renewed():
                self._context = self._tls.client_context()
            return TLSPipe(self._context.wrap_socket(sock, server_hostname=where.host))
        except BaseException:
            sock.close()
            raise

    def _check_tls(self, theirs: bool | None) -> None:
        if theirs is None or theirs == (self._tls is not None):
            return
        they, we = ("TLS", "plain TCP") if theirs else ("plain TCP", "TLS")
        raise TransferError(
            f"the decode node takes KV over {they} and the prefill node sends it over {we}: give "
            'both the same "tls" in --kv-connector-config, and --tls-cert to both or to neither',
            code="TLS_MISMATCH",
            blame=Blame.PREFILL,
            retryable=False,
        )


class TCPListener(SocketListener):
    """Listens on a free port of `host`, with `tls` if given, whose files may be renewed."""

    def __init__(self, host: str, options: Options, tls: TLS | None = None) -> None:
        self._options = options
        self._tls = tls
        self._files = None if tls is None else tls.renewals()
        self._context = None if tls is None else tls.server_context()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        endpoint = Endpoint(host, sock.getsockname()[1], tls is not None)
        super().__init__(sock, msgspec.msgpack.encode(endpoint))

    def accept(self) -> SocketPipe:
        sock, address = self._sock.accept()
        try:
            pipe = self._pipe(tune(sock, self._options))
        except OSError as error:
            sock.close()
            raise ConnectionAbortedError(f"the peer left at once: {error}") from error
        pipe.peer_host = address[0]
        return pipe

    def _pipe(self, sock: socket.socket) -> SocketPipe:
        if self._tls is None or self._files is None or self._context is None:
            return SocketPipe(sock)
        if self._files.renewed():
            self._context = self._tls.server_context()
        return TLSPipe(
            self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        )


def tune(sock: socket.socket, options: Options) -> socket.socket:
    """Sets no delay, large buffers and the detection of a dead peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_NBYTES // options.streams)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKED_TIMEOUT_MS)
    if options.congestion_control:
        algorithm = options.congestion_control.encode()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
    return sock
