"""The commands that are clients of a server, on terminals and pipes of all kinds."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pdserve.cli.chat import Chat, StreamedAnswer
from pdserve.cli.main import main
from pdserve.cli.top import make_parser
from pdserve.client import server as server_module
from pdserve.client.server import LOOK_TIMEOUT, Server, client_session
from pdserve.client.server import Answer as ServerAnswer
from pdserve.client.terminal import console_of
from pdserve.common.core.errors import Unauthenticated, Unavailable

PDSERVE = "import sys; from pdserve.cli.main import main; sys.exit(main(sys.argv[1:]))"
NODE = {
    "node_id": "prefill-012345", "role": "prefill", "state": "ready", "reason": "ok",
    "in_flight": 64, "running": 64, "waiting": 100, "kv_cache_usage": 1.0,
    "total_blocks": 123456,
}  # fmt: skip


@pytest.mark.parametrize(
    ("streams", "code", "says"),
    [
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "pdserve: error: standard output: No space left on device\n"),
    ],
)
def test_streams_that_are_closed_or_full(streams: str, code: int, says: str) -> None:
    shell = f'PYTHONUNBUFFERED= exec "$0" -c "$1" version {streams}'
    command = ["bash", "-c", shell, sys.executable, PDSERVE]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (code, says)


def test_characters_outside_the_stream_s_encoding_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert main(["version"]) == 0
    print("Zoë", sys.stdin.read(), end="", flush=True)
    assert written.getvalue().endswith(b"Zo\\xeb \\ufffd")


def test_a_console_shows_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    line = "http://[fd00::1]:8000/v1 of model [a/b], [/x]" + " and more" * 20
    console_of(file=file).print(line)
    assert file.getvalue() == line + "\n"


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://h", "http://h:99999", "http://"])
@pytest.mark.parametrize("command", [["top"], ["bench", "serve"], ["trace", "x"]])
def test_an_invalid_url_is_refused(
    command: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--url", url]) == 2
    assert f"{url!r} is not the URL of a server" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["top", "chat", "bench"])
def test_an_invalid_key_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "one\r\ntwo\n")
    assert main([command, "serve"] if command == "bench" else [command]) == 2
    assert "OPENAI_API_KEY contains a character" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "names"),
    [(["top"], "PDSERVE_ADMIN_API_KEY or OPENAI_API_KEY"), (["chat", "-q", "x"], "OPENAI_API_KEY")],
)
def test_a_command_without_the_server_s_key_names_its_variable(
    command: list[str],
    names: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def get(*_: object) -> Any:
        raise Unauthenticated("No API key")

    monkeypatch.setattr(Server, "get", get)
    assert main(command) == 1
    said = f"pdserve {command[0]}: error: No API key; set {names} to a key of the server\n"
    assert capsys.readouterr().err == said


def test_top_shows_whose_log_to_read_on_a_usual_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {**NODE, "node_id": "decode-012345", "state": "lost", "reason": "[/b] gone"}
    said: dict[str, Any] = {
        "nodes": [NODE, lost], "ready": False, "reason": "[/x] no node", "running": 1, "waiting": 2,
    }  # fmt: skip

    async def get(*_: object) -> Any:
        return said

    monkeypatch.setattr(Server, "get", get)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["top", "--once"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("not ready: [/x] no node; 1 running, 2 waiting")
    assert NODE["node_id"] in shown and lost["node_id"] in shown and "100% of 123456" in shown
    assert "(ok)" not in shown
    del said["nodes"][0]["node_id"]  # another version's
    assert main(["top", "--once"]) == 1
    assert "is not a router of this version" in capsys.readouterr().err


def test_an_interrupted_answer_to_a_pipe_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stream(_: Chat, answer: StreamedAnswer) -> None:
        sys.stdout.write("Once")
        raise KeyboardInterrupt

    monkeypatch.setattr(Chat, "_stream", stream)
    assert main(["chat", "--model", "m", "-q", "Tell me"]) == 130
    assert capsys.readouterr().out == "Once\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_thought_is_shown_apart_and_only_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm"},
              {"reasoning_content": "."}, {"content": "Yes"}, {"content": "."}]  # fmt: skip

    async def stream(*_: object) -> AsyncIterator[dict[str, Any]]:
        for delta in deltas:
            yield {"choices": [{"delta": delta}]}

    monkeypatch.setattr(Server, "stream", stream)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert main(["chat", "--model", "m", "-q", "Well?"]) == 0
    assert capsys.readouterr().out == ("Hm.\n\nYes.\n" if terminal else "Yes.\n")


def test_a_page_is_no_answer_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They come of a wrong --url, or of a proxy that wants a log-in."""

    async def ask(*_: object, **__: object) -> ServerAnswer:
        return ServerAnswer(200, "<html>", "")

    monkeypatch.setattr(Server, "ask", ask)
    requests, answers = tmp_path / "requests", tmp_path / "answers"
    requests.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {}}')
    flags = ["-i", str(requests), "-o", str(answers), "--url", "http://h"]
    assert main(["run-batch", *flags]) == 1
    assert "http://h/v1/x answers, but not with JSON" in capsys.readouterr().err
    assert answers.read_text() == ""


def test_run_batch_prints_the_commonest_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = {
        "error": {"message": "no model 'a\x1b[2J'", "code": "model_not_found", "param": "model"}
    }
    bodies: dict[str, Any] = {"/v1/ok": (200, {}), "/v1/x": (404, away), "/v1/y": (400, "<html>")}

    async def ask(_: object, url: str, *__: object, **___: object) -> ServerAnswer:
        return ServerAnswer(*bodies[url], "")

    monkeypatch.setattr(Server, "ask", ask)
    requests, answers = tmp_path / "requests", tmp_path / "answers"
    urls = [*["/v1/x"] * 3, "/v1/ok", "/v1/y"]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": {}}
        for number, url in enumerate(urls)
    ]
    requests.write_text("\n".join([*map(json.dumps, lines), "no JSON"]))
    flags = ["run-batch", "-i", str(requests), "-o", str(answers), "--url", "http://h"]
    assert main(flags) == 1
    said = "the commonest error, 3 times: 404 model_not_found (model): no model 'a\\x1b[2J'"
    assert said in capsys.readouterr().err.splitlines()
    assert main([*flags, "--json"]) == 1  # of the answers of earlier runs, too
    assert json.loads(capsys.readouterr().out)["commonest_error"]["count"] == 3
    requests.write_text(json.dumps(lines[3]))
    assert main([*flags[:3], "-o", str(tmp_path / "good"), *flags[5:]]) == 0
    assert "commonest" not in capsys.readouterr().err


def test_an_answer_that_breaks_off(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")

        thread = Thread(target=answer)
        thread.start()
        assert main(["top", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 1
        thread.join()
    assert "broke off its answer" in capsys.readouterr().err


def test_a_router_that_stands_still_is_told_soon(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert main(["top", "--url", url, "--timeout", "0.2"]) == 1
    assert "took too long to answer" in capsys.readouterr().err
    assert make_parser().parse_args([]).timeout == LOOK_TIMEOUT < 60


# ---- no connection ----------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> int:
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    "command",
    ["top --once", "trace x", "chat -q hi", "bench serve --num-prompts 1", "run-batch"],
)
def test_no_server_is_a_sentence(
    command: str,
    closed_port: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = command.split()
    monkeypatch.setattr(server_module, "FIRST_BACKOFF", 0.01)
    if command == "run-batch":
        body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
        (tmp_path / "in").write_text(json.dumps(body))
        argv += ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert main([*argv, "--url", f"http://127.0.0.1:{closed_port}"]) == 1
    said = capsys.readouterr().err
    assert f"does not answer: nothing listens on port {closed_port} of 127.0.0.1" in said
    assert (
        f"pdserve {argv[0]}: " in said and "ssl:default" not in said and "Connect call" not in said
    )


async def test_why_a_connection_is_lost_is_a_sentence(closed_port: int) -> None:
    def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hangs_up, "127.0.0.1", 0) as rude:
        port = rude.sockets[0].getsockname()[1]
        for url, why in (
            (
                f"http://localhost:{closed_port}",
                f"nothing listens on port {closed_port} of localhost",
            ),
            ("http://no-such-host.invalid", "the host no-such-host.invalid is unknown"),
            (f"http://127.0.0.1:{port}", "the server closed the connection"),
        ):
            async with client_session(timeout=20) as session:
                with pytest.raises(Unavailable) as caught:
                    await Server(session, url).get("/v1/models")
            assert caught.value.message == f"{url} does not answer: {why}"


async def test_tls_where_there_is_none_is_a_sentence() -> None:
    async def says_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(says_http, "127.0.0.1", 0) as plain:
        url = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}"
        async with client_session(timeout=20) as session:
            with pytest.raises(Unavailable) as caught:
                await Server(session, url).get("/v1/models")
    assert caught.value.message == (
        f"{url} does not answer: TLS failed; if the server has no TLS, use http://"
    )
