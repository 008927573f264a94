"""Models by name: a checkpoint folder from the Hugging Face Hub, by way of its cache."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from pdserve.common.config.node import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import printable

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
WEIGHTS = ["*.safetensors"]
SMALL = ["*.json", "*.jinja", "*.model", "tokenizer*"]
# Subfolders have other forms of the model, `consolidated` files the same weights once more.
IGNORED = ["*/*", "consolidated*", "optimizer*"]


def is_name(model: str) -> bool:
    """Whether `org/name` is meant, and no folder."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def download_model(config: ModelConfig) -> ModelConfig:
    """The config with the folder of its model, which is downloaded unless the cache has it. The
    name is what clients ask for by default. A terminal sees how far it is.

    Raises:
        ConfigError: the Hub cannot be reached, or does not have or give it.
    """
    assert config.model is not None
    name = config.model
    folder = _download(name, config)
    return replace(
        config,
        model=folder,
        revision=None,
        download_dir=None,
        served_model_name=config.served_model_name or [name],
    )


class _Bar(tqdm):
    """Of a terminal alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": None})


def _download(name: str, config: ModelConfig) -> str:
    # Takes a while to import, and folders need none of it.
    from huggingface_hub import constants, errors, snapshot_download

    where = f"{constants.ENDPOINT}/{name}"
    revision = config.revision or constants.DEFAULT_REVISION
    try:
        return str(
            snapshot_download(
                name,
                revision=config.revision,
                cache_dir=config.download_dir,
                allow_patterns=[*SMALL, *([] if config.load_format == "dummy" else WEIGHTS)],
                ignore_patterns=IGNORED,
                tqdm_class=_Bar,
            )
        )
    except errors.GatedRepoError as error:
        raise ConfigError(f"{name} is gated: accept its terms at {where}, set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"there is no folder {name}, and {constants.ENDPOINT} shows no such model (a private "
            "one needs HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{where} has no revision {revision}") from error
    except errors.LocalEntryNotFoundError as error:
        cache = config.download_dir or constants.HF_HUB_CACHE
        lacking = f"{cache} does not hold all of {name} ({revision})"
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"{lacking}, and HF_HUB_OFFLINE forbids to fetch it") from error
        raise ConfigError(
            f"{lacking}, and {constants.ENDPOINT} does not answer: give a folder, or HF_ENDPOINT"
        ) from error
    except Exception as error:  # of its HTTP client, its locks, the disk: they have no common class
        reason = printable(str(error) or type(error).__name__, 300)
        raise ConfigError(f"cannot download {name} from {constants.ENDPOINT}: {reason}") from error
