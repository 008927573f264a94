"""Downloads models by name from the Hugging Face Hub into its cache."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import printable
from pdserve.common.core.waits import saying

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
WEIGHTS = ["*.safetensors"]
SMALL = ["*.json", "*.jinja", "*.model", "tokenizer*"]
# Subfolders hold other formats of the model; `consolidated` files are a second copy of the weights.
IGNORED = ["*/*", "consolidated*", "optimizer*"]


def is_name(model: str) -> bool:
    """Returns whether `model` is `org/name` and not an existing path."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def download_model(config: ModelConfig, weights: bool) -> ModelConfig:
    """Returns the config with `model` as a folder. Downloads the model, with `weights` or without,
    unless the cache has it, with a progress bar in a terminal. By default clients use the model's
    name.

    Raises:
        ConfigError: the Hub cannot be reached, or lacks the model or refuses access to it.
    """
    assert config.model is not None
    name = config.model
    with saying(f"downloading {name}"):
        folder = _download(name, config, weights and config.load_format != "dummy")
    return replace(
        config,
        model=folder,
        revision=None,
        download_dir=None,
        served_model_name=config.served_model_name or [name],
    )


class _Bar(tqdm):
    """A progress bar that is hidden unless standard error is a terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": None})


def _download(name: str, config: ModelConfig, weights: bool) -> str:
    # Slow to import, and not needed for a folder.
    from huggingface_hub import constants, errors, snapshot_download

    where = f"{constants.ENDPOINT}/{name}"
    revision = config.revision or constants.DEFAULT_REVISION
    try:
        return str(
            snapshot_download(
                name,
                revision=config.revision,
                cache_dir=config.download_dir,
                allow_patterns=[*SMALL, *(WEIGHTS if weights else [])],
                ignore_patterns=IGNORED,
                tqdm_class=_Bar,
            )
        )
    except errors.GatedRepoError as error:
        raise ConfigError(f"{name} is gated: accept its terms at {where}, set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name} is neither a folder nor a model on {constants.ENDPOINT} (a private model "
            "needs HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{where} has no revision {revision}") from error
    except errors.LocalEntryNotFoundError as error:
        cache = config.download_dir or constants.HF_HUB_CACHE
        lacking = f"{cache} lacks files of {name} ({revision})"
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"{lacking}, and HF_HUB_OFFLINE forbids the download") from error
        raise ConfigError(
            f"{lacking}, and {constants.ENDPOINT} does not answer: give a folder, or HF_ENDPOINT"
        ) from error
    except Exception as error:  # HTTP, lock and disk errors have no common class
        reason = printable(str(error) or type(error).__name__, 300)
        raise ConfigError(f"cannot download {name} from {constants.ENDPOINT}: {reason}") from error
