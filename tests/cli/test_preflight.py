"""`pdserve up` refuses options that cannot work before it starts anything."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from paths import MODELS
from pdserve.cli import child, host_share, preflight
from pdserve.cli.main import main

MODEL = str(MODELS / "llama-gqa")  # 4 heads, 2 KV heads, 4 layers, 1,024 positions

Refusal = tuple[list[str], str]
REFUSALS: list[Refusal] = [
    (["--model=/no/such/model"], r"--model: the folder /no/such/model does not exist"),
    (["--model={tmp}"], r"--model: .* has no config\.json: it is not a checkpoint folder"),
    (["--model={tmp}/file"], r"--model: .*/file is a file, not a checkpoint folder"),
    (["--port={taken}"], r"cannot listen on 127.0.0.1:\d+ for HTTP: .*: choose another --port"),
    (["--grpc-port={taken}"], r"choose another --grpc-port \(0: a free one\)"),
    (["--registry-port={taken}"], r"choose another --registry-port \(0: a free one\)"),
    (
        ["--host=192.0.2.1", "--insecure", "--port={free}"],
        r"--host must be an address of this",
    ),
    (["--port={free}", "--grpc-port={free}"], r"--port and --grpc-port are both \d+: choose two"),
    (
        ["--tool-call-parser=hermez"],
        r"--tool-call-parser: unknown name 'hermez'; did you mean hermes",
    ),
    (["--reasoning-parser=qwen9"], r"--reasoning-parser.* 'qwen9'"),
    (["--chat-template=/no/such"], r"--chat-template /no/such: No such file or directory"),
    (["--ssl-certfile=/no/such"], r"--ssl-certfile /no/such cannot be read: No such file"),
    (["--kv-cache-memory=10XB"], r"--kv-cache-memory '10XB' is not a size such as 2GiB"),
    (["--quantization=awq"], r"--quantization awq is not what the checkpoint says: it is not"),
    (["--decode-policy=best"], r"--decode-policy: unknown name 'best'; choose one of:"),
    (["--tensor-parallel-size=3"], r"--tensor-parallel-size 3 does not divide .* 4 heads"),
    (["--prefill-tp=3"], r"--prefill-tp 3 does not divide the model's 4 heads"),
    (["--decode-tp=3"], r"--decode-tp 3 does not divide the model's 4 heads"),
    (["--decode-pp=9"], r"--decode-pp 9 exceeds the model's 4 layers"),
    (["--both=1", "--pipeline-parallel-size=9"], r"--pipeline-parallel-size 9 exceeds"),
    (["--max-model-len=2000"], r"--max-model-len 2000 exceeds the model's 1024 positions"),
    (
        ["--enable-lora", "--lora-modules=a=/no/such"],
        r"--lora-modules a: adapter /no/such: adapter_config\.json is missing",
    ),
    (
        ["--enable-lora", "--lora-modules=llama-gqa={tmp}"],
        r"--lora-modules llama-gqa: the model itself has this name",
    ),
]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(self: child.Child) -> None:
        pytest.fail(f"{self.name} was started")

    monkeypatch.setattr(child.Child, "start", start)


@pytest.mark.parametrize(
    ("flags", "said"), REFUSALS, ids=[" ".join(flags) for flags, _ in REFUSALS]
)
@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_cluster_that_cannot_work_is_refused_in_one_sentence(
    command: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("", 0)) as other:
        free = other.getsockname()[1]
        other.close()
        words = {"tmp": str(tmp_path), "taken": str(taken.getsockname()[1]), "free": str(free)}
        given = [re.sub(r"\{(\w+)\}", lambda word: words[word[1]], flag) for flag in flags]
        defaults = {"--model": MODEL, "--port": "0"}
        names = {flag.partition("=")[0] for flag in given}
        given += [f"{flag}={value}" for flag, value in defaults.items() if flag not in names]
        try:
            code = main([command, *given])
        except SystemExit as stop:  # from the parser
            code = int(stop.code or 0)
    *_, last = capsys.readouterr().err.splitlines()
    assert code == 2
    assert re.search(said, last), last
    assert last.startswith(f"pdserve {command}: error: ")


@pytest.mark.parametrize(("gpus", "flags", "said"), [
    (1, ["--decode-tp=2"], r"decode node has 2 ranks \(--decode-tp 2\) and this host shows 1 GPUs"),
    (2, ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"],
     r"a prefill node has 4 ranks \(--tensor-parallel-size 2 --pipeline-parallel-size 2\)"),
])  # fmt: skip
def test_a_node_of_more_ranks_than_gpus_is_refused(
    gpus: int,
    flags: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = ",".join(map(str, range(gpus)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)  # Ray could have more hosts
    assert main(["up", f"--model={MODEL}", "--port=0", *flags]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert host_share.visible_gpus("auto") == shown.split(",")
