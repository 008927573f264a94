"""Strangers at a KV port: they are told nothing, take no honest source's place and fill no log.

Everything goes through real sockets; a stranger is a socket that the test speaks by hand."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from connector_ranks import ID, SINK_IDS, Rank, keys, ranks, submit_to
from pdserve.common.config.shared import TLSConfig
from pdserve.common.core.throttle import LogThrottle
from pdserve.common.rpc.auth import ClusterKey
from pdserve.kv_transfer.connector import (
    BlockRun,
    Failed,
    KVConnector,
    Landed,
    RankContext,
    Sent,
    SinkTransfer,
)
from pdserve.kv_transfer.connectors.base import handshake, server
from pdserve.kv_transfer.connectors.shm import ShmConnector
from pdserve.kv_transfer.connectors.tcp import Endpoint, TCPConnector
from pdserve.kv_transfer.frame import HEADER_NBYTES, Frame, FrameKind
from pdserve.kv_transfer.selection import rank_config
from thinned import slow
from waiting import wait_until

FINGERPRINT = "the-right-fingerprint"
OLD, NEW = "the-old-key-of-the-cluster", "the-new-key-of-the-cluster"
STRANGERS = 1100
Made = Callable[..., "Rank"]


@pytest.fixture
def rank() -> Iterator[Made]:
    with ranks() as made:

        def make(key: str = OLD, kind: type[KVConnector] = TCPConnector, fill: float = 0.0) -> Rank:
            return made(kind, key=key, fill=fill, fingerprint=FINGERPRINT)

        yield make


def counts(rank: Rank) -> dict[str, int]:
    return dict(rank.connector.counts)


def address_of(rank: Rank) -> tuple[str, int]:
    where = msgspec.msgpack.decode(rank.connector.endpoint(), type=Endpoint)
    return where.host, where.port


def send_to(source: Rank, endpoint: bytes, transfer_id: bytes = ID) -> None:
    submit_to(source, endpoint, transfer_id)
    source.connector.ready(transfer_id, BlockRun(0, 4), (0, 1, 2, 3), True)


def check_lands(sink: Rank, source: Rank, transfer_id: bytes = ID) -> None:
    sink.connector.accept(SinkTransfer(transfer_id, 1, 0, SINK_IDS))
    send_to(source, sink.connector.endpoint(), transfer_id)
    source.expect(Sent)
    sink.expect(Landed)
    assert (sink.cache[:, :, list(SINK_IDS)] == 1.0).all()


@contextlib.contextmanager
def stranger(sink: Rank, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    """At the port of `sink`, from an address of this host."""
    with socket.create_connection(address_of(sink), 30, source_address=(host, 0)) as sock:
        yield sock


def say(sock: socket.socket, kind: FrameKind, payload: bytes = b"") -> None:
    sock.sendall(Frame(kind, nbytes=len(payload)).encode() + payload)


def hear(sock: socket.socket) -> tuple[FrameKind, bytes]:
    frame = Frame.decode(read(sock, HEADER_NBYTES))
    return frame.kind, read(sock, frame.nbytes)


def read(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise ConnectionError(f"{len(data)} of {nbytes} bytes")
        data += part
    return data


def hung_up(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return sock.recv(1) == b""
    return True


# ---- what a stranger is told ----


@pytest.mark.parametrize("key", ["", OLD])
def test_a_wrong_hello_is_not_answered_with_the_right_fingerprint(rank: Made, key: str) -> None:
    sink = rank(key)
    with stranger(sink) as sock:
        say(sock, FrameKind.HELLO, b"a guess")
        kind, told = hear(sock)
        assert kind is FrameKind.REFUSED and FINGERPRINT.encode() not in told
        assert told.startswith(b"CLUSTER_AUTH_FAILED" if key else b"FINGERPRINT_MISMATCH")
        assert hung_up(sock)


def test_a_peer_with_the_fingerprint_and_without_the_key_is_refused_first(
    rank: Made,
) -> None:
    sink = rank()
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    for guess in (bytes(32), b"", bytes(4096)):
        with stranger(sink) as sock:
            say(sock, FrameKind.CHALLENGE, bytes(32))
            kind, number = hear(sock)
            assert (kind, len(number)) == (FrameKind.CHALLENGE, 32)
            say(sock, FrameKind.PROOF, guess)
            sock.shutdown(socket.SHUT_WR)
            said = b""
            with contextlib.suppress(ConnectionError):
                kind, said = hear(sock)
                assert kind is FrameKind.REFUSED
            assert FINGERPRINT.encode() not in said and hung_up(sock)
    assert not sink.cache.any()
    check_lands(sink, rank(fill=1.0), b"transfer-id-0002")


@pytest.mark.parametrize(
    ("of_sink", "of_source", "says"),
    [
        (OLD, NEW, "has another cluster key"),
        (OLD, "", "shows no cluster key"),
        ("", OLD, "the decode node has none"),
    ],
)
def test_ranks_of_two_clusters_tell_each_other_what_to_do(
    rank: Made, of_sink: str, of_source: str, says: str
) -> None:
    """A node with a key refuses one without it, and the reverse: neither goes on without."""
    sink, source = rank(of_sink), rank(of_source, fill=1.0)
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    send_to(source, sink.connector.endpoint())
    failed = source.expect(Failed)
    assert failed.code == "CLUSTER_AUTH_FAILED"
    assert says in failed.message and "same --cluster-key" in failed.message
    wait_until(lambda: counts(sink).get("CLUSTER_AUTH_FAILED") == 1)
    assert not sink.cache.any()


@pytest.mark.parametrize(
    ("of_sink", "of_source"),
    [
        (OLD, OLD),
        ("", ""),
        (OLD, f"{OLD},{NEW}"),
        (f"{OLD},{NEW}", f"{NEW},{OLD}"),
        (f"{NEW},{OLD}", OLD),
        (NEW, f"{NEW},{OLD}"),
    ],
)
def test_keys_rotate_without_a_gap(rank: Made, of_sink: str, of_source: str) -> None:
    sink, source = rank(of_sink), rank(of_source, fill=1.0)
    check_lands(sink, source)
    check_lands(sink, source, b"transfer-id-0002")  # on the connection that was kept


def test_shared_memory_needs_no_key_for_the_kernel_says_who_it_is(rank: Made) -> None:
    sink, source = rank(OLD, ShmConnector), rank(NEW, ShmConnector, fill=1.0)
    check_lands(sink, source)


# ---- proofs are good once, for one side, at one endpoint ----


class Relay:
    """Between a source and a sink; keeps what the source said first."""

    def __init__(self, sink: Rank) -> None:
        self._to = address_of(sink)
        self.said = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.endpoint = msgspec.msgpack.encode(Endpoint("127.0.0.1", port, False))
        self._pool = ThreadPoolExecutor(3)
        self._ways = self._pool.submit(self._run)

    def _run(self) -> None:
        with (
            self._listener,
            self._listener.accept()[0] as source,
            socket.create_connection(self._to, 30) as sink,
        ):
            back = self._pool.submit(self._pump, sink, source, False)
            self._pump(source, sink, True)
            back.result()

    def _pump(self, one: socket.socket, other: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.said += data if keep else b""
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._pool.shutdown()


def test_a_proof_for_another_endpoint_is_refused(rank: Made) -> None:
    """A host that a source was sent to cannot pass its proof on to a decode rank."""
    sink, source = rank(), rank(fill=1.0)
    relay = Relay(sink)
    send_to(source, relay.endpoint)
    assert source.expect(Failed).code == "CLUSTER_AUTH_FAILED"
    wait_until(lambda: counts(sink).get("CLUSTER_AUTH_FAILED") == 1)
    source.connector.close(5.0)
    relay.close()


def test_a_replayed_greeting_is_refused(rank: Made) -> None:
    sink, source = rank(), rank(fill=1.0)
    relay, address = Relay(sink), address_of(sink)
    sink.connector.endpoint = lambda: relay.endpoint  # so that the proof is good for it
    send_to(source, relay.endpoint)
    source.expect(Sent)
    source.connector.close(5.0)
    relay.close()
    assert counts(sink)["unknown_frame"] and not sink.cache.any()  # it was never accepted
    sink.connector.accept(SinkTransfer(ID, 1, 0, SINK_IDS))
    with socket.create_connection(address, 30) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(relay.said)
        heard = b""
        while data := sock.recv(1 << 16):
            heard += data
        assert Frame(FrameKind.WELCOME).encode() not in heard
    wait_until(lambda: counts(sink).get("CLUSTER_AUTH_FAILED") == 1)
    assert not sink.cache.any()


def test_a_source_does_not_trust_its_own_words_from_another(rank: Made) -> None:
    """A stranger who has taken the port of a dead decode rank mirrors the source."""
    source = rank(fill=1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        send_to(source, msgspec.msgpack.encode(Endpoint("127.0.0.1", port, False)))
        with listener.accept()[0] as sock:
            for _ in range(2):  # the number, the proof
                say(sock, *hear(sock))
            assert hear(sock)[0] is FrameKind.HELLO
            say(sock, FrameKind.WELCOME)
            failed = source.expect(Failed)
            assert (failed.code, failed.blame) == ("CLUSTER_AUTH_FAILED", "decode")
            assert failed.retryable and hung_up(sock)  # no KV came


def test_ranks_have_a_key_of_their_own_that_no_text_shows() -> None:
    key = ClusterKey(f"{OLD},{NEW}")
    made = rank_config({"tcp": {}}, "f", TLSConfig(), source=True, key=key)
    found = msgspec.msgpack.decode(made)["keys"]
    assert tuple(found) == keys(f"{OLD},{NEW}") and len(set(found)) == 2
    assert OLD.encode() not in made and NEW.encode() not in made
    context = RankContext(None, "", "", print, tuple(found))  # type: ignore[arg-type]
    assert repr(found[0])[2:-1] not in repr(context) and "keys" not in repr(context)


# ---- a crowd of strangers ----


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4 * STRANGERS:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * STRANGERS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("key", [slow(""), OLD])
def test_1100_strangers_do_not_make_the_next_transfer_fail(
    rank: Made, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink, source = rank(key), rank(key, fill=1.0)
    before = threading.active_count()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(stranger(sink)) for _ in range(STRANGERS)]
        wait_until(lambda: counts(sink).get("dropped_stranger", 0) >= STRANGERS - 64)
        # each of those who wait has a thread and a timer; so has the source's end
        wait_until(lambda: threading.active_count() <= before + 2 * server.MAX_STRANGERS + 8)
        assert hung_up(crowd[0])
        check_lands(sink, source)
    lines = [text for text in caplog.messages if "had sent no greeting" in text]
    assert lines and len(caplog.messages) <= 2 * (time.monotonic() - started) + 2


def test_strangers_of_one_host_take_no_place_of_another_s(
    rank: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 4)
    sink = rank()
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(stranger(sink, "127.0.0.2"))  # it came first
        say(slow, FrameKind.CHALLENGE, bytes(32))
        assert hear(slow)[0] is FrameKind.CHALLENGE
        crowd = [stack.enter_context(stranger(sink)) for _ in range(20)]
        wait_until(lambda: counts(sink).get("dropped_stranger") == 17)
        assert all(hung_up(each) for each in crowd[:17])
        say(slow, FrameKind.PROOF, bytes(32))
        assert hear(slow)[0] is FrameKind.REFUSED  # it was heard


def test_a_welcomed_source_is_not_dropped_for_strangers(
    rank: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 2)
    sink, source = rank(), rank(fill=1.0)
    check_lands(sink, source)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(stranger(sink))
        wait_until(lambda: counts(sink).get("dropped_stranger") == 8)
        check_lands(sink, source, b"transfer-id-0002")
    assert "PEER_LOST" not in counts(source)


def test_a_stranger_has_seconds_in_all_not_for_each_frame(
    rank: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "GREETING_S", 1.0)
    sink = rank()
    with stranger(sink) as sock:
        started = time.monotonic()
        say(sock, FrameKind.CHALLENGE, bytes(32))
        assert hear(sock)[0] is FrameKind.CHALLENGE
        proof = Frame(FrameKind.PROOF, nbytes=32).encode() + bytes(32)
        with contextlib.suppress(OSError):
            for byte in proof:  # they would take twenty seconds
                sock.send(bytes([byte]))
                time.sleep(0.2)
        assert hung_up(sock) and time.monotonic() - started < 15
    wait_until(lambda: counts(sink).get("CONNECT_FAILED") == 1)


def test_strangers_who_talk_nonsense_fill_no_log(
    rank: Made, caplog: pytest.LogCaptureFixture
) -> None:
    sink = rank("")
    started = time.monotonic()
    for _ in range(200):
        with stranger(sink) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
            assert hung_up(sock)
    wait_until(lambda: counts(sink).get("BAD_FRAME") == 200)
    lines = [text for text in caplog.messages if "BAD_FRAME" in text]
    assert 1 <= len(lines) <= time.monotonic() - started + 2


def test_lines_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    throttle = LogThrottle(logging.getLogger("door"), interval=1.0, now=lambda: now)
    for _ in range(5):
        throttle.warning("who is %s", "it")
    now = 1.5
    throttle.warning("who is %s", "it")
    now = 3.0
    throttle.warning("who is %s", "it")
    assert caplog.messages == [
        "who is it",
        "who is it (4 more since the last line)",
        "who is it",
    ]
