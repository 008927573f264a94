"""Log lines, metrics and the three routes an orchestrator asks."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from benchmarks.fleet import free_port
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import ConfigError, Overloaded, TransferError
from pdserve.common.core.request import FinishReason, PromptPath, Timeline
from pdserve.common.obs.histograms import TOKEN_SECONDS, BulkHistogram
from pdserve.common.obs.http import bind_metrics, start_metrics_server
from pdserve.common.obs.logging import (
    MAX_CHARS,
    MAX_LINES,
    JSONFormatter,
    LogWriter,
    TextFormatter,
    request_id_var,
    setup_logging,
)
from pdserve.common.obs.metrics import NodeMetrics, RouterMetrics
from pdserve.common.obs.process import read_ports, write_ports

FINISHED = Timeline(
    queued=0.1, first_token=0.5, finished=2.5, prefill_queue_seconds=0.2, prefill_seconds=0.2
)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("pdserve.test", level, "file", 1, message, (), None)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"pdserve_{name}", labels)


def test_a_text_line_has_time_level_role_rank_and_request(
    root_logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    setup_logging("prefill", LogConfig(), rank=1)
    token = request_id_var.set("cmpl-7")
    logging.getLogger("x").info("took %d ms", 5)
    request_id_var.reset(token)
    logging.getLogger("x").debug("not shown at info")
    line = r"\d\d:\d\d:\d\d\.\d{3} INFO    prefill/1 cmpl-7 took 5 ms\n"
    root_logger.handlers[0].flush()
    # gRPC, of which other tests leave something, may have written lines of its own before.
    assert re.fullmatch(line, capfd.readouterr().err.splitlines(keepends=True)[-1])


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        os.close(fd)


def test_a_stalled_reader_does_not_block_logging_and_learns_what_was_dropped(
    pipe: tuple[int, int],
) -> None:
    reader, fd = pipe
    writer = LogWriter(fd)
    for _ in range(5):  # the pipe and the queue are full long before the end
        for number in range(MAX_LINES):
            writer.handle(record(f"line {number} " + "x" * 100))
    text, dropped = "", None
    while dropped is None:  # it reads again
        text += os.read(reader, 2**16).decode()
        dropped = re.search(r"^(\d+) log lines were dropped here", text, re.MULTILINE)
    assert text.count("line ") + int(dropped[1]) == 5 * MAX_LINES
    writer.handle(record("in order again"))
    writer.flush()
    assert os.read(reader, 2**16).decode() == "in order again\n"
    writer.close()


def test_a_line_is_bounded_and_a_closed_pipe_is_no_failure(pipe: tuple[int, int]) -> None:
    reader, fd = pipe
    writer = LogWriter(fd)
    writer.handle(record("y" * 10**6))
    writer.flush()
    assert len(os.read(reader, 2**20)) < 2 * MAX_CHARS
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), reader)  # the number stays this test's
    writer.handle(record("without a reader"))
    writer.flush()
    writer.close()


def test_a_slow_reader_behind_a_high_descriptor_reads_all(pipe: tuple[int, int]) -> None:
    """A process with a thousand connections has such numbers; and another one may have set the
    file so that it does not block."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1100:
        pytest.skip("ulimit -n is too low")
    reader, fd = pipe
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1024)
    os.set_blocking(high, False)
    writer = LogWriter(high)
    lines = [f"line {number} {'z' * 1000}\n" for number in range(200)]  # more than a pipe holds
    for line in lines:
        writer.put(line)
    text = ""
    while len(text) < len("".join(lines)):
        text += os.read(reader, 2**12).decode()
    assert text == "".join(lines)
    writer.flush()
    writer.close()
    os.close(high)


ENDING = """
import logging
from pdserve.common.config.shared import LogConfig
from pdserve.common.obs.logging import setup_logging

setup_logging("router", LogConfig())
for number in range(%d):
    logging.getLogger("x").info("line %%d " + "x" * 100, number)
"""


def test_a_process_that_ends_writes_its_last_lines_or_gives_up_on_a_stalled_reader(
    pipe: tuple[int, int],
) -> None:
    def ended(lines: int, stderr: int) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-c", ENDING % lines], stderr=stderr, timeout=120)

    done = ended(1000, subprocess.PIPE)
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 0
    assert len(lines) == 1000 and "line 999 " in lines[-1]
    assert ended(3 * MAX_LINES, pipe[1]).returncode == 0


def test_grpc_is_told_to_write_errors_alone(
    root_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other lines have another format, and tell of each peer that stops."""
    monkeypatch.setenv("GRPC_VERBOSITY", "given")
    setup_logging("router", LogConfig())
    assert os.environ["GRPC_VERBOSITY"] == "given"
    monkeypatch.delenv("GRPC_VERBOSITY")
    setup_logging("router", LogConfig())
    assert os.environ["GRPC_VERBOSITY"] == "ERROR"


async def test_each_task_logs_its_own_request() -> None:
    formatter = TextFormatter("router", colour=False)

    async def work(request_id: str) -> str:
        request_id_var.set(request_id)
        await asyncio.sleep(0)
        return formatter.format(record("hello"))

    first, second = await asyncio.gather(work("a"), work("b"))
    assert first.endswith("router a hello")
    assert second.endswith("router b hello")
    assert formatter.format(record("hello")).endswith("router - hello")


def test_an_exception_is_one_json_object() -> None:
    event = record("failed", logging.ERROR)
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        event.exc_info = (ValueError, error, error.__traceback__)
    line = JSONFormatter("decode").format(event)
    assert "\n" not in line
    found = json.loads(line)
    assert found["level"] == "error"
    assert found["role"] == "decode"
    assert "request_id" not in found
    assert found["exception"].endswith("ValueError: no\nway")


def test_a_request_is_counted_and_timed() -> None:
    metrics = RouterMetrics()
    metrics.observe_request(
        FINISHED,
        prompt_tokens=7,
        generated=[4, 6],
        max_tokens=16,
        finish_reasons=[FinishReason.STOP, FinishReason.LENGTH],
    )
    refused = Overloaded("full")
    metrics.observe_error(refused)
    metrics.observe_error(refused)  # seen once more on its way out
    found = metrics.registry
    assert value(found, "requests_total", code="OK") == 1
    assert value(found, "requests_total", code="OVERLOADED") == 1
    assert value(found, "request_success_total", finished_reason="stop") == 1
    assert value(found, "request_generation_tokens_bucket", le="5.0") == 1
    sums = {
        "prompt_tokens_total": 7, "generation_tokens_total": 10,
        "time_to_first_token_seconds_sum": 0.5, "e2e_request_latency_seconds_sum": 2.5,
        "request_queue_time_seconds_sum": 0.3, "request_prefill_time_seconds_sum": 0.2,
        "request_decode_time_seconds_sum": 2, "request_inference_time_seconds_sum": 2.2,
        "request_prompt_tokens_sum": 7, "request_max_num_generation_tokens_sum": 6,
        "request_params_max_tokens_sum": 16, "request_params_n_sum": 2,
        "request_time_per_output_token_seconds_sum": 0.5,
    }  # fmt: skip
    assert {name: value(found, name) for name in sums} == pytest.approx(sums)
    # What did not happen is not timed.
    metrics = RouterMetrics()
    metrics.observe_request(
        Timeline(first_token=0.5, finished=0.5),
        prompt_tokens=1,
        generated=[1],
        max_tokens=1,
        finish_reasons=[FinishReason.LENGTH],
    )
    assert value(metrics.registry, "request_queue_time_seconds_count") == 0
    assert value(metrics.registry, "request_time_per_output_token_seconds_count") == 0


def test_prompt_tokens_are_counted_by_where_their_kv_came_from() -> None:
    metrics = RouterMetrics()
    for path, decode_cached in (("transferred", 5), ("stand_in", 0), ("local", 0)):
        metrics.observe_request(
            Timeline(path=PromptPath(path), cached_tokens=4, decode_cached_tokens=decode_cached),
            prompt_tokens=20,
            generated=[1],
            max_tokens=1,
            finish_reasons=[],
        )
    found = metrics.registry
    by_source = "prompt_tokens_by_source_total"
    assert value(found, by_source, source="local_compute") == 3 * 16
    assert value(found, by_source, source="local_cache_hit") == 3 * 4
    assert value(found, "prompt_tokens_cached_total") == 3 * 4
    assert value(found, "request_prefill_kv_computed_tokens_sum") == 3 * 16
    # The decode node lacked 15 and got them, lacked 16 and computed them, and wanted none.
    assert value(found, "external_prefix_cache_queries_total") == 15 + 16
    assert value(found, "external_prefix_cache_hits_total") == 15


def test_a_node_s_metrics() -> None:
    metrics, counts = NodeMetrics(), {"bytes": 4096}
    metrics.observe_transfer(num_bytes=4096, seconds=0.02)
    with pytest.raises(TransferError), metrics.transfer_errors():
        raise TransferError("no progress", code="LEASE_EXPIRED")
    metrics.transfer_events.follow(lambda: counts)
    counts |= {"late_event": 2, "failed/PEER_LOST": 1}  # read when they are asked for
    found = metrics.registry
    assert value(found, "kv_transfer_bytes_total") == 4096
    assert value(found, "kv_transfer_seconds_count") == 1
    assert value(found, "kv_transfers_total", outcome="LEASE_EXPIRED") == 1
    assert value(found, "kv_transfer_events_total", event="late_event") == 2
    assert value(found, "kv_transfer_events_total", event="failed/PEER_LOST") == 1
    assert value(found, "kv_transfer_events_total", event="bytes") is None
    assert value(NodeMetrics().registry, "kv_transfer_bytes_total") == 0  # nothing is shared


STUCK = """
import asyncio, sys
from pdserve.common.obs.process import dump_stacks_on_signal

async def wait_for_godot():
    print("waiting", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print("gone on", flush=True)

dump_stacks_on_signal()
asyncio.run(wait_for_godot())
"""


async def signalled(number: int) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STUCK),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"waiting\n"
    process.send_signal(number)
    return process


async def test_sigusr1_shows_what_a_process_waits_for_and_does_not_end_it() -> None:
    process = await signalled(signal.SIGUSR1)
    assert process.stderr is not None
    async with asyncio.timeout(60):
        errors = await process.stderr.readuntil(b"in run_forever")
        output, rest = await process.communicate(b"")  # it shows its tasks, then goes on
    errors += rest
    assert (output, process.returncode) == (b"gone on\n", 0)
    assert b"in run_forever" in errors, "a thread's stack"
    assert b"Task Task-1" in errors and b"in wait_for_godot" in errors, "what the task waits for"


async def test_a_process_that_crashes_shows_where_it_was() -> None:
    process = await signalled(signal.SIGSEGV)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert process.returncode == -signal.SIGSEGV
    assert b"Fatal Python error: Segmentation fault" in errors and b"in run_forever" in errors


async def test_a_port_is_its_first_listener_s() -> None:
    port, registry, taken = (
        free_port(),
        CollectorRegistry(),
        "in use: choose another --metrics-port",
    )
    first, second = bind_metrics("127.0.0.1", port), bind_metrics("127.0.0.1", port)
    server = await start_metrics_server(first, registry, lambda: (True, ""))
    try:
        with pytest.raises(ConfigError, match=taken):
            await start_metrics_server(second, registry, lambda: (True, ""))
        with pytest.raises(ConfigError, match=taken):
            bind_metrics("127.0.0.1", port)
    finally:
        await server.close()
    with bind_metrics("127.0.0.1", 0) as chosen, pytest.raises(ConfigError, match=taken):
        bind_metrics("127.0.0.1", chosen.getsockname()[1])


def test_ports_file(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    assert read_ports(path) is None
    write_ports(path, {"http": 8000, "grpc": 8001})
    assert read_ports(path) == {"http": 8000, "grpc": 8001}
    assert list(tmp_path.iterdir()) == [path]


def test_many_values_at_once_are_what_the_library_counts_one_by_one() -> None:
    rng = random.Random(0)
    values = [*TOKEN_SECONDS, 0.0, 99.0, *(rng.expovariate(20) for _ in range(1000))]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bulk = BulkHistogram("itl", "help", TOKEN_SECONDS)
    ours.register(bulk)
    bulk.observe_all(values[:500])
    bulk.observe_all(values[500:])
    one_by_one = Histogram("itl", "help", registry=theirs, buckets=TOKEN_SECONDS)
    for value in values:
        one_by_one.observe(value)
    expected = [line for line in lines_of(theirs) if "_created" not in line and "_sum" not in line]
    assert [line for line in lines_of(ours) if "_sum" not in line] == expected
    assert ours.get_sample_value("itl_sum") == pytest.approx(sum(values))


def lines_of(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()


# ---- a process that does not stop ----

NEVER_ENDING = """
import sys, threading, time
from pdserve.common.config.shared import LogConfig
from pdserve.common.obs.process import exit_within
from pdserve.common.obs.logging import setup_logging

def step_for_ever():
    begun.set()
    while True:
        time.sleep(1)

setup_logging("decode", LogConfig(log_format=sys.argv[1]))
begun = threading.Event()
threading.Thread(target=step_for_ever, name="rank-0-steps").start()
begun.wait()
exit_within(0.1)
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_that_does_not_stop_says_where_it_hangs_and_exits(log_format: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", NEVER_ENDING, log_format], capture_output=True, text=True, timeout=60
    )
    (line,) = process.stderr.splitlines()
    assert process.returncode == 1
    assert "did not stop within 0 s, exiting" in line
    assert re.search(r"rank-0-steps in <string>:\d+ step_for_ever", line)
