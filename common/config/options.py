"""Maps the leaf fields of a config dataclass to flags, environment variables and YAML keys."""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from decimal import Decimal
from functools import cache
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from pdserve.common.config import vllm
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import nearest

logger = logging.getLogger(__name__)

Config = TypeVar("Config")

PREFIX = "PDSERVE_"
MOST_BITS = 63  # of a whole number, without its sign
_ROUND = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf field of a config, with its name in each source."""

    name: str
    kind: type
    optional: bool  # the annotation is `kind | None`
    default: Any
    group: str  # first line of the docstring of the dataclass that owns the field
    owner: str  # the name of that dataclass
    metadata: Mapping[str, Any]

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return "--" + self.key

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    def convert(self, text: str) -> Any:
        """Parses a flag's text; for a list option, one word or a JSON list.

        Raises:
            argparse.ArgumentTypeError: the wrong type, or outside minimum … maximum.
        """
        if self.kind is list:
            return _words(text)
        named = self._named(text)
        if not isinstance(named, str):
            return named
        try:
            value: Any = _READERS[self.kind](named)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {_KIND_NAMES[self.kind]}") from error
        if not isinstance(value, self.kind):
            raise argparse.ArgumentTypeError(f"{text!r} is not {_KIND_NAMES[self.kind]}")
        self._check_choice(value)
        if isinstance(value, (int, float)):
            self._check_range(value)
        return value

    def check(self, value: Any) -> Any:
        """Returns `value`, with aliases replaced, if the option accepts it.

        Raises:
            argparse.ArgumentTypeError: the wrong type, or not one of the choices or in the range.
        """
        if value is None and self.optional:
            return value
        value = self._named(value)
        if not self._is_of_kind(value):
            raise argparse.ArgumentTypeError(f"{value!r} is not {_KIND_NAMES[self.kind]}")
        self._check_choice(value)
        if isinstance(value, (int, float)) and self.kind is not bool:
            self._check_range(value)
        return value

    def _is_of_kind(self, value: Any) -> bool:
        if isinstance(value, bool):  # bool is a subclass of int
            return self.kind is bool
        if self.kind is list:
            return isinstance(value, list) and _are_words(value)
        return isinstance(value, (int, float) if self.kind is float else self.kind)

    def _named(self, value: Any) -> Any:
        """Replaces an alias, which is a word, by its value."""
        return self.metadata.get("aliases", {}).get(value, value) if type(value) is str else value

    def _check_choice(self, value: Any) -> None:
        choices = self.metadata.get("choices")
        if choices and value not in choices:
            near = nearest(str(value), choices)
            none = f"{value!r} is none of {', '.join(choices)}"
            raise argparse.ArgumentTypeError(none + (near and f"; {near}"))

    def _check_range(self, value: float) -> None:
        low, high = self.metadata.get("minimum"), self.metadata.get("maximum")
        if isinstance(value, int) and value.bit_length() > MOST_BITS:
            raise argparse.ArgumentTypeError(f"a number of {value.bit_length()} bits is too large")
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{value} is not a finite number")
        if low is not None and value < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{value} is more than {high}")


def _whole_number(text: str) -> int:
    """Parses an integer in vLLM's notation: 8k is 8000, 8K is 8192. Raises ValueError."""
    if not (found := _ROUND.fullmatch(text)):
        return int(text)
    value = Decimal(found[1]) * _SCALES[found[2]]
    if value != int(value):
        raise ValueError("not whole")
    return int(value)


def _words(text: str) -> list[str]:
    try:
        value = json.loads(text) if text.startswith(("[", '"')) else text
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list") from error
    words = value if isinstance(value, list) else [value]
    if not _are_words(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not text, or a list of texts")
    return words


def _are_words(words: list[Any]) -> bool:
    return all(isinstance(word, str) and word for word in words)


_READERS: dict[type, Callable[[str], Any]] = {
    int: _whole_number,
    float: float,
    str: str,
    dict: json.loads,
}
_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a JSON object",
    list: "a list of texts",
    bool: "true or false",
}


def options(config: Any) -> Iterator[Option]:
    """Yields the leaf options of `config` in written order; its values are the defaults."""
    cls = config.__class__
    kinds = _kinds(cls)
    group = (cls.__doc__ or cls.__name__).splitlines()[0].rstrip(".")
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from options(value)
        else:
            yield Option(item.name, *kinds[item.name], value, group, cls.__name__, item.metadata)


@cache
def _kinds(cls: type) -> dict[str, tuple[type, bool]]:
    """Returns field → (kind, optional), but for fields that are dataclasses themselves."""
    hints = get_type_hints(cls).items()
    return {name: _unwrap(hint) for name, hint in hints if not is_dataclass(hint)}


def build(base: Config, values: Mapping[str, Any]) -> Config:
    """Returns `base` with the leaf fields that `values` names replaced, at any depth."""
    changes: dict[str, Any] = {}
    for item in fields(base):  # type: ignore[arg-type]
        value = getattr(base, item.name)
        if is_dataclass(value):
            changes[item.name] = build(value, values)
        elif item.name in values:
            changes[item.name] = values[item.name]
    return replace(base, **changes)  # type: ignore[type-var]


def with_values(base: Config, values: Mapping[str, Any]) -> Config:
    """Like `build`, but checks names and values as for flags.

    Raises:
        ConfigError: an option does not exist, or does not accept its value.
    """
    known = {option.name: option for option in options(base)}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            _check_vllm(name, value, list(known))
            continue
        try:
            checked[name] = known[name].check(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{name}: {error}") from error
    return build(base, checked)


def _check_vllm(name: str, value: Any, known: Sequence[str]) -> None:
    """Logs that an argument of vLLM's has no effect. Raises ConfigError if it would have one, or if
    there is no such argument."""
    given = vllm.from_program(name, value)
    if given is None:
        raise ConfigError(unknown("option", name, known))
    if not given.fine:
        raise ConfigError(given.refusal)
    logger.warning("%s", given.note)


def to_flags(config: Any) -> list[str]:
    """Returns the flags that, together with `to_environment`, give an equal config to `parse`.
    Defaults and secrets are left out."""
    return [_to_flag(option) for option in changed(config) if not option.metadata.get("secret")]


def to_environment(config: Any) -> dict[str, str]:
    """Returns the secrets as variables: any user of the host can read a command line."""
    secret = [each for each in changed(config) if each.metadata.get("secret")]
    return {each.env: str(each.default) for each in secret}


def changed(config: Any) -> list[Option]:
    """Returns the options that differ from their defaults."""
    defaults = {option.name: option.default for option in options(type(config)())}
    return [option for option in options(config) if option.default != defaults[option.name]]


def _to_flag(option: Option) -> str:
    value = option.default
    if option.kind is bool:
        return option.flag if value else f"--no-{option.key}"
    return f"{option.flag}={json.dumps(value) if option.kind in (dict, list) else value}"


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line and suggest the nearest flag to an unknown one."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = sys.argv[1:] if args is None else args
        words = ["--help" if word.startswith("--help=") else word for word in given]  # it is short
        found, rest = self.parse_known_args(words, namespace)
        if rest:
            name = next((word for word in rest if word.startswith("-")), rest[0])
            self.error(unknown_option(self, name.partition("=")[0]))
        return found

    def error(self, message: str) -> NoReturn:
        end_with(self.prog, message)


def end_with(prog: str, message: str) -> NoReturn:
    """Prints a one-line error, without the long usage text, and exits with 2."""
    print(f"{prog}: error: {message} (see {prog} --help)", file=sys.stderr)
    raise SystemExit(2)


def unknown_option(parser: argparse.ArgumentParser, name: str) -> str:
    """Returns the error message for a flag or word that `parser` does not know."""
    if not name.startswith("-"):
        return f"no option takes the word {name}"
    known = [flag for action in parser._actions for flag in action.option_strings]
    return unknown("option", name, known)


_REMOVED = {"compile": "leave it out; GPUs always have fused kernels"}


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    bare = name.lower().removeprefix("--").removeprefix("no-").removeprefix(PREFIX.lower())
    if advice := _REMOVED.get(bare):
        return f"{what} {name} was removed: {advice}"
    near = nearest(name, known)
    return f"unknown {what} {name}" + (near and f"; {near}")


def _unwrap(hint: Any) -> tuple[type, bool]:
    """Returns (kind, optional) of an annotation `kind`, `kind | None`, `dict[…]` or `list[…]`."""
    optional = isinstance(hint, UnionType)
    if optional:
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    return get_origin(hint) or hint, optional
