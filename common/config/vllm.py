"""Reads what is written for vLLM: its flags, its forms of values and its variables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pdserve.common.config.vllm_flags import RULES, WITHOUT_EFFECT, Rule
from pdserve.common.core.errors import ConfigError

WORDS = ("true", "false")
_NO, _YES = ("false", "no", "off", "0"), ("true", "yes", "on", "1")  # as in files and variables
PREFIX = "VLLM_"
# Kubernetes sets these in every pod beside a Service that is called vllm.
_OF_A_SERVICE = re.compile(r"VLLM_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of another server: how many words it takes, and what becomes of it here."""

    name: str
    takes: str  # "": it is a switch; "=": a word; "=+": words
    rule: Rule


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as it was written, with its value as text."""

    written: str
    value: str
    flag: Flag

    @property
    def fine(self) -> bool:
        return self.flag.rule.fine(self.value)

    @property
    def about(self) -> str:
        """The table's sentence, whatever the value."""
        return self.note if self.flag.rule in WITHOUT_EFFECT else self.refusal

    @property
    def note(self) -> str:
        """The line for the log, if the flag is `fine`."""
        if self.flag.rule not in WITHOUT_EFFECT:
            return f"{self._name} {self.value} changes nothing here"
        return f"{self._name} has no effect here: {_plain(self.flag.rule.why)}"

    @property
    def refusal(self) -> str:
        rule = self.flag.rule
        if not rule.here:
            return f"{self._name} is not available here: {_plain(rule.why)}"
        return f"{self._name} is called --{rule.here} here" + (rule.why and f": {rule.why}")

    @property
    def _name(self) -> str:
        return f"{self.flag.rule.project}'s {self.written}"


def _plain(why: str) -> str:
    return why.replace("`", "")


def names(rule: Rule) -> Iterator[Flag]:
    """Yields the flags of a row, with each of their names."""
    for word in rule.names.split():
        name, equals, more = word.partition("=")
        yield from (Flag(each, equals + more, rule) for each in name.split("|"))


@cache
def flags() -> Mapping[str, Flag]:
    return {flag.name: flag for rule in RULES for flag in names(rule)}


def find(name: str) -> tuple[Flag, bool] | None:
    """Returns the flag with this name, without its hyphens or with, and whether `no-` negates it.
    A key of its JSON may follow a dot, as in `compilation-config.level`."""
    stem = name if name.startswith("-") and not name.startswith("--") else name.removeprefix("--")
    stem = stem.partition(".")[0]
    known = flags()
    if stem in known:
        return known[stem], False
    positive = stem.removeprefix("no-")
    if positive in known and not known[positive].takes:
        return known[positive], True
    return (known["-O"], False) if re.fullmatch(r"-O\d", stem) else None


def take(words: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Splits the words of a command line that are no options into unknown ones and vLLM's flags."""
    unknown, given, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        found = find(name) if word.startswith("-") else None
        if found is None:
            unknown.append(word)
            continue
        flag, negated = found
        if not equals:
            value = "" if re.fullmatch(r"-O\d", name) else _value(flag, rest)
        if key := name.partition(".")[2]:
            value = json.dumps({key: value})
        given.append(Given(name, _negated(value) if negated else value, flag))
    return unknown, given


def _value(flag: Flag, rest: list[str]) -> str:
    """Removes the flag's words from the front of `rest` and returns them as text."""
    if not flag.takes:
        return rest.pop(0).lower() if rest and rest[0].lower() in WORDS else "true"
    taken: list[str] = []
    while rest and not re.match(r"-\D", rest[0]) and (not taken or flag.takes == "=+"):
        taken.append(rest.pop(0))
    return " ".join(taken)


def _negated(value: str) -> str:
    return "true" if value == "false" else "false"


def from_program(name: str, value: Any) -> Given | None:
    """Returns vLLM's flag for a keyword argument, or None."""
    found = find(name.replace("_", "-"))
    if found is None:
        return None
    if not isinstance(value, str):
        value = "" if value is None else json.dumps(value, default=str)
    return Given(name, _negated(value) if found[1] else value, found[0])


def switches(words: Iterable[str], known: Iterable[str]) -> list[str]:
    """Replaces `--x true` and `--x=false` by `--x` and `--no-x`, for the names in `known`."""
    found, rest, of_switches = [], list(words), frozenset(known)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        key = name.removeprefix("--")
        if name == key or key not in of_switches:
            found.append(name + equals + value)
            continue
        if not equals and rest and rest[0].lower() in WORDS:
            value = rest.pop(0)
        elif equals and value.lower() not in _NO + _YES:
            found.append(name + equals + value)
            continue
        found.append(f"--no-{key}" if value.lower() in _NO else name)
    return found


def objects(words: Iterable[str], known: Iterable[str]) -> list[str]:
    """Replaces `--x.a.b 1` and its likes by one `--x={"a": {"b": 1}}`, for the names in `known`.

    Raises:
        ConfigError: a key has no value, or two, or `--x` is given, too.
    """
    found, rest, made, names = [], list(words), dict[str, Any](), frozenset(known)
    while rest:
        flag, equals, value = (word := rest.pop(0)).partition("=")
        name, dot, path = flag.partition(".")
        key = name.removeprefix("--").replace("_", "-")
        if not dot or name == key or key not in names:
            found.append(word)
            continue
        if not equals and not rest:
            raise ConfigError(f"{flag} lacks a value")
        _put(made.setdefault(key, {}), flag, path, value if equals else rest.pop(0))
    given = {word.partition("=")[0].replace("_", "-") for word in found}
    if both := [key for key in made if f"--{key}" in given]:
        raise ConfigError(f"--{both[0]} is given whole and by keys: choose one form")
    return [*found, *(f"--{key}={json.dumps(value)}" for key, value in made.items())]


def _put(place: dict[str, Any], flag: str, path: str, text: str) -> None:
    """Sets the value at `path`, keys with dots between, to what `text` says as JSON, or to it."""
    *outer, last = path.split(".")
    for key in outer:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise ConfigError(f"{flag}: {key} has a value already")
    if not last or last in place:
        raise ConfigError(f"{flag}: {'the key is empty' if not last else 'it is given twice'}")
    place[last] = _read(text)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def numbers(words: Iterable[str], known: Iterable[str]) -> list[str]:
    """Joins numbers with commas, `--x 1 2 4`, for the names in `known`."""
    found: list[str] = []
    flags, joins = {f"--{name}" for name in known}, False
    for word in words:
        if joins and word.isdecimal():
            found[-1] += ("=" if found[-1] in flags else ",") + word
            continue
        name, equals, value = word.partition("=")
        joins = name in flags and (not equals or value.isdecimal())
        found.append(word)
    return found


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of vLLM. With `taken`, its value becomes that option's unless the option is given;
    `read` turns vLLM's form into the option's."""

    name: str
    why: str = ""
    taken: str = ""
    read: Callable[[str], str] = str


def _level(word: str) -> str:
    known = {"critical": "error", "fatal": "error", "warn": "warning", "notset": "debug"}
    return known.get(word.lower(), word.lower())


VARIABLES = (
    Variable("VLLM_API_KEY", taken="api_key"),
    Variable("VLLM_LOGGING_LEVEL", taken="log_level", read=_level),
    Variable("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", taken="timeout_keep_alive"),
    Variable("VLLM_PP_LAYER_PARTITION", taken="pipeline_partition"),
    Variable(
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "clients may load adapters only from the folder of --runtime-lora-dir",
    ),
    Variable("VLLM_HOST_IP", "a node announces --advertise-host, and for KV --kv-host"),
    Variable("VLLM_PORT", "--port is the HTTP port, and other ports are free ones"),
    Variable("VLLM_CPU_KVCACHE_SPACE", "--kv-cache-memory is the size, with a unit (4GiB)"),
    Variable("VLLM_CPU_OMP_THREADS_BIND", "--cpu-threads is the number of threads"),
    Variable("VLLM_CONFIGURE_LOGGING", "--log-level and --log-format configure the log"),
    Variable("VLLM_LOGGING_CONFIG_PATH", "--log-level and --log-format configure the log"),
    Variable("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "--hf-overrides changes the model's context"),
    Variable("VLLM_USE_MODELSCOPE", "models by name come from the Hugging Face Hub"),
    Variable("VLLM_ENGINE_ITERATION_TIMEOUT_S", "--engine-stall-timeout is the limit"),
    Variable("VLLM_ALL2ALL_BACKEND", "--all2all-backend names it"),
    Variable("VLLM_CACHE_ROOT", "PDSERVE_CACHE is the folder"),
    Variable("VLLM_PLUGINS", "entry points named by an option are the only plugins"),
    Variable("VLLM_SERVER_DEV_MODE", "there are no paths for developers"),
)


def variables(environ: Mapping[str, str]) -> Iterator[tuple[Variable, str]]:
    """Yields vLLM's variables that are set, with their values; unknown ones without `why`."""
    known = {each.name: each for each in VARIABLES}
    for name, value in environ.items():
        if name.startswith(PREFIX) and not _of_a_service(name, value):
            yield known.get(name, Variable(name)), value


def _of_a_service(name: str, value: str) -> bool:
    return bool(_OF_A_SERVICE.fullmatch(name)) and (name != "VLLM_PORT" or "://" in value)
