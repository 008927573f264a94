"""Reads a GGUF file's metadata and the table of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from pdserve.common.core.config_values import (
    COUNT,
    MAX_EXPERTS,
    MAX_LAYERS,
    NAMES,
    SIZE,
    TEXT,
    ValueKind,
    check_values,
    whole,
)
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import printable
from pdserve.demo_model.gguf_reader import MAGIC, Reader, TensorRow, nbytes_of

_MAX_HEAD = 2**16  # numbers in a head
_LIST_OR_SIZE = ValueKind(
    "a positive whole number", lambda value: isinstance(value, list) or SIZE.fits(value)
)
_NUMBER = ValueKind("a number", lambda value: isinstance(value, int | float))
_NUMBERS = ValueKind(
    "a list of numbers",
    lambda value: isinstance(value, list) and not any(isinstance(each, str) for each in value),
)
# Of keys that begin with the architecture, `general`, `tokenizer` or `split`.
_KINDS: dict[str, ValueKind] = {
    **dict.fromkeys(("architecture", "rope.scaling.type", "chat_template"), TEXT),
    **dict.fromkeys(("ggml.model", "ggml.pre"), TEXT),
    **dict.fromkeys(("count", "rope.scaling.original_context_length"), COUNT),
    **dict.fromkeys(("leading_dense_block_count", "attention.sliding_window"), COUNT),
    **dict.fromkeys(("expert_count", "expert_used_count"), whole(0, MAX_EXPERTS)),
    **dict.fromkeys(("context_length", "embedding_length"), SIZE),
    "block_count": whole(1, MAX_LAYERS),
    **dict.fromkeys(
        ("feed_forward_length", "attention.head_count", "attention.head_count_kv"), _LIST_OR_SIZE
    ),
    **dict.fromkeys(
        ("attention.key_length", "attention.value_length", "rope.dimension_count"),
        whole(1, _MAX_HEAD),
    ),
    **dict.fromkeys(
        ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"), _NUMBER
    ),
    **dict.fromkeys(("ggml.tokens", "ggml.merges"), NAMES),
    **dict.fromkeys(("ggml.token_type", "ggml.scores"), _NUMBERS),
    **dict.fromkeys(
        (f"ggml.{each}_token_id" for each in ("bos", "eos", "eot", "eom", "unknown", "padding")),
        COUNT,
    ),
}


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
            with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
                metadata, rows = Reader(data).header()
                tensors = _tensors(rows, len(data))
        except ValueError as error:
            reason = printable(str(error), 200)
            raise ConfigError(f"{path} is truncated or damaged: {reason}") from error
        _check_metadata(path, metadata)
        if (parts := metadata.get("split.count", 1)) > 1:
            raise ConfigError(
                f"{path} is one of {parts} parts: join them with llama.cpp's gguf-split --merge"
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


def _tensors(rows: Iterable[TensorRow], file_nbytes: int) -> dict[str, GGUFTensor]:
    """Raises ValueError: a tensor does not fit the file, or its type is unknown."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    tensors: dict[str, GGUFTensor] = {}
    for name, shape, number, offset in rows:
        kind = GGMLQuantizationType(number)
        if name in tensors:
            raise ValueError(f"the tensor {name} is there twice")
        try:
            nbytes = nbytes_of(shape, *GGML_QUANT_SIZES[kind], file_nbytes - offset)
        except ValueError as error:
            raise ValueError(f"the tensor {printable(name, 80)} {list(shape)}: {error}") from error
        tensors[name] = GGUFTensor(kind.name, shape, offset, nbytes)
    return tensors


def _check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raises ConfigError if a value that is read has another type, or is out of bounds."""
    prefixes = {key: key.partition(".")[0] for key in metadata}
    for prefix in dict.fromkeys(prefixes.values()):
        kinds = {f"{prefix}.{name}": kind for name, kind in _KINDS.items()}
        check_values(metadata, kinds, str(path))


def _check_is_gguf(path: Path) -> None:
    if find_spec("gguf") is None:
        raise ConfigError(f"{path} needs the package gguf: pip install 'pdserve[gguf]'")
    if not path.is_file():
        raise ConfigError(f"the file {path} does not exist")
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if magic != MAGIC:
        raise ConfigError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
