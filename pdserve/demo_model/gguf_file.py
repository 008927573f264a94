"""Reads a GGUF file's metadata and the table of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import printable

_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of the file, quantized in blocks along the last dimension."""

    kind: str  # ggml's name of the type: "F32", "Q4_K" …
    shape: tuple[int, ...]  # in torch's order
    offset: int  # bytes from the beginning of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def read(cls, path: Path) -> GGUFFile:
        """Reads everything except the weights.

        Raises:
            ConfigError: it is not a GGUF file, is truncated or damaged, or one part of several.
        """
        _check_is_gguf(path)
        try:
            reader = _reader(path)
            metadata = {key: field.contents() for key, field in reader.fields.items()}
            tensors = {
                each.name: GGUFTensor(
                    kind=each.tensor_type.name,
                    shape=tuple(int(size) for size in reversed(each.shape)),
                    offset=int(each.data_offset),
                    nbytes=int(each.n_bytes),
                )
                for each in reader.tensors
            }
        # The reader's errors about a file that ends too early or is damaged.
        except (ArithmeticError, LookupError, TypeError, ValueError, MemoryError) as error:
            reason = printable(str(error) or type(error).__name__, 200)
            raise ConfigError(f"{path} is truncated or damaged: {reason}") from error
        if metadata.get("split.count", 1) > 1:
            raise ConfigError(
                f"{path} is one of {metadata['split.count']} parts: join them with llama.cpp's "
                "gguf-split --merge"
            )
        return cls(path, metadata, tensors)

    @property
    def architecture(self) -> str:
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        """Returns a value of the metadata; raises ConfigError if there is none."""
        if key not in self.metadata:
            raise ConfigError(f"{self.path} is not complete: its metadata lacks {key}")
        return self.metadata[key]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape; raises ConfigError if the file has no such tensor."""
        if name not in self.tensors:
            raise ConfigError(f"{self.path} is not complete: it lacks the tensor {name}")
        return self.tensors[name].shape

    def kinds(self, names: Iterable[str]) -> list[str]:
        """Returns the types of these tensors, sorted."""
        return sorted({self.tensors[name].kind for name in names})


def _reader(path: Path) -> Any:
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]
        """Slices a plain array: slicing numpy's memory map takes several times as long."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = mapped.view(np.ndarray)

    return Reader(path)


def _check_is_gguf(path: Path) -> None:
    if find_spec("gguf") is None:
        raise ConfigError(f"{path} needs the package gguf: pip install 'pdserve[gguf]'")
    if not path.is_file():
        raise ConfigError(f"the file {path} does not exist")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if magic != _MAGIC:
        raise ConfigError(f"{path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
