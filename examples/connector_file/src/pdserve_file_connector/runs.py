"""One piece of one run of blocks as a file: the header's length, the header, the KV bytes in
canonical order (`kv_transfer/blocks.py`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from pdserve.kv_transfer.layout import Rect

MAX_HEADER_NBYTES = 4096


class Header(msgspec.Struct):
    source: str  # name of the sender's folder
    transfer_id: bytes
    epoch: int
    rect: Rect
    first: int
    count: int


_headers = msgspec.msgpack.Decoder(Header)


def write_run(path: Path, header: Header, data: torch.Tensor) -> None:
    """Writes the run; `path` appears once the file is complete. `data` is contiguous."""
    encoded = msgspec.msgpack.encode(header)
    hidden = path.with_suffix(".tmp")
    try:
        with hidden.open("wb") as file:
            file.write(len(encoded).to_bytes(4) + encoded)
            file.write(data.view(torch.uint8).numpy().data)
        os.rename(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def read_header(file: BinaryIO) -> Header:
    """Reads the header; raises msgspec.DecodeError if it is invalid."""
    length = int.from_bytes(file.read(4))
    return _headers.decode(file.read(min(length, MAX_HEADER_NBYTES)))


def read_data(file: BinaryIO) -> torch.Tensor:
    """The rest of the file, 1-D uint8."""
    return torch.from_numpy(np.fromfile(file, dtype=np.uint8))
