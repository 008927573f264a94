"""Resolves names to code: a built-in name, an entry point, or "module:attribute"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from pdserve.common.core.errors import ConfigError


def import_string(path: str) -> Any:
    """Imports the object at "module:attribute".

    Raises:
        ConfigError: `path` has another form, or cannot be imported.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{path!r} is not of the form 'module:attribute'")
    try:
        return getattr(import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(f"cannot import {path!r}: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"{module_name!r} has no attribute {attribute!r}") from error


def resolve(name: str, builtin: Mapping[str, str], group: str, flag: str) -> Any:
    """Returns the object that the value `name` of `flag` stands for: a built-in, an entry point of
    `group`, or an import string. Raises ConfigError if there is none."""
    try:
        return _resolve(name, builtin, group)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}") from error


def _resolve(name: str, builtin: Mapping[str, str], group: str) -> Any:
    if ":" in name:
        return import_string(name)
    if name in builtin:
        return import_string(builtin[name])
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name in found:
        return found[name].load()
    known = sorted({*builtin, *found})
    advice = nearest(name, known) or f"choose one of: {', '.join(known)}, or 'module:Class'"
    raise ConfigError(f"unknown name {name!r}; {advice}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean X?`, or nothing if no known name is near."""
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    return f"did you mean {lower[near[0]]}?" if near else ""
