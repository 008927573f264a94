"""Checks command lines in documentation pages with the parsers of their programs."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import yaml
from google.protobuf import json_format
from pydantic import ValidationError

from paths import ROOT
from pdserve.cli.completion import SHELLS as SHELL_NAMES
from pdserve.cli.main import BENCHES, COMMANDS
from pdserve.common.config import sources
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.node import BothNodeConfig, WorkerNodeConfig
from pdserve.common.config.options import CommandParser
from pdserve.common.config.router import RouterConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import import_string
from pdserve.common.rpc.pb import inference_pb2
from pdserve.router.api.ignored import Ignored
from pdserve.router.http.app import LORA_ROUTES, ROUTES
from pdserve.router.http.openapi import Route

ROLES: dict[str, Any] = {
    "up": ClusterConfig,
    "serve": ClusterConfig,
    "router": RouterConfig,
    "prefill": WorkerNodeConfig,
    "decode": WorkerNodeConfig,
    "both": BothNodeConfig,
}
_SEPARATORS = {"|", "||", "&", "&&", ";", "(", ")"}


class Wrong(Exception):
    """A command of a page is invalid; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Command:
    words: list[str]  # the program and its arguments
    environment: Mapping[str, str]  # variables set before the command


def commands(text: str) -> Iterator[Command]:
    """Yields the simple commands of a shell script, without redirections.

    Raises:
        Wrong: a quote is not closed.
    """
    pending = ""
    for line in text.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        try:
            words = _words(pending)
        except ValueError:  # the quote continues on the next line
            pending += "\n"
            continue
        yield from _simple(words)
        pending = ""
    if pending:
        raise Wrong(f"not closed: {pending}")


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _simple(words: list[str]) -> Iterator[Command]:
    rest: list[str] = []
    for word in [*words, ";"]:
        if word not in _SEPARATORS:
            rest.append(word)
        elif rest:
            yield _command(rest)
            rest = []


def _command(words: list[str]) -> Command:
    environment = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words[0].partition("=")
        environment[name] = value
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    return Command(words, environment)


# ---- programs -----------------------------------------------------------------------------------


def check(command: Command) -> None:
    """Raises Wrong if the program does not accept the command."""
    if not command.words:  # an assignment
        return
    program, *arguments = command.words
    name = Path(program).name if program.startswith((".venv/bin/", "~/")) else program
    if name not in PROGRAMS:
        raise Wrong(f"no check for {name}: see PROGRAMS in tests/helpers/typed.py")
    if (look := PROGRAMS[name]) is not None:
        look(arguments, command.environment)


class _Parsed(BaseException):
    """The command line was accepted, so the program need not run."""


def _run_parser(run: Callable[[], object]) -> None:
    """Runs a program until it has parsed its command line."""
    build = sources.build

    def parsed(real: Callable[..., Any]) -> Callable[..., NoReturn]:
        def raising(*args: Any, **kwargs: Any) -> NoReturn:
            raise _Parsed(real(*args, **kwargs))

        return raising

    def built(*args: Any) -> NoReturn:
        with patch.object(sources, "build", build):  # recursive
            raise _Parsed(build(*args))

    said = io.StringIO()
    try:
        with (
            patch.object(CommandParser, "parse_args", parsed(CommandParser.parse_args)),
            patch.object(
                argparse.ArgumentParser, "parse_args", parsed(argparse.ArgumentParser.parse_args)
            ),
            patch.object(sources, "build", built),
            contextlib.redirect_stderr(said),
        ):
            run()
        raise Wrong("it did not parse a command line")
    except _Parsed:
        pass
    except ConfigError as error:
        raise Wrong(error.message) from error
    except SystemExit as stop:
        if not stop.code:  # --help
            return
        raise Wrong(said.getvalue().strip().splitlines()[-1]) from stop


def _pdserve(arguments: list[str], environment: Mapping[str, str]) -> None:
    targets = {name: target for group in COMMANDS.values() for name, (target, _) in group.items()}
    name, *rest = arguments or ["--help"]
    if name == "bench" and rest and rest[0] in BENCHES:
        bench, *rest = rest
        name, targets = f"bench {bench}", {f"bench {bench}": BENCHES[bench][0]}
    if name in ("--help", "--version", "COMMAND"):
        return
    if name not in targets:
        raise Wrong(f"there is no command {name}")
    if not rest:  # mentioned in a sentence
        return
    if name in ROLES:
        word = "model" if name == "serve" else None
        _run_parser(
            lambda: sources.parse(ROLES[name], prog=name, argv=rest, environ=environment, word=word)
        )
    elif name == "completion":
        if rest[0] not in (*SHELL_NAMES, "--help"):
            raise Wrong(f"no shell: {rest[0]}")
    else:
        _run_parser(lambda: import_string(targets[name])(rest))


def _python(arguments: list[str], _: Mapping[str, str]) -> None:
    if arguments[0] == "-m":
        if find_spec(arguments[1]) is None:
            raise Wrong(f"no module {arguments[1]}")
        return
    path = _existing(arguments[0])
    if "parse_args(" in path.read_text():
        with (
            patch.object(sys, "argv", arguments),
            patch.object(sys, "path", [str(path.parent), *sys.path]),
        ):
            _run_parser(lambda: runpy.run_path(str(path), run_name="__main__"))
    elif arguments[1:]:
        raise Wrong(f"{path} takes no arguments")


def _existing(name: str) -> Path:
    if not (ROOT / name).exists():
        raise Wrong(f"there is no {name}")
    return ROOT / name


def _make(arguments: list[str], _: Mapping[str, str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        name, sets, _value = word.partition("=")
        pattern = rf"^{name} \?=" if sets else rf"^{re.escape(name)}:(?!=)"
        if not re.search(pattern, makefile, re.M):
            raise Wrong(f"the Makefile has no {name}")


def _ci(_: list[str], __: Mapping[str, str]) -> None:
    _existing(".ci/run")


def _pip(arguments: list[str], _: Mapping[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in arguments:
        if word.startswith("./"):
            _existing(word)
        found = re.fullmatch(r"(?:\.|pdserve)\[([\w,]+)\]", word)
        for name in found[1].split(",") if found else ():
            if name not in project["optional-dependencies"]:
                raise Wrong(f"there is no extra {name}")


def _pytest(arguments: list[str], _: Mapping[str, str]) -> None:
    words = iter(arguments)
    for word in words:
        if word == "--pyargs":
            if find_spec(next(words)) is None:
                raise Wrong(f"no such module: {arguments}")
        elif word in ("-m", "-n", "--kv-connector", "--kv-connector-config"):
            next(words)
        elif word.startswith("-"):
            raise Wrong(f"no check for {word}")
        else:
            _existing(word)


def _docker(arguments: list[str], _: Mapping[str, str]) -> None:
    for flag, name in pairwise(arguments):
        if flag == "-f":
            _existing(name)


def _grpcurl(arguments: list[str], _: Mapping[str, str]) -> None:
    service, _sep, method = arguments[-1].partition("/")
    for found in inference_pb2.DESCRIPTOR.services_by_name.values():
        if found.full_name == service and method in found.methods_by_name:
            kind = getattr(inference_pb2, found.methods_by_name[method].input_type.name)
            break
    else:
        raise Wrong(f"there is no {arguments[-1]}")
    try:
        json_format.Parse(arguments[arguments.index("-d") + 1], kind())
    except json_format.ParseError as error:
        raise Wrong(str(error)) from error


def _curl(arguments: list[str], _: Mapping[str, str]) -> None:
    address = next(word for word in arguments if word.startswith(("http://", "https://")))
    path = "/" + address.partition("://")[2].partition("/")[2].partition("?")[0]
    body = next((b for a, b in pairwise(arguments) if a == "-d"), None)
    method = "GET" if body is None else "POST"
    if "-X" in arguments:
        method = arguments[arguments.index("-X") + 1]
    route = route_of(method, path)
    if body is not None:
        check_body(route, body)


def route_of(method: str, path: str) -> Route:
    for route in (*ROUTES, *LORA_ROUTES):
        if re.fullmatch(re.sub(r"\{\w+\}", ".+", route.path), path) and route.method == method:
            return route
    raise Wrong(f"there is no {method} {path}")


def check_body(route: Route, text: str) -> None:
    """Raises Wrong if the route does not accept such a body."""
    if route.body is None:
        raise Wrong(f"{route.path} takes no body")
    ignored = Ignored()
    try:
        body: Any = route.body.model_validate_json(text)
    except ValidationError as error:
        raise Wrong(str(error)) from error
    ignored.fields(body.model_extra)
    if ignored.names:
        raise Wrong(f"no such fields: {ignored.names}")


def _helm(arguments: list[str], _: Mapping[str, str]) -> None:
    for word, following in pairwise([*arguments, ""]):
        if word.startswith("compose/"):
            _existing(word)
        if word == "--set":
            name = following.partition("=")[0]
            known = yaml.safe_load((ROOT / "compose/helm/pdserve/values.yaml").read_text())
            for part in name.split("."):
                if part not in known:
                    raise Wrong(f"the chart has no value {name}")
                known = known[part]


def _first_gpu_run(arguments: list[str], environment: Mapping[str, str]) -> None:
    if arguments != ["--pack"]:  # which the shell script itself takes
        from benchmarks.first_gpu_run import main

        _run_parser(lambda: main(arguments))


PROGRAMS: dict[str, Callable[[list[str], Mapping[str, str]], None] | None] = {
    "pdserve": _pdserve,
    "python": _python,
    "python3": _python,
    "make": _make,
    "pip": _pip,
    "pytest": _pytest,
    "docker": _docker,
    "curl": _curl,
    "grpcurl": _grpcurl,
    ".ci/run": _ci,
    "scripts/first-gpu-run": _first_gpu_run,
    "helm": _helm,
    # Foreign programs have no parser here.
    **dict.fromkeys(
        (
            *(".", "aider", "cd", "claude", "codex", "export", "git", "head", "kill", "kubectl"),
            *("mkdir", "openssl", "pgrep", "sed"),
        )
    ),
}
