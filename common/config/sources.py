"""Flags, environment and YAML for any config dataclass: flags > environment > YAML > default.

The other files of this folder declare the options. Nothing is dropped silently: an unknown flag,
YAML key or `PDSERVE_*` variable ends the process with an error that names the nearest match.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import IO, Any, NoReturn

import configargparse
import yaml

from pdserve.common.config import help_topics, vllm
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.node import BothNodeConfig, WorkerNodeConfig
from pdserve.common.config.options import (
    PREFIX,
    Config,
    Option,
    build,
    end_with,
    options,
    unknown,
    unknown_option,
)
from pdserve.common.config.router import RouterConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import CACHE_VARIABLE, CONFIG_EXIT_CODE
from pdserve.common.core.plugins import import_string

CONFIG_VARIABLE = PREFIX + "CONFIG"
EXTRA_VARIABLES = frozenset({CONFIG_VARIABLE, CONFIG_EXIT_CODE, CACHE_VARIABLE})
ROLE_CONFIGS = (RouterConfig, BothNodeConfig, WorkerNodeConfig, ClusterConfig)


class _Extend(argparse.Action):
    """Joins the words of a list option."""

    def __call__(self, _: object, namespace: Any, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, [word for words in values for word in words])


def parse(
    cls: type[Config],
    *,
    prog: str,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    word: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Config:
    """Builds the config from flags, environment and YAML file.

    `argv` defaults to this process's arguments, `environ` to its environment. `word` names the
    option that a positional argument sets, if any. An error prints one line on stderr and exits
    with 2. `say` gets the lines for the log, about names of vLLM that have no effect or another
    name here; by default stderr does.
    """
    base = cls()
    found = tuple(options(base))
    parser = _parser(found, prog, description, word)
    try:
        arguments = _arguments(sys.argv[1:] if argv is None else argv, found)
    except ConfigError as error:
        parser.error(error.message)
    _help_if_asked(parser, found, arguments)
    given = os.environ if environ is None else environ
    environment = {name: value for name, value in given.items() if value != ""}
    _check_environment(parser, found, environment)
    namespace, rest = parser.parse_known_args(arguments, env_vars=environment)
    notes = dict.fromkeys(_take_vllm_flags(parser, rest))
    if cls in ROLE_CONFIGS:
        notes |= dict.fromkeys(_take_vllm_variables(parser, namespace, found, environment))
    _take_words(parser, found, namespace, rest, arguments, word)
    try:
        config = build(base, vars(namespace))
    except ConfigError as error:
        parser.error(error.message)
    for note in notes:
        (say or partial(_warn, prog))(note)
    return config


def _arguments(argv: Sequence[str], found: Sequence[Option]) -> list[str]:
    """Returns the arguments in this parser's forms, from those of vLLM: `--max_model_len`,
    `--enforce-eager=true`, `--hf-overrides.rope_theta 1e6`, `--cuda-graph-sizes 1 2 4`."""
    whole = vllm.objects(argv, [option.key for option in found if option.kind is dict])
    hyphened = [_hyphened(word) for word in whole]
    joined = vllm.numbers(hyphened, [option.key for option in found if _is_numbers(option)])
    return vllm.switches(joined, [option.key for option in found if option.kind is bool])


def _is_numbers(option: Option) -> bool:
    return bool(option.metadata.get("metavar", "") == "N,N,...")


def _help_if_asked(parser: _Parser, found: Sequence[Option], arguments: Sequence[str]) -> None:
    """Prints the help and ends the process, even if other arguments are wrong."""
    asked = [each for each in arguments if each in ("-h", "--help") or each.startswith("--help=")]
    if not asked:
        return
    topic = asked[0].partition("=")[2]
    try:
        print(help_topics.about(parser, found, topic) if topic else parser.format_help(), end="")
    except ConfigError as error:
        parser.error(error.message)
    raise SystemExit(0)


def _warn(prog: str, note: str) -> None:
    print(f"{prog}: {note}", file=sys.stderr)


def _take_vllm_flags(parser: _Parser, rest: list[str]) -> list[str]:
    """Removes vLLM's flags from the words that are no options; returns lines for the log. Ends the
    process at a flag that cannot be left out."""
    rest[:], given = vllm.take(rest)
    for each in given:
        if not each.fine:
            parser.error(each.refusal)
    return [each.note for each in given]


def _take_vllm_variables(
    parser: _Parser, namespace: Any, found: Sequence[Option], environ: Mapping[str, str]
) -> Iterable[str]:
    """Sets options that are not given to the values of vLLM's variables; yields lines for the
    log, which never show a value."""
    known, unknown_ones = {option.name: option for option in found}, []
    for variable, text in vllm.variables(environ):
        option = known.get(variable.taken)
        if option is not None and hasattr(namespace, option.name):
            yield f"{variable.name} is not used, because {option.flag} is given"
        elif option is not None:
            try:
                setattr(namespace, option.name, option.convert(variable.read(text)))
            except argparse.ArgumentTypeError as error:
                parser.error(f"{variable.name}: {error}")
            yield f"{variable.name} is taken as {option.flag}"
        elif variable.why:
            yield f"{variable.name} is not read: {variable.why}"
        elif not variable.taken:
            unknown_ones.append(variable.name)
    if unknown_ones:
        yield f"variables of vLLM without effect here: {', '.join(unknown_ones)}"


def _take_words(
    parser: _Parser,
    found: Sequence[Option],
    namespace: Any,
    rest: Sequence[str],
    arguments: Sequence[str],
    word: str | None,
) -> None:
    """Sets the option `word` to the positional argument. Ends the process at any other word."""
    if len(rest) > (word is not None and "--model" not in arguments):  # one may be the model
        _check_keys(parser, found, rest, arguments)
    if word is not None and rest and not any(each.startswith("-") for each in rest):
        setattr(namespace, word, _word(parser, word, rest, arguments))
    elif rest:
        flags = [each for each in rest if each.startswith("-")]
        first = flags[0] if flags and word is not None else rest[0]
        name = first.partition("=")[0]
        has_model = any(option.name == "model" for option in found)
        hint = f"; did you mean --model {name}?" if has_model and not name.startswith("-") else ""
        parser.error(unknown_option(parser, name) + hint)


def _check_keys(
    parser: _Parser, found: Sequence[Option], rest: Sequence[str], arguments: Sequence[str]
) -> None:
    """Ends the process at `--api-key KEY KEY`, as vLLM takes it, without showing a key."""
    flags = {option.flag for option in found if option.metadata.get("secret")}
    for flag, word in zip(arguments, arguments[2:], strict=False):
        if flag in flags and word in rest:
            parser.error(f"{flag} takes one word: give several keys with commas between")


def _word(parser: _Parser, name: str, words: Sequence[str], arguments: Sequence[str]) -> str:
    """Returns the value of the positional argument; its flag may repeat the same value."""
    flag = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flag.add_argument(f"--{name}", action="append", default=[])
    given = flag.parse_known_args(arguments)[0]
    values = dict.fromkeys([*words, *getattr(given, name)])
    if len(values) > 1:
        parser.error(f"there can be one {name}, not {' and '.join(values)}")
    return words[0]


def _hyphened(word: str) -> str:
    """Accepts underscores in flags, as vLLM does: --max_model_len."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


class _Parser(configargparse.ArgumentParser):
    several: frozenset[str] = frozenset()  # options of text that is a list with commas

    def convert_item_to_command_line_arg(self, action: Any, key: str, value: Any) -> Any:
        """Joins a file's list with commas where the option takes that."""
        if isinstance(value, list) and action is not None and not action.nargs:
            if action.dest not in self.several:
                self.error(f"{key} takes one value, not a list")
            value = ",".join(map(str, value))
        return super().convert_item_to_command_line_arg(action, key, value)

    def error(self, message: str) -> NoReturn:
        # argparse's words for a switch that is neither true nor false
        end_with(
            self.prog,
            message.replace("ignored explicit argument", "a switch takes true or false, not"),
        )


def _parser(
    found: Sequence[Option], prog: str, description: str | None, word: str | None
) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        add_env_var_help=False,
        add_config_file_help=False,
        config_file_parser_class=_YAMLFile,
        config_file_open_func=partial(_open, prog),
        formatter_class=partial(argparse.HelpFormatter, max_help_position=34, width=100),
        usage=f"%(prog)s {f'[{word.upper()}] ' if word else ''}[options]",
        epilog="Precedence: flag, then environment variable, then YAML file, then default.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        is_config_file=True,
        env_var=CONFIG_VARIABLE,
        help=f"YAML file of options by flag name [{CONFIG_VARIABLE}]",
    )
    parser.several = frozenset(option.name for option in found if _is_list_of_words(option))
    groups: dict[str, Any] = {}
    for option in found:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)
    return parser


def _open(prog: str, path: str, mode: str = "r") -> IO[str]:
    try:
        return open(path, mode, encoding="utf-8")
    except OSError as error:
        end_with(prog, f"--config {path}: {error.strerror}")


def _is_list_of_words(option: Option) -> bool:
    several = "," in option.metadata.get("metavar", "") or option.metadata.get("secret", False)
    return option.kind is str and several


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
    if known := option.metadata.get("known"):
        return "{" + ",".join((*known, "NAME")) + "}"
    return {int: "N", float: "X", dict: "JSON"}.get(option.kind, "TEXT")


def _help(option: Option) -> str:
    default = "" if option.default in (None, [], {}) else f"default: {_show(option)}; "
    return f"{option.metadata['help']} [{default}{option.env}]".replace("%", "%%")


def _show(option: Option) -> str:
    if option.kind is bool:
        return "on" if option.default else "off"
    return json.dumps(option.default) if option.kind in (dict, list) else str(option.default)


# PyYAML passes on exceptions of its constructors (a date with day 99), json.dumps fails on dates,
# and zip on a mapping with a duplicate key.
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class _YAMLFile(configargparse.ConfigFileParser):
    """Reads a flat mapping of option names. Scalars keep their text, so that `restart: no` is a
    word and not a boolean; mappings become JSON. ConfigArgParse turns the items into flags, and
    so rejects unknown keys as it does on the command line."""

    def get_syntax_description(self) -> str:
        return "YAML: one `option: value` per line"

    def parse(self, stream: IO[str]) -> dict[str, Any]:
        try:
            text = stream.read()
            typed = yaml.safe_load(text)
            written = yaml.load(text, Loader=yaml.BaseLoader)
            if typed is None:
                return {}
            if not isinstance(typed, dict):
                raise _bad_file(stream, "not a mapping of options")
            found: dict[str, Any] = {}
            for name, value in zip(written, typed.values(), strict=True):
                key = name.replace("_", "-")  # as in vLLM's files
                if key in found:
                    raise _bad_file(stream, f"{key} comes twice")
                if value is not None:
                    found[key] = json.dumps(value) if isinstance(value, dict) else written[name]
            return found
        except _YAML_ERRORS as error:
            raise _bad_file(stream, " ".join(str(error).split())) from error


def _bad_file(stream: IO[str], reason: str) -> configargparse.ConfigFileParserException:
    return configargparse.ConfigFileParserException(f"{getattr(stream, 'name', '-')}: {reason}")


def _check_environment(
    parser: _Parser, found: Iterable[Option], environ: Mapping[str, str]
) -> None:
    """Ends the process if a `PDSERVE_*` variable is unknown to all roles."""
    known = EXTRA_VARIABLES | {option.env for option in found}
    others = [name for name in environ if name.startswith(PREFIX) and name not in known]
    if others:  # of another role
        known |= {option.env for cls in ROLE_CONFIGS for option in options(cls())}
    for name in others:
        if name not in known:
            parser.error(unknown("variable", name, sorted(known)))


def resolve_model(config: ModelConfig, weights: bool = True) -> ModelConfig:
    """Returns the config with `model` replaced by a folder, after unpacking or downloading it;
    without `weights` a model on the Hub is downloaded without them. The package that does this is
    named here and not imported, because a role also runs without it.

    Raises:
        ConfigError: there is no such model, or it cannot be made ready.
    """
    resolve = import_string("pdserve.demo_model.embedded:resolve_model")
    resolved: ModelConfig = resolve(config, weights)
    return resolved
