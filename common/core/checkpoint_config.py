"""Reads the JSON files of a checkpoint folder, and merges overrides into `config.json`. Standard
library only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.rope_spec import rope_settings

MAX_JSON = 2**28  # bytes of a file; the largest are vocabularies
MAX_SHOWN = 20  # folder names that an error suggests


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with `overrides` merged into it; nested objects merge key by key. Rotary
    settings in `overrides` may be in either place (`rope_parameters`, `rope_scaling`), independent
    of where the config has its own.

    Raises:
        ConfigError: `rope_scaling` or `rope_parameters` is not an object.
    """
    given = dict(overrides)
    if any(given.get(place, {}) is None for place in ("rope_scaling", "rope_parameters")):
        raise ConfigError('rotary scaling is turned off by {"rope_type": "default"}, not by null')
    rope = rope_settings(given)
    rope.pop("type", None)  # "rope_type" says the same
    if rope["rope_theta"] is None:
        del rope["rope_theta"]
    for place in ("rope_scaling", "rope_parameters", "rope_theta"):
        given.pop(place, None)
    if rope:
        given["rope_parameters"] = rope
    return _merged(config, given)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        result[key] = value
    return result


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object. Raises ConfigError if the file is another or above MAX_JSON bytes."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise ConfigError(f"{path} has more than {MAX_JSON} bytes")
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content


def check_folder(folder: Path) -> None:
    """Raises ConfigError unless the folder has the files of a checkpoint."""
    if folder.is_file():
        if folder.suffix.lower() == ".gguf":
            raise ConfigError(f"{folder} is a GGUF file, which only --model of a role takes")
        raise ConfigError(f"{folder} is a file, not a checkpoint folder")
    if not folder.is_dir():
        raise ConfigError(f"the folder {folder} does not exist{_neighbours(folder)}")
    if not (folder / "config.json").is_file():
        if "gguf" in str(folder).lower() or any(folder.glob("*.[gG][gG][uU][fF]")):
            raise ConfigError(f"{folder} has GGUF files and no config.json: name one of the files")
        raise ConfigError(f"{folder} has no config.json: it is not a checkpoint folder")


def _neighbours(folder: Path) -> str:
    """Returns suggestions for a mistyped path: similar names beside its first missing part, else
    the checkpoints there."""
    missing = folder
    while not missing.parent.is_dir():
        missing = missing.parent
    beside = {each.name.lower(): each.name for each in _folders(missing.parent)}
    near = get_close_matches(missing.name.lower(), beside, MAX_SHOWN)
    names = [beside[name] for name in near] or [
        name for name in sorted(beside.values()) if (missing.parent / name / "config.json").exists()
    ]
    absent = "" if missing == folder else f": there is no {missing}"
    paths = ", ".join(str(missing.parent / name) for name in names[:MAX_SHOWN])
    return absent + (f"; did you mean {paths}?" if near else paths and f"; there is {paths}")


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(each for each in parent.glob("[!.]*") if each.is_dir())
    except OSError:  # no permission to list it
        return []
