"""Options of LoRA adapters, for the router and all nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdserve.common.config.shared import option
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.request import is_plain_id


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """LoRA"""

    enable_lora: bool = option(False, "serve LoRA adapters of the model")
    lora_modules: list[str] = option(
        [],
        "adapters to serve from the start, as name=folder or "
        '{"name": …, "path": …}; every host needs the folders at the same path',
        metavar="NAME=FOLDER",
    )
    max_loras: int = option(
        8,
        "adapters a node can hold at once, all in device memory; one step may use any of them",
        minimum=1,
        maximum=1024,
    )
    max_lora_rank: int = option(16, "highest rank of an adapter", minimum=1, maximum=1024)

    def __post_init__(self) -> None:
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("--lora-modules needs --enable-lora")
        if len(self.modules) > self.max_loras:
            raise ConfigError(
                f"--lora-modules names {len(self.modules)} adapters, more than --max-loras "
                f"{self.max_loras}"
            )

    @property
    def modules(self) -> dict[str, str]:
        """Adapter name → folder, from `lora_modules`.

        Raises:
            ConfigError: an entry has neither form, or a name occurs twice.
        """
        pairs = [_parse(word) for word in self.lora_modules]
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ConfigError(f"--lora-modules has a name twice: {', '.join(sorted(names))}")
        return dict(pairs)

    def check_names(self, models: Iterable[str]) -> None:
        """Raises ConfigError if an adapter has one of the model's names."""
        for name in models:
            if name in self.modules:
                raise ConfigError(f"--lora-modules {name}: the model itself has this name")


def _parse(word: str) -> tuple[str, str]:
    if word.startswith("{"):
        name, path = _parse_object(word)
    else:
        name, _, path = word.partition("=")
    if not is_plain_id(name) or not path:
        raise ConfigError(
            f"--lora-modules {word}: must be name=folder; a name has up to 128 ASCII characters "
            "and no spaces"
        )
    return name, path


def _parse_object(word: str) -> tuple[str, str]:
    try:
        given: Any = json.loads(word)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--lora-modules {word} is not JSON: {error}") from error
    given.pop("base_model_name", None)  # vLLM's key; here it is always the model
    if set(given) != {"name", "path"} or not all(isinstance(each, str) for each in given.values()):
        raise ConfigError(f"--lora-modules {word}: must have a name and a path, and no other key")
    return given["name"], given["path"]
