"""`pdserve COMMAND …`: finds the program of a command and runs it.

Programs are import strings, so that a command imports only what it needs: a router's host has no
torch.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import pdserve
from pdserve.common.core.errors import ConfigError, PdserveError, PermissionDenied, Unauthenticated
from pdserve.common.core.host import CONFIG_EXIT_CODE, host_errors_as_config_errors
from pdserve.common.core.plugins import import_string, nearest
from pdserve.common.core.waits import saying
from pdserve.common.obs.json_lines import JSONStream, wants_json

COMMANDS = {
    "Whole clusters": {
        "up": ("pdserve.cli.up:main", "run a router and nodes on this host, with one log"),
        "serve": ("pdserve.cli.up:serve_main", "up with the model first: pdserve serve MODEL"),
        "scale": (
            "pdserve.cli.scale:main",
            "change how many nodes an `up --on ray` has: pdserve scale decode=4",
        ),
        "demo": ("pdserve.cli.demo:main", "start a cluster, ask a question, show the timeline"),
    },
    "Clients": {
        "chat": ("pdserve.cli.chat:main", "chat with a server, in a terminal or through pipes"),
        "top": ("pdserve.cli.top:main", "show the nodes of a cluster and their load, live"),
        "trace": ("pdserve.cli.trace:main", "show the stages and times of a request"),
        "run-batch": (
            "pdserve.offline.batch:main",
            "answer a file of requests in OpenAI's batch format",
        ),
    },
    "Roles": {
        "router": (
            "pdserve.router.__main__:main",
            "HTTP and gRPC server that places requests on nodes",
        ),
        "prefill": ("pdserve.prefill_node.__main__:main", "node that computes prompts"),
        "decode": ("pdserve.decode_node.__main__:main", "node that generates tokens"),
        "both": ("pdserve.decode_node.both:main", "node that does both, without KV transfers"),
    },
    "Tools": {
        "doctor": ("pdserve.cli.doctor:main", "check this host, and name the fixes"),
        "plan": ("pdserve.cli.plan:main", "compute the GPU memory that a model needs"),
        "calibrate": (
            "pdserve.simulate.calibrate:main",
            "measure the durations of steps and transfers on this host",
        ),
        "simulate": (
            "pdserve.simulate.main:main",
            "replay a trace on a layout of nodes, with the durations of calibrate",
        ),
        "cluster-check": (
            "pdserve.cli.cluster_check:main",
            "check and measure the collectives between ranks",
        ),
        "certs": (
            "pdserve.cli.certs:main",
            "make a trial CA and a certificate for the roles",
        ),
        "bench": (
            "pdserve.cli.main:bench",
            "serve: load-test a server; compare: two results; step: time engine steps",
        ),
        "model": (
            "pdserve.cli.model:main",
            "unpack the embedded model, download a NAME, or check a FOLDER",
        ),
        "models": ("pdserve.cli.models:main", "list the architectures that are served, and how"),
        "completion": ("pdserve.cli.completion:main", "print a shell's completion script"),
        "version": ("pdserve.cli.main:show_version", "print the version"),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 when the command line or configuration is
    wrong. PDSERVE_CONFIG_EXIT_CODE replaces the 2, for supervisors that restart on any failure:
    a restart does not fix a configuration."""
    _repair_streams()
    given, stderr = list(sys.argv[1:] if argv is None else argv), sys.stderr
    if wants_json(given):  # also of errors before the log is set up
        sys.stderr = JSONStream(given[0] if given else "pdserve", stderr.write, stderr.fileno)
    try:
        code = _run(given)
        return 1 if not _written() else _exit_code(code)
    except BrokenPipeError:  # as with `| head`
        _drop_output()
        return 1
    except SystemExit as stop:  # from argparse
        if stop.code == 2:
            raise SystemExit(_exit_code(2)) from stop
        raise
    finally:
        if argv is not None:  # a call within another program
            sys.stderr = stderr


def _repair_streams() -> None:
    """Opens /dev/null for standard streams that are closed, and has the others replace characters
    they cannot encode instead of raising."""
    for name, mode, errors in (
        ("stdin", "r", "replace"),
        ("stdout", "w", "backslashreplace"),
        ("stderr", "w", "backslashreplace"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _written() -> bool:
    """Flushes standard output; prints the error and returns False if that fails."""
    try:
        sys.stdout.flush()
        return True
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        print(f"pdserve: error: standard output: {error.strerror}", file=sys.stderr)
        return False


def _drop_output() -> None:
    """Points standard output at /dev/null, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(code: int) -> int:
    return int(os.environ.get(CONFIG_EXIT_CODE) or code) if code == 2 else code


def _run(argv: Sequence[str]) -> int:
    command, *rest = argv or [""]
    if command in ("-h", "--help"):
        print(help_text())
        return 0
    if command == "--version":
        return show_version()
    targets = {name: target for group in COMMANDS.values() for name, (target, _) in group.items()}
    if command not in targets:
        print(_unknown(command, list(targets)), file=sys.stderr)
        return 2
    try:
        with host_errors_as_config_errors():
            with saying("importing libraries"):
                program = import_string(targets[command])
            return int(program(rest))
    except PdserveError as error:
        print(f"pdserve {command}: error: {error.message}{_key(command, error)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _key(command: str, error: PdserveError) -> str:
    """Names the variable of the key that a server wants of a client."""
    if command not in COMMANDS["Clients"]:
        return ""
    if not isinstance(error, (Unauthenticated, PermissionDenied)):
        return ""
    names = ["PDSERVE_ADMIN_API_KEY"] * (command in ("top", "trace")) + ["OPENAI_API_KEY"]
    return f"; set {' or '.join(names)} to a key of the server"


def help_text() -> str:
    lines = [
        "usage: pdserve COMMAND [options]",
        "",
        "Disaggregated prefill/decode serving of LLMs.",
    ]
    for title, commands in COMMANDS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<15}{summary}" for name, (_, summary) in commands.items()]
    return "\n".join([*lines, "", "pdserve COMMAND --help lists the options of a command."])


def show_version(argv: Sequence[str] = ()) -> int:
    print(f"pdserve {pdserve.__version__}")
    return 0


BENCHES = {
    "serve": ("pdserve.bench.serving.main:main", "load-test a server and report its latencies"),
    "compare": (
        "pdserve.bench.serving.compare:main",
        "compare two results of bench serve",
    ),
    "step": ("pdserve.bench.main:main", "time engine steps against this machine's limits"),
}


def bench(argv: Sequence[str]) -> int:
    """Runs one of `BENCHES`."""
    name, *rest = argv or [""]
    if name in BENCHES:
        return int(import_string(BENCHES[name][0])(rest))
    lines = ["usage: pdserve bench COMMAND [options]", ""]
    lines += [f"  {name:<15}{summary}" for name, (_, summary) in BENCHES.items()]
    if name in ("-h", "--help"):
        print("\n".join(lines))
        return 0
    hint = nearest(name, list(BENCHES)) or "see pdserve bench --help"
    raise ConfigError(f"takes one of {', '.join(BENCHES)}; {hint}")


def _unknown(command: str, known: list[str]) -> str:
    if not command:
        return help_text()
    hint = nearest(command, known) or "see pdserve --help"
    return f"pdserve: error: unknown command {command}; {hint}"
