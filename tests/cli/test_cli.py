"""The command and the demo."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress

import pytest

from paths import HELPERS, MODELS
from pdserve.cli import cluster
from pdserve.cli.completion import _bash, commands
from pdserve.cli.demo import main as demo
from pdserve.cli.main import COMMANDS, main
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.sources import parse

FAKE_ROLE = str(HELPERS / "fake_role.py")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for group, listed in COMMANDS.items():
        assert f"{group}:" in text
        for name in listed:
            assert f"  {name} " in text


def test_the_command_starts_without_the_options_of_all_roles() -> None:
    """So that --help is quick, and an early Ctrl-C seldom meets an import."""
    code = "import pdserve.cli.main, sys; print('pdserve.common.config' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_help_about_an_option_of_a_short_command_is_all_its_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--help=--url"])
    assert ended.value.code == 0
    assert "--url URL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["prefil"], "did you mean prefill?"),
        (["sevre"], "unknown command sevre; did you mean serve?"),
        (["bench", "serv"], "did you mean serve?"),
        ([], "usage: pdserve"),
        (["zzz"], "pdserve --help"),
    ],
)
def test_an_unknown_command(argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert hint in capsys.readouterr().err


def test_a_config_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS["Roles"], "router", ("nowhere:main", ""))
    assert main(["router"]) == 2
    assert capsys.readouterr().err.startswith("pdserve router: error: cannot import 'nowhere:main'")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        ("serve /a --model /b", "there can be one model, not /a and /b"),
        ("serve /a --model=/a --model /b", "there can be one model, not /a and /b"),
        ("serve /a --port 0 /b", "there can be one model, not /a and /b"),
        ("serve /a --prot 1", "unknown option --prot; did you mean --port?"),
        ("serve /a --max_modal_len 1", "unknown option --max-modal-len"),
        ("up /a", "no option takes the word /a; did you mean --model /a?"),
        ("chat --sytem a", "unknown option --sytem; did you mean --system?"),
        ("top --jsn", "unknown option --jsn; did you mean --json?"),
        ("trace a --timout=1", "unknown option --timout; did you mean --timeout?"),
        ("bench serve --num-promts 1", "unknown option --num-promts; did you mean --num-prompts?"),
        ("bench compare a b --jsn", "unknown option --jsn; did you mean --json?"),
        ("bench step --prot 1", "unknown option --prot"),
        ("run-batch --prot 1", "unknown option --prot; did you mean --port?"),
        ("plan --modl x", "unknown option --modl; did you mean --model?"),
        ("doctor --jsn", "unknown option --jsn; did you mean --json?"),
        ("cluster-check --tpp 2", "unknown option --tpp; did you mean --tp?"),
        ("certs x --hots a", "unknown option --hots; did you mean --host?"),
        ("model a b", "no option takes the word b"),
    ],
)
def test_an_unknown_word_is_one_line_with_the_nearest_one(
    argv: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv.split())
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and hint in said, said


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        ("/a", "/a"),
        ("/a --port 1", "/a"),
        ("--port 1 /a", "/a"),
        ("/a --model /a", "/a"),
        ("--model=/b", "/b"),
        ("", "/variable"),
        ("org/name --served-model-name x", "org/name"),
    ],
)
def test_serve_takes_the_model_as_a_word(argv: str, model: str) -> None:
    """A word is as strong as a flag: it goes before the variable."""
    config = parse(
        ClusterConfig, prog="pdserve serve", argv=argv.split(), word="model",
        environ={"PDSERVE_MODEL": "/variable"},
    )  # fmt: skip
    assert config.engine.model.model == model


@pytest.mark.parametrize(
    "line", ["pdserve ch", "pdserve bench serve --request-r", "pdserve top --o"]
)
def test_bash_completes(line: str, completion: str) -> None:
    expected = {"ch": "chat", "--request-r": "--request-rate", "--o": "--once"}
    assert completed(completion, line) == [expected[line.split()[-1]]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pdserve up --dtype f", "float32 float16"),
        ("pdserve up --dtype = bf", "bfloat16"),  # as bash splits --dtype=bf
        ("pdserve up --dtype=bf", "--dtype=bfloat16"),  # as zsh leaves it
        ("pdserve up --dtype =", "auto float32 bfloat16 float16"),
        ("pdserve serve --tool-call-parser her", "hermes"),
        ("pdserve router --prefill-policy least", "least-load"),
        ("pdserve decode --kv-connector cu", "cuda_ipc"),
        ("pdserve bench serve --backend openai-", "openai-chat"),
        ("pdserve up --model ./no", ""),  # the shell completes files
        ("pdserve up --enforce-eager --max-num-s", "--max-num-seqs"),
    ],
)
def test_bash_completes_values(line: str, expected: str, completion: str) -> None:
    assert completed(completion, line) == expected.split()


def completed(script: str, line: str) -> list[str]:
    words = line.split()
    script += f"""
    COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _pdserve; echo "${{COMPREPLY[@]}}" """
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return said.stdout.split()


@pytest.fixture(scope="module")
def completion() -> str:
    return _bash(commands())


def test_completion_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert all(name in text for group in COMMANDS.values() for name in group)
        assert "kv-connector" in text
        assert "bfloat16" in text and "deepseek_v3" in text
    assert main(["completion", "--help"]) == 0
    assert "bash-completion" in capsys.readouterr().out
    assert main(["completion", "cmd"]) == 2


def test_help_names_no_default_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ["bench serve", *(name for group in COMMANDS.values() for name in group)]:
        with suppress(SystemExit):
            main([*name.split(), "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert "usage: pdserve" in said or name == "version"
        assert re.findall(r"default: (None|False|\{\}|\[\])", said) == [], name
        assert re.findall(r"default: [^()]*\) \(default:", said) == [], name


def test_a_reader_who_leaves_is_no_failure_to_tell() -> None:
    """So it is in `pdserve … | head -1`."""
    program = "import sys; from pdserve.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for argv in ("--help", "version", "bench --help"):
        command = f'{sys.executable} -c "{program}" {argv} | true'
        said = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert said.stderr == ""


def test_the_command_imports_no_torch() -> None:
    imports = "import sys, pdserve.cli.main, pdserve.cli.up"
    code = f"{imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def fake_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in cluster.PROGRAMS:
        monkeypatch.setitem(cluster.PROGRAMS, role, (sys.executable, FAKE_ROLE, role))


def test_demo_streams_the_answer_and_shows_the_timeline(
    fake_roles: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo([f"--model={MODELS / 'llama-gqa'}", "--prompt=Why [is] it blue?"]) == 0
    text = capsys.readouterr().out
    assert "> Why [is] it blue?" in text
    assert "Blue light." in text
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert "1.0 ms" in rows["queue"]
    assert "50.0 ms" in rows["prefill"]
    assert "9 tokens, 4 of them cached" in rows["prefill"]
    assert "1.00 MiB at 1.05 GB/s" in rows["KV transfer"]
    assert "100.0 ms" in rows["decode"]
    assert "52.0 ms" in rows["TTFT"]
    assert "50.0 ms" in rows["TPOT"]


@pytest.mark.parametrize(
    ("role", "mode", "reason"),
    [("ROUTER", "failing", "HTTP 500"), ("DECODE", "crash", "ended with exit code 3")],
)
def test_a_failed_demo_says_why(
    role: str,
    mode: str,
    reason: str,
    fake_roles: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"FAKE_{role}", mode)
    assert demo([f"--model={MODELS / 'llama-gqa'}"]) == 1
    assert reason in capsys.readouterr().out
