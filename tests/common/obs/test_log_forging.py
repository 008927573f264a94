"""Text from others cannot forge a line of the log, move a terminal's cursor, or carry this
process's inner errors to clients."""

from __future__ import annotations

import json
import logging
from typing import Any

import grpc
import pytest

from pdserve.common.core.errors import Blame
from pdserve.common.core.printable import MAX_PEER_TEXT, cut, peer_code, printable
from pdserve.common.obs.logging import (
    MAX_MESSAGE_LENGTH,
    JSONFormatter,
    TextFormatter,
    request_id_var,
)
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import REQUEST_ID_KEY, from_rpc_error, serving
from pdserve.kv_transfer.connectors.base.channel import as_transfer_error
from pdserve.router.api.app_state import IgnoredLog
from pdserve.router.api.ignored import Ignored
from prefill_server import serving_prefill

FORGED = "12:00:00.000 INFO    router - all is well"
NASTY = [
    f"d0\n{FORGED}",
    f"d0\r{FORGED}",
    f"d0\x0b{FORGED}",
    f"d0\u2028{FORGED}",
    f"d0\x85{FORGED}",
    "d0\x1b[2J\x1b[1;1H",
    "d0\x1b]0;title\x07",
    "d0\x9b2J",  # a control sequence of one byte
    "d0\x00\x08\x7f",
    "d0 \u202egnp.exe",  # right to left
    "d0 \u2066x\u2069\u200f",
    "d0 \ud800",
]


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    return logging.LogRecord("x", logging.INFO, "file", 1, "%s", (message,), info)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", NASTY)
def test_a_line_stays_one_line_of_plain_characters(text: str) -> None:
    line = TextFormatter("router", colour=False).format(record(text))
    assert line.isprintable(), line
    assert line.endswith(f"router - {printable(text)}")
    line = JSONFormatter("router").format(record(text))
    assert line.isprintable(), line
    assert json.loads(line)["message"] == text


@pytest.mark.parametrize("formatter", [TextFormatter("router", colour=False), JSONFormatter("r")])
def test_a_request_id_forges_nothing(formatter: logging.Formatter) -> None:
    token = request_id_var.set(f"id\n{FORGED}")
    try:
        assert formatter.format(record("hello")).isprintable()
    finally:
        request_id_var.reset(token)


def test_the_lines_of_a_traceback_cannot_pass_for_others() -> None:
    text = TextFormatter("router", colour=False).format(
        record("failed", ValueError(f"bad\n{FORGED}\n\x1b[2J"))
    )
    first, *others = text.split("\n")
    assert first.endswith("failed")
    assert any(FORGED in line for line in others)
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_a_message_is_bounded() -> None:
    long = "x" * 10_000_000
    for formatter in (TextFormatter("router", colour=False), JSONFormatter("router")):
        assert len(formatter.format(record(long))) < MAX_MESSAGE_LENGTH + 300
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "abc… (1 more characters)"


class Failing(pb_grpc.PrefillServicer):
    """Fails with the error it is given, and notes the request ids it logs under."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.seen: list[str | None] = []

    async def Run(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async with serving(context):
            self.seen.append(request_id_var.get())
            raise self.error
        yield pb.PrefillEvent()


async def failed_call(
    servicer: pb_grpc.PrefillServicer, metadata: Any = ()
) -> grpc.aio.AioRpcError:
    async with serving_prefill(servicer) as address, grpc.aio.insecure_channel(address) as channel:
        call = pb_grpc.PrefillStub(channel).Run(pb.PrefillRequest(), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return caught.value


async def test_an_internal_error_stays_inside_and_is_found_by_its_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = await failed_call(Failing(KeyError("/etc/secret: hunter2")))
    known = from_rpc_error(error, Blame.DECODE)
    assert known.code == "INTERNAL"
    assert "hunter2" not in str(error.details()) and "KeyError" not in str(error.details())
    error_id = known.message.rpartition(" ")[2]
    (logged,) = [each for each in caplog.records if error_id in each.getMessage()]
    assert logged.exc_info and "hunter2" in str(logged.exc_info[1])


async def test_a_peer_s_request_id_is_a_plain_word_or_none() -> None:
    noting = Failing(KeyError())
    for given in ("cmpl-7", "two words", "x" * 129):
        await failed_call(noting, ((REQUEST_ID_KEY, given),))
    assert noting.seen == ["cmpl-7", "-", "-"]


class Rude(pb_grpc.PrefillServicer):
    """A peer that answers with what no pdserve node would."""

    async def Run(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        metadata = (("pdserve-error-code", "no code"), ("pdserve-retryable", "1"))
        text = f"gone\n{FORGED}\x1b[2J" + "x" * 5000
        await context.abort(grpc.StatusCode.INTERNAL, text, metadata)
        yield pb.PrefillEvent()


async def test_a_peer_s_error_text_is_bounded_and_stripped_before_it_goes_on() -> None:
    error = await failed_call(Rude())
    known = from_rpc_error(error, Blame.DECODE)
    assert known.message.isprintable()
    assert known.message.startswith("gone\\n12:00")
    assert len(known.message) < MAX_PEER_TEXT + 100
    assert known.code == "PEER_ERROR"


def test_an_invalid_error_code_is_replaced() -> None:
    for code in ("", "lower", "A B", "A\nB", "9X", "X" * 65):
        assert peer_code(code) == "PEER_ERROR"
    assert peer_code("PEER_LOST") == "PEER_LOST"


def test_names_of_unknown_fields_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields, ignored = IgnoredLog(), Ignored()
    for number in range(200):
        ignored.add(f"{number}{'x' * 100_000}")
    fields.note(ignored.names)
    fields.note({str(number) for number in range(5000)})
    fields.note({"one more"})
    assert len(caplog.messages) == 2 and all(len(each) < 10_000 for each in caplog.messages)


def test_a_connector_s_defect_is_named_by_its_kind_alone(caplog: pytest.LogCaptureFixture) -> None:
    error = as_transfer_error(ValueError("hunter2"), Blame.DECODE)
    assert "hunter2" not in error.message and "ValueError" in error.message
    assert "hunter2" in str(caplog.records[-1].exc_info)
