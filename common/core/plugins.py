"""Resolves names to code: a built-in name, an entry point, or "module:attribute"."""

from __future__ import annotations

from collections.abc import Mapping
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


def resolve(name: str, builtin: Mapping[str, str], group: str) -> Any:
    """Returns the object that `name` stands for: a built-in, an entry point of `group`, or an
    import string. Raises ConfigError if there is none."""
    if ":" in name:
        return import_string(name)
    if name in builtin:
        return import_string(builtin[name])
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name in found:
        return found[name].load()
    choices = ", ".join(sorted({*builtin, *found}))
    raise ConfigError(f"unknown name {name!r}; choose one of: {choices}, or 'module:Class'")
