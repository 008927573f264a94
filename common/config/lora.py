"""Options of LoRA adapters, which the router and all nodes share."""

from __future__ import annotations

import json
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
        '{"name": …, "path": …}; the folders are at the same place on every host',
        metavar="NAME=FOLDER",
    )
    max_loras: int = option(
        8,
        "adapters a node holds at a time, all in the memory of its devices; any of them may be in "
        "one step",
        minimum=1,
        maximum=1024,
    )
    max_lora_rank: int = option(16, "greatest rank of an adapter", minimum=1, maximum=1024)

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
        """Folders by the names of `lora_modules`.

        Raises:
            ConfigError: one is neither form, or is there twice.
        """
        pairs = [_parse(word) for word in self.lora_modules]
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ConfigError(f"--lora-modules has a name twice: {', '.join(sorted(names))}")
        return dict(pairs)


def _parse(word: str) -> tuple[str, str]:
    if word.startswith("{"):
        name, path = _parse_object(word)
    else:
        name, _, path = word.partition("=")
    if not is_plain_id(name) or not path:
        raise ConfigError(
            f"--lora-modules {word}: must be name=folder, with a name of up to 128 characters of "
            "ASCII without spaces"
        )
    return name, path


def _parse_object(word: str) -> tuple[str, str]:
    try:
        given: Any = json.loads(word)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--lora-modules {word} is not JSON: {error}") from error
    given.pop("base_model_name", None)  # of vLLM: it is the model, here
    if set(given) != {"name", "path"} or not all(isinstance(each, str) for each in given.values()):
        raise ConfigError(f"--lora-modules {word}: must have a name and a path, and no other key")
    return given["name"], given["path"]
