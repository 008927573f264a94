"""Flags, environment and YAML for any config dataclass: flags > environment > YAML > default.

Names are written once, in the other files of this folder. Nothing is dropped silently: a flag, a
YAML key or a `PDSERVE_*` variable that nobody knows ends the process with the nearest match.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import UnionType
from typing import IO, Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import configargparse
import yaml

from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.node import BothNodeConfig, WorkerNodeConfig
from pdserve.common.config.router import RouterConfig
from pdserve.common.core.errors import ConfigError

Config = TypeVar("Config")

PREFIX = "PDSERVE_"
CONFIG_VARIABLE = PREFIX + "CONFIG"
# PDSERVE_CACHE is the folder of the embedded model, read where that model is unpacked.
# PDSERVE_CONFIG_EXIT_CODE is read by `pdserve` itself (common/cli/main.py).
CONFIG_EXIT_CODE = PREFIX + "CONFIG_EXIT_CODE"
EXTRA_VARIABLES = frozenset({CONFIG_VARIABLE, CONFIG_EXIT_CODE, PREFIX + "CACHE"})
ROLE_CONFIGS = (RouterConfig, BothNodeConfig, WorkerNodeConfig, ClusterConfig)


@dataclass(frozen=True, slots=True)
class Option:
    """One leaf field of a config, as each source names it."""

    name: str
    kind: type
    optional: bool  # the annotation is `kind | None`
    default: Any
    group: str  # first line of the docstring of the dataclass that owns the field
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
        """The value `text` stands for; of a list one word, or all as JSON.

        Raises:
            argparse.ArgumentTypeError: not of this kind, or outside minimum … maximum.
        """
        if self.kind is list:
            return _words(text)
        try:
            value: Any = json.loads(text) if self.kind is dict else self.kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {_KIND_NAMES[self.kind]}") from error
        if not isinstance(value, self.kind):
            raise argparse.ArgumentTypeError(f"{text!r} is not {_KIND_NAMES[self.kind]}")
        if isinstance(value, (int, float)):
            self._check_range(value)
        return value

    def check(self, value: Any) -> None:
        """Raises argparse.ArgumentTypeError unless the option takes such a value."""
        if value is None and self.optional:
            return
        kinds = (int, float) if self.kind is float else self.kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            raise argparse.ArgumentTypeError(f"{value!r} is not {_KIND_NAMES[self.kind]}")
        choices = self.metadata.get("choices")
        if choices and value not in choices:
            raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(choices)}")
        if isinstance(value, (int, float)) and self.kind is not bool:
            self._check_range(value)

    def _check_range(self, value: float) -> None:
        low, high = self.metadata.get("minimum"), self.metadata.get("maximum")
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{value} is not a finite number")
        if low is not None and value < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        if high is not None and value > high:
            raise argparse.ArgumentTypeError(f"{value} is more than {high}")


def _words(text: str) -> list[str]:
    try:
        value = json.loads(text) if text.startswith(("[", '"')) else text
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list") from error
    words = value if isinstance(value, list) else [value]
    if not all(isinstance(word, str) and word for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not text, or a list of texts")
    return words


class _Extend(argparse.Action):
    """All words of a list."""

    def __call__(self, _: object, namespace: Any, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, [word for words in values for word in words])


_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a JSON object",
    bool: "true or false",
}


def options(config: Any) -> Iterator[Option]:
    """All leaf options of a config object, which gives the defaults, in written order."""
    cls = type(config)
    hints = get_type_hints(cls)
    group = (cls.__doc__ or cls.__name__).splitlines()[0].rstrip(".")
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from options(value)
        else:
            kind, optional = _unwrap(hints[item.name])
            yield Option(item.name, kind, optional, value, group, item.metadata)


def parse(
    cls: type[Config],
    *,
    prog: str,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The config that flags, environment and YAML file say.

    `argv` defaults to this process's arguments, `environ` to its environment. What cannot be
    used ends the process: one line on stderr, exit code 2.
    """
    base = cls()
    found = tuple(options(base))
    parser = _parser(found, prog, description)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"}.intersection(arguments):  # whatever else is wrong
        parser.print_help()
        raise SystemExit(0)
    given = os.environ if environ is None else environ
    environment = {name: value for name, value in given.items() if value != ""}
    _check_environment(parser, found, environment)
    namespace, unknown = parser.parse_known_args(arguments, env_vars=environment)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(_unknown("option", unknown[0].partition("=")[0], known))
    try:
        return build(base, vars(namespace))
    except ConfigError as error:
        parser.error(error.message)


def build(base: Config, values: Mapping[str, Any]) -> Config:
    """`base` with the leaves, at any depth, that `values` names."""
    changes: dict[str, Any] = {}
    for item in fields(base):  # type: ignore[arg-type]
        value = getattr(base, item.name)
        if is_dataclass(value):
            changes[item.name] = build(value, values)
        elif item.name in values:
            changes[item.name] = values[item.name]
    return replace(base, **changes)  # type: ignore[type-var]


def with_values(base: Config, values: Mapping[str, Any]) -> Config:
    """`base` with options by name, as `build`, but checked as flags are.

    Raises:
        ConfigError: no option has such a name, or it does not take such a value.
    """
    known = {option.name: option for option in options(base)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(_unknown("option", name, list(known)))
        try:
            known[name].check(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{name}: {error}") from error
    return build(base, values)


def to_flags(config: Any) -> list[str]:
    """Flags from which `parse` makes an equal config, together with `to_environment`;
    defaults are left out."""
    return [_to_flag(option) for option in _changed(config) if not option.metadata.get("secret")]


def to_environment(config: Any) -> dict[str, str]:
    """What `to_flags` leaves out, because everybody on the host can read a command line."""
    changed = _changed(config)
    return {each.env: str(each.default) for each in changed if each.metadata.get("secret")}


def _changed(config: Any) -> list[Option]:
    """The options that differ from their defaults."""
    defaults = {option.name: option.default for option in options(type(config)())}
    return [option for option in options(config) if option.default != defaults[option.name]]


def _to_flag(option: Option) -> str:
    value = option.default
    if option.kind is bool:
        return option.flag if value else f"--no-{option.key}"
    return f"{option.flag}={json.dumps(value) if option.kind in (dict, list) else value}"


class _Parser(configargparse.ArgumentParser):
    """Errors take one line; the usage text of some forty options would bury them."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def _parser(found: Sequence[Option], prog: str, description: str | None) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        add_env_var_help=False,
        add_config_file_help=False,
        config_file_parser_class=_YAMLFile,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=34, width=100),
        usage="%(prog)s [options]",
        epilog="An option is taken from its flag, else its variable, else the YAML file, "
        "else its default.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        is_config_file=True,
        env_var=CONFIG_VARIABLE,
        help=f"YAML file of options by flag name [{CONFIG_VARIABLE}]",
    )
    groups: dict[str, Any] = {}
    for option in found:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)
    return parser


def _add(group: Any, option: Option) -> None:
    flags = [option.metadata["short"]] if "short" in option.metadata else []
    arguments: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "env_var": option.env,
        "help": _help(option),
    }
    if option.kind is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    else:
        arguments["type"] = option.convert
        arguments["choices"] = option.metadata.get("choices")
        arguments["metavar"] = option.metadata.get("metavar") or _metavar(option)
    if option.kind is list:
        arguments |= {"action": _Extend, "nargs": "+"}
    group.add_argument(*flags, option.flag, **arguments)


def _metavar(option: Option) -> str:
    if choices := option.metadata.get("choices"):
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "X", dict: "JSON"}.get(option.kind, "TEXT")


def _help(option: Option) -> str:
    default = "" if option.default in (None, []) else f"default: {_show(option)}; "
    return f"{option.metadata['help']} [{default}{option.env}]".replace("%", "%%")


def _show(option: Option) -> str:
    if option.kind is bool:
        return "on" if option.default else "off"
    return json.dumps(option.default) if option.kind in (dict, list) else str(option.default)


# PyYAML lets through what its constructors raise for a value that is not of its kind, such as
# the 99th of a month; JSON knows no dates; one mapping may name an option twice.
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class _YAMLFile(configargparse.ConfigFileParser):
    """A flat mapping of option names. Scalars stay the text that was written, so that
    `restart: no` is the word and not a boolean; mappings become JSON. ConfigArgParse makes flags
    of the items, and so refuses lists and unknown keys as it does on the command line."""

    def get_syntax_description(self) -> str:
        return "YAML: one `option: value` on each line"

    def parse(self, stream: IO[str]) -> dict[str, Any]:
        try:
            text = stream.read()
            typed = yaml.safe_load(text)
            written = yaml.load(text, Loader=yaml.BaseLoader)
            if typed is None:
                return {}
            if not isinstance(typed, dict):
                raise _bad_file(stream, "not a mapping of options")
            return {
                name: json.dumps(value) if isinstance(value, dict) else written[name]
                for name, value in zip(written, typed.values(), strict=True)
                if value is not None
            }
        except _YAML_ERRORS as error:
            raise _bad_file(stream, " ".join(str(error).split())) from error


def _bad_file(stream: IO[str], reason: str) -> configargparse.ConfigFileParserException:
    return configargparse.ConfigFileParserException(f"{getattr(stream, 'name', '-')}: {reason}")


def _check_environment(
    parser: _Parser, found: Iterable[Option], environ: Mapping[str, str]
) -> None:
    """Ends the process on a `PDSERVE_*` variable that no role reads."""
    known = EXTRA_VARIABLES | {option.env for option in found}
    known |= {option.env for cls in ROLE_CONFIGS for option in options(cls())}
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            parser.error(_unknown("variable", name, sorted(known)))


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"unknown {what} {name}" + (f"; did you mean {nearest[0]}?" if nearest else "")


def _unwrap(hint: Any) -> tuple[type, bool]:
    """(kind, optional) of an annotation `kind`, `kind | None`, `dict[str, Any]` or `list[str]`."""
    optional = isinstance(hint, UnionType)
    if optional:
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    return get_origin(hint) or hint, optional
