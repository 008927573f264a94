"""KV blocks between the GPUs of one host: the sink opens the source's cache by its CUDA IPC
handle and copies the blocks device to device, one copy over NVLink or PCIe.

The protocol is that of `kv_transfer/connectors/base/pull.py`. CUDA maps another process's memory
only as writable; the sink never writes to it. The logic is tested on CPU tensors; on GPUs it has
not been run yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import torch

from pdserve.common.core.errors import ConfigError
from pdserve.kv_transfer.blocks import gather, scatter
from pdserve.kv_transfer.connector import Capabilities, RankContext
from pdserve.kv_transfer.connectors.base import pull
from pdserve.kv_transfer.connectors.base.channel import FrameHash, OwnStream, parts
from pdserve.kv_transfer.connectors.base.handshake import refused, send_frame
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.frame import Frame, FrameKind, bad_frame
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.pipe import KVPipe

# torch's description of a shared storage: device, handle, bytes, offset, a reference counter
# (handle and offset), an event to wait for and whether to.
Handle = tuple[int, bytes, int, int, bytes, int, bytes, bool]


class Greeting(pull.Greeting):
    """Introduces a source and says how to open its memory."""

    handle: Handle
    offset: int  # of the cache in the storage, in elements


class CudaIpcConnector(pull.PullConnector[Greeting]):
    """Takes no options. The GPUs must be able to access each other's memory."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        pull=True,
        one_sided=True,
        same_host=True,
        devices=frozenset({"cuda"}),
        authenticates=True,
    )
    greeting = Greeting

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        try:
            self._handle = self.share(context.view.cache.untyped_storage())
        except RuntimeError as error:
            raise ConfigError(
                f"this host cannot share GPU memory ({str(error).splitlines()[0]}): choose "
                "another --kv-connector, such as tcp"
            ) from error

    def share(self, storage: torch.UntypedStorage) -> Handle:
        """Raises RuntimeError where CUDA cannot."""
        handle: Handle = storage._share_cuda_()
        return handle

    def open_storage(self, handle: Handle) -> torch.UntypedStorage:
        """Maps a source's storage for this rank's GPU; the source may number its GPU differently.
        Raises RuntimeError where CUDA cannot."""
        device = self.context.view.cache.device.index
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(device, *handle[1:])
        return storage

    def introduce(self, pipe: KVPipe) -> None:
        cache, rect = self.context.view.cache, self.context.view.rect
        offset = int(cache.storage_offset())
        fingerprint = self.context.fingerprint
        greeting = Greeting(fingerprint, rect, cache.shape[2], self._handle, offset)
        send_frame(pipe, Frame(FrameKind.HELLO), msgspec.msgpack.encode(greeting))

    def open(self, pipe: SocketPipe, greeting: Greeting) -> OpenedCache:
        try:
            storage = self.open_storage(greeting.handle)
        except RuntimeError as error:
            message = (
                f"cannot open the prefill rank's GPU memory ({str(error).splitlines()[0]}): "
                "are both GPUs on this host, and can they reach each other?"
            )
            raise refused(pipe, "CONNECT_FAILED", message) from error
        return OpenedCache(greeting, storage, self.context.view)


class OpenedCache(pull.PeerCache):
    """Maps a source rank's cache into this process's address space."""

    def __init__(self, greeting: Greeting, storage: torch.UntypedStorage, view: CacheView) -> None:
        super().__init__(greeting)
        rect, ours = greeting.rect, view.cache
        sizes = (rect.num_layers, ours.shape[1], greeting.num_blocks, rect.num_heads)
        shape = torch.Size((*sizes, *ours.shape[4:]))
        end = (greeting.offset + shape.numel()) * ours.element_size()
        if min(*shape, 1 + greeting.offset) < 1 or end > storage.nbytes():
            raise bad_frame(f"a cache of {tuple(shape)} does not fit its memory")
        flat = torch.empty(0, dtype=ours.dtype, device=storage.device)
        flat.set_(storage, greeting.offset, (shape.numel(),), (1,))
        self._theirs = CacheView(flat.view(shape), rect)
        self._ours = view
        self._stream = OwnStream(ours.device)

    def copy(
        self,
        rect: Rect,
        source_ids: Sequence[int],
        sink_ids: Sequence[int],
        hash_: FrameHash,
    ) -> None:
        with self._stream.active():
            for part in parts(self._ours.cache, rect, len(sink_ids)):
                staged = gather(self._theirs, rect, source_ids[part])
                scatter(self._ours, rect, sink_ids[part], staged.view(torch.uint8).reshape(-1))
            self._stream.synchronize()
