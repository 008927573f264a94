"""Opens a checkpoint folder's safetensors files (no executable formats) or GGUF file, mapped.

The revision is a cheap fingerprint by which two nodes compare their weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.common.core.checkpoint_config import read_json
from pdserve.common.core.config_values import MAX_SHOWN
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import printable, some_of
from pdserve.common.core.towers import text_name
from pdserve.common.model.gguf_weights import is_gguf_folder, open_gguf, revision_parts

INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_NAME = 255  # bytes
_PAGE = 4096  # bytes per tensor that the revision reads
_HEADER_LENGTH_BYTES = 8  # a safetensors file begins with its header's length, little-endian
_MAX_HEADER = 100_000_000  # the format's own limit


class StoredTensor(Protocol):
    """A tensor of a checkpoint; parts that are not read take no memory."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str:
        """Returns the name that safetensors gives it: "F32", "BF16", "F8_E4M3" …"""

    def __getitem__(self, index: Any) -> Tensor:
        """Reads a part: a tuple of slices, of which missing ones are whole."""


Checkpoint = Mapping[str, StoredTensor]
"""Tensors by name. Views wrap one to read its tensors in another way."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the folder's safetensors files, sorted: those in its index, or all.

    Raises:
        ConfigError: there are none, or one in the index is missing.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        files = [folder / name for name in sorted(_named_files(index))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = ", ".join(missing) or "*.safetensors"
        raise ConfigError(f"{folder} lacks {what}; only safetensors weights are read")
    return files


def _named_files(index: Path) -> set[str]:
    """Raises ConfigError if an index does not name files beside it."""
    named = read_json(index).get("weight_map")
    names = list(named.values()) if isinstance(named, dict) else []
    for name in names:
        if not isinstance(name, str) or not _is_a_file_name(name):
            shown = printable(repr(name), MAX_SHOWN)
            raise ConfigError(f"{index} names {shown}, which is not a file beside it")
    return set(names)


def _is_a_file_name(name: str) -> bool:
    alone = Path(name).name == name and name not in ("", "..")
    return alone and name.isprintable() and len(name.encode()) <= MAX_FILE_NAME


def open_checkpoint(folder: Path, stack: ExitStack) -> Checkpoint:
    """Returns tensor name → lazy slice; the files stay open until `stack` closes."""
    if is_gguf_folder(folder):
        return open_gguf(folder)
    checkpoint: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from error
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        if twice := sorted(checkpoint.keys() & tensors.keys()):
            raise ConfigError(f"{path} has tensors that another file has too: {some_of(twice)}")
        checkpoint |= tensors
    return checkpoint


def text_model(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a view of a multimodal checkpoint: the text model's tensors, by the names that they
    have in a text-only checkpoint."""
    found = ((text_name(name), tensor) for name, tensor in checkpoint.items())
    return {name: tensor for name, tensor in found if name is not None}


# ---- the revision ----


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    data_offsets: tuple[int, int]


_headers = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensors = msgspec.json.Decoder(_Tensor)


def weights_revision(
    folder: Path,
    load_format: str = "auto",
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> str:
    """Returns 16 hex digits over `config.json` and its `overrides`, each weight file's header
    (names, shapes, dtypes) and a page of every tensor: fine-tunes of one base differ only in the
    data, and merged adapters only in some tensors. Dummy weights are identified by their seed.

    Raises:
        ConfigError: a file is missing or not safetensors.
    """
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    if overrides:
        digest.update(json.dumps(overrides, sort_keys=True).encode())
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
        return digest.hexdigest()
    if is_gguf_folder(folder):
        for part in revision_parts(folder, _PAGE):
            digest.update(part)
        return digest.hexdigest()
    for path in weight_files(folder):
        digest.update(path.name.encode())
        for part in _revision_parts(path):
            digest.update(part)
    return digest.hexdigest()


def _revision_parts(path: Path) -> list[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        if length > min(size, _MAX_HEADER):
            raise ConfigError(f"{path} is not a safetensors file")
        parts = [header := file.read(length)]
        for start, end in _tensor_ranges(path, header):
            if not 0 <= start <= end <= size:
                raise ConfigError(f"{path} is not a safetensors file: a tensor ends at byte {end}")
            file.seek(_HEADER_LENGTH_BYTES + length + start)
            parts.append(file.read(min(_PAGE, end - start)))
    return parts


def _tensor_ranges(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Returns the byte ranges of the tensors in the file's data, in order."""
    try:
        entries = _headers.decode(header)
        entries.pop("__metadata__", None)
        tensors = [_tensors.decode(entry) for entry in entries.values()]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    return sorted(tensor.data_offsets for tensor in tensors)
