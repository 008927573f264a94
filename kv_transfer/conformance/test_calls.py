"""Checks declarations, refusals, and late, repeated or unknown calls."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pdserve.common.core.errors import Blame, ConfigError, TransferError
from pdserve.kv_transfer.commands import Ready
from pdserve.kv_transfer.conformance.ends import DEATH_S, LocalEnd
from pdserve.kv_transfer.conformance.kit import Kit
from pdserve.kv_transfer.conformance.nodes import Pair, settle
from pdserve.kv_transfer.connector import (
    API_VERSION,
    BlockRun,
    Capabilities,
    Failed,
    KVConnector,
    Landed,
    Sent,
    SourceTransfer,
)
from pdserve.kv_transfer.layout import Piece

ID, OTHER = b"transfer-id-0001", b"transfer-id-0002"


def check_typed(failed: Failed, blame: Blame | None = None) -> None:
    """Code, blame and message are what logs, metrics and retries work with."""
    assert re.fullmatch(r"[A-Z][A-Z_]+", failed.code), f"Failed.code in UPPER_SNAKE_CASE: {failed}"
    assert failed.blame in set(Blame), f"Failed.blame is a value of Blame: {failed}"
    assert failed.message, "Failed.message says what happened"
    if blame is not None:
        assert failed.blame == blame, f"the {blame} side is to blame: {failed}"


def outcome(end: LocalEnd, endpoint: bytes) -> Failed | TransferError:
    """Returns the event that ends a transfer to `endpoint`."""
    try:
        end.submit(SourceTransfer(ID, 1, ((Piece(0, 0, end.cache.rect), endpoint),)))
        end.ready(Ready(ID, BlockRun(0, 1), (1,), True))
    except TransferError as error:
        return error
    return end.events.wait(Failed, ID, DEATH_S)


def test_declarations(kit: Kit) -> None:
    """The class is a KVConnector of this API version and declares who moves the data."""
    kind: Any = kit.target.load()
    assert issubclass(kind, KVConnector), "derive from pdserve.kv_transfer.connector.KVConnector"
    assert kind.api_version == API_VERSION, "written for another version of the interface"
    assert isinstance(kind.capabilities, Capabilities), "declare `capabilities` on the class"
    assert kind.capabilities.push or kind.capabilities.pull, "who moves the data? push or pull"
    assert "cpu" in kind.capabilities.devices, (
        "the kit's caches are in host memory: it cannot check this connector"
    )


def test_unknown_options_are_refused(kit: Kit) -> None:
    """A misspelt option in --kv-connector-config is a ConfigError at start, not ignored."""
    kind, view = kit.target.load(), kit.node().end.connector.context
    with pytest.raises(ConfigError):
        kind(view, {**kit.target.config, "no-such-option": 1})


def test_endpoint(kit: Kit) -> None:
    """The endpoint is bytes that fit into a ticket, and stays the same."""
    end = kit.node().end
    endpoint = end.endpoint()
    assert isinstance(endpoint, bytes), "endpoint() returns bytes, opaque to the core"
    assert 0 < len(endpoint) < 4096, "endpoints travel in every ticket: keep them small"
    assert end.endpoint() == endpoint, "the ticket's endpoint must stay valid"


def test_duplicate_calls(kit: Kit) -> None:
    """`accept`, `submit` and `ready` may come twice: the second time counts for nothing."""
    pair = kit.pair()
    pair.accept(ID, (7, 8, 9))
    pair.submit(ID)
    pair.submit(ID)
    pair.ready(ID, BlockRun(0, 2), (1, 2))
    pair.ready(ID, BlockRun(0, 2), (1, 2))
    pair.accept(ID, (7, 8, 9))
    settle()
    pair.ready(ID, BlockRun(2, 1), (3,), last=True)
    pair.ready(ID, BlockRun(2, 1), (3,), last=True)
    (landed,), (sent,) = pair.wait_landed(ID), pair.wait_sent(ID)
    settle()
    assert pair.arrived((1, 2, 3), (7, 8, 9)), "the blocks are not what the source's were"
    assert pair.others_untouched((7, 8, 9)), "a block was written that the transfer does not name"
    assert len(pair.sink.end.events.of(Landed, ID)) == 1, "Landed must be emitted exactly once"
    assert len(pair.source.end.events.of(Sent, ID)) == 1, "Sent must be emitted exactly once"
    assert landed.nbytes == pair.nbytes(3), "Landed.nbytes counts each block once"
    assert sent.nbytes == pair.nbytes(3), "Sent.nbytes counts each block once"


def test_unknown_transfers(kit: Kit) -> None:
    """`ready`, `quiesce` and `release` of a transfer that is not known return at once, without
    an error or an event: cancellation and delivery cross each other all the time."""
    end = kit.node().end
    end.endpoint()
    end.ready(Ready(ID, BlockRun(0, 1), (1,), False))
    end.ready(Ready(ID, BlockRun(1, 1), (2,), True))
    end.quiesce(ID)
    end.release(ID)
    settle()
    assert not end.events.all(), "an event about a transfer that was not begun"


def test_a_transfer_the_sink_did_not_accept(kit: Kit) -> None:
    """Data for a transfer that the sink does not know is counted and dropped; the next transfer
    between the two arrives."""
    pair = kit.pair()
    pair.submit(ID)
    pair.announce(ID, (1, 2, 3))
    pair.send(OTHER, (4, 5), (20, 30))
    assert pair.arrived((4, 5), (20, 30)), "the blocks are not what the source's were"
    assert pair.others_untouched((20, 30)), "a transfer was written that the sink did not accept"
    assert not pair.sink.end.events.of(Landed, ID), "Landed, but it was never accepted"


GARBAGE = {
    "nothing": b"",
    "zero": b"\0",
    "noise": b"\xff" * 64,
    "json": b"{}",
    "address": b"nowhere:0",
    "path": b"../../x",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_endpoints(kit: Kit, garbage: bytes) -> None:
    """An endpoint that is garbage fails its transfer with a typed error, and no other."""
    pair = kit.pair()
    failed = outcome(pair.source.end, garbage)
    if isinstance(failed, Failed):
        check_typed(failed)
    pair.send(OTHER, (4, 5), (20, 30))
    assert pair.arrived((4, 5), (20, 30)), "the connector is of no use after a bad endpoint"


def test_truncated_endpoint(kit: Kit) -> None:
    """Half of a real endpoint is garbage, too."""
    endpoint = kit.node().end.endpoint()
    failed = outcome(kit.node().end, endpoint[: len(endpoint) // 2])
    if isinstance(failed, Failed):
        check_typed(failed)


def test_a_closed_endpoint_fails_retryably(kit: Kit) -> None:
    """The sink is gone before the source connects: Failed, the decode side's fault, and another
    try may succeed."""
    gone = kit.node().end
    endpoint = gone.endpoint()
    gone.close()
    end = kit.node().end
    failed = outcome(end, endpoint)
    assert isinstance(failed, Failed), "a failure to connect is a `Failed` event"
    check_typed(failed, Blame.DECODE)
    assert failed.retryable, "another sink may be alive: retryable"
    end.quiesce(ID)


def test_another_fingerprint_is_refused(kit: Kit) -> None:
    """Ranks of different models, dtypes or layouts must not exchange KV: it would be read as
    something else. The source learns it as FINGERPRINT_MISMATCH, which no retry fixes."""
    pair = Pair(kit.node(fingerprint="another"), kit.node())
    pair.accept(ID, (7, 8, 9))
    pair.submit(ID)
    pair.announce(ID, (1, 2, 3))
    failed = pair.source.end.events.wait(Failed, ID, DEATH_S)
    check_typed(failed)
    assert failed.code == "FINGERPRINT_MISMATCH", "code FINGERPRINT_MISMATCH"
    assert not failed.retryable, "no retry fixes it"
    assert pair.others_untouched(()), "blocks were written by a source of another fingerprint"


@pytest.mark.parametrize(
    "keys", [(), (b"the key of another cluster than !",)], ids=["none", "another"]
)
def test_another_key_is_refused(kit: Kit, keys: tuple[bytes, ...]) -> None:
    """For a connector that declares `authenticates`, unless the kernel identifies its peers
    (`same_host`): a source without the sink's key writes nothing and learns that it is refused, and
    so does a source with a key at a sink without one. Sources with the key continue."""
    if not kit.capabilities.authenticates or kit.capabilities.same_host:
        return
    pair = Pair(kit.node(), kit.node())
    for stranger in (Pair(kit.node(keys=keys), pair.sink), Pair(pair.source, kit.node(keys=keys))):
        stranger.accept(ID, (7, 8, 9))
        stranger.submit(ID)
        stranger.announce(ID, (1, 2, 3))
        failed = stranger.source.end.events.wait(Failed, ID, DEATH_S)
        check_typed(failed)
        assert failed.code == "CLUSTER_AUTH_FAILED", "code CLUSTER_AUTH_FAILED"
        assert stranger.others_untouched(()), "blocks were written by a source without the key"
        stranger.source.end.quiesce(ID)
        stranger.sink.end.quiesce(ID)
    pair.send(OTHER, (4, 5), (20, 30))
    assert pair.arrived((4, 5), (20, 30)), "the connector is of no use after a stranger came"
