"""A cheap identity of a checkpoint, so that two nodes can tell whether they hold the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

from common.core.errors import ConfigError
from common.model.loader import weight_files

_SAMPLES = 16  # pages read of each weights file
_PAGE = 4096  # bytes
_HEADER_LENGTH_BYTES = 8  # a safetensors file begins with its header's length, little-endian
_MAX_HEADER = 100_000_000  # the format's own limit


def weights_revision(folder: Path, load_format: str = "auto", seed: int = 0) -> str:
    """16 hex digits over `config.json` and, of each weights file, its size, its header (names,
    shapes, dtypes) and a few evenly spread pages: fine-tunes of one base differ nowhere else.
    Dummy weights are their seed.

    Raises:
        ConfigError: a file is missing or not safetensors.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
        return digest.hexdigest()
    for path in weight_files(folder):
        digest.update(path.name.encode())
        for part in _telling_parts(path):
            digest.update(part)
    return digest.hexdigest()


def _telling_parts(path: Path) -> list[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if length > min(size, _MAX_HEADER):
            raise ConfigError(f"{path} is not a safetensors file")
        parts = [str(size).encode(), file.read(length)]
        data = _HEADER_LENGTH_BYTES + length
        for sample in range(_SAMPLES):
            file.seek(data + (size - data) * sample // _SAMPLES)
            parts.append(file.read(_PAGE))
    return parts
