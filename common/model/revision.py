"""A cheap identity of a checkpoint, so that two nodes can tell whether they hold the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from pdserve.common.core.errors import ConfigError
from pdserve.common.model.loader import weight_files

_PAGE = 4096  # bytes read of each tensor
_HEADER_LENGTH_BYTES = 8  # a safetensors file begins with its header's length, little-endian
_MAX_HEADER = 100_000_000  # the format's own limit


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    data_offsets: tuple[int, int]


def weights_revision(folder: Path, load_format: str = "auto", seed: int = 0) -> str:
    """16 hex digits over `config.json` and, of each weights file, its header (names, shapes,
    dtypes) and a page of every tensor: fine-tunes of one base differ nowhere else, and a merged
    adapter in some tensors only. Dummy weights are their seed.

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
        parts = [header := file.read(length)]
        for start, end in _tensor_ranges(path, header):
            file.seek(_HEADER_LENGTH_BYTES + length + start)
            parts.append(file.read(min(_PAGE, end - start)))
    return parts


def _tensor_ranges(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Where tensors lie in the file's data, in order."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = [msgspec.json.decode(entry, type=_Tensor) for entry in entries.values()]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    return sorted(tensor.data_offsets for tensor in tensors)
