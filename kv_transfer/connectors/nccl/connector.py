"""KV blocks through torch.distributed: each pair of ranks has its own communicator, gloo between
CPU caches, NCCL between CUDA caches.

A TCP connection carries the headers (`frame.py`) and shows when the peer is gone. Only the payload
of DATA goes through the group, staged in contiguous parts and unencrypted. On CUDA all work runs on
the connection's own stream. It is tested with gloo; on GPUs it has not been run yet.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist

from pdserve.common.core.errors import Blame, ConfigError
from pdserve.kv_transfer.blocks import gather, piece_nbytes, scatter
from pdserve.kv_transfer.connector import RankContext
from pdserve.kv_transfer.connectors.base.channel import Mover, OwnStream, parts
from pdserve.kv_transfer.connectors.base.handshake import greeting_limit
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.nccl.group import PairGroup, PairStore, Side, join
from pdserve.kv_transfer.connectors.pipe_connector import PipeConnector
from pdserve.kv_transfer.connectors.tcp import Options as TCPOptions
from pdserve.kv_transfer.connectors.tcp import TCPListener, TCPTransport
from pdserve.kv_transfer.frame import Frame, bad_frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView
from pdserve.kv_transfer.pipe import KVPipe, PipeListener, PipeTransport


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """Holds `--kv-connector-config` of the nccl connector."""

    stall_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Seconds for one part (64 MiB at most), after which the peer is lost."""


class NCCLConnector(PipeConnector):
    """Raises ConfigError when this build of torch lacks the backend for the cache's device."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        on_gpu = context.view.cache.device.type == "cuda"
        if not (dist.is_nccl_available() if on_gpu else dist.is_gloo_available()):
            backend = "NCCL" if on_gpu else "gloo"
            raise ConfigError(f"this torch has no {backend}: choose --kv-connector tcp")

    def transport(self, config: Mapping[str, Any]) -> PipeTransport:
        try:
            self._options = msgspec.convert(dict(config), Options)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--kv-connector-config of nccl: {error}") from error
        return GroupTransport()

    def mover(self, pipe: KVPipe) -> GroupMover:
        assert isinstance(pipe, GroupPipe)  # our own transport made it
        view = self.context.view
        return GroupMover(view, pipe, pipe.meet(self._options.stall_s, view.cache.device))


class GroupPipe(SocketPipe):
    """Owns a pair's connection, and its group once both ranks have joined."""

    def __init__(self, sock: socket.socket, side: Side) -> None:
        super().__init__(sock)
        self._side = side
        self._group: PairGroup | None = None

    def meet(self, stall_s: float, device: torch.device) -> PairGroup:
        """Joins the group. Raises OSError when the other rank is gone, TransferError when it does
        not join within GREETING_S seconds or sends other frames."""
        peer = Blame.DECODE if self._side is Side.SOURCE else Blame.PREFILL
        store = PairStore(self, peer)
        with greeting_limit(self, peer):
            self._group = join(store, self._side, self.sock, stall_s, device)
            store.finish()
        return self._group

    def interrupt(self) -> None:
        super().interrupt()
        if (group := self._group) is not None:
            group.interrupt()

    def close(self) -> None:
        super().interrupt()
        if self._group is not None:
            self._group.close()
        super().close()


class GroupTransport(TCPTransport):
    def __init__(self) -> None:
        super().__init__(TCPOptions())

    def listen(self, host: str) -> PipeListener:
        return GroupListener(host, TCPOptions())

    def dial(self, endpoint: bytes) -> GroupPipe:
        return GroupPipe(super().dial(endpoint).sock, Side.SOURCE)


class GroupListener(TCPListener):
    def accept(self) -> GroupPipe:
        accepted = super().accept()
        pipe = GroupPipe(accepted.sock, Side.SINK)
        pipe.peer_host = accepted.peer_host
        return pipe


class GroupMover(Mover):
    """Stages parts in the memory of the cache's device. Blocks are read before a part is sent and
    written after it came whole, so a failure of the group cannot corrupt blocks, and a cancelled
    transfer cannot break the group."""

    in_pipe = False

    def __init__(self, view: CacheView, pipe: KVPipe, group: PairGroup) -> None:
        super().__init__(view, pipe)
        self._group = group
        self._stream = OwnStream(view.cache.device)

    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        whole = True
        with self._stream.active():
            for part in parts(self._view.cache, frame.rect, frame.count):
                with gate.passage() as admitted:
                    if admitted:
                        staged = gather(self._view, frame.rect, block_ids[part])
                        self._stream.synchronize()
                whole = whole and admitted
                data = staged.view(torch.uint8).reshape(-1) if admitted else self._part(frame, part)
                self._group.send(data)
        return whole

    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        whole = True
        with self._stream.active():
            for part in parts(self._view.cache, frame.rect, frame.count):
                staged = self._recv_part(frame, part)
                with gate.passage() as admitted:
                    if admitted:
                        scatter(self._view, frame.rect, block_ids[part], staged)
                        self._stream.synchronize()
                whole = whole and admitted
        return whole

    def drain(self, frame: Frame) -> None:
        """Raises TransferError BAD_FRAME: gloo ends a process that takes less than is sent."""
        if not self._view.rect.contains(frame.rect):
            raise bad_frame(f"{frame.rect} is not within this rank's {self._view.rect}")
        self.check(frame)
        with self._stream.active():
            for part in parts(self._view.cache, frame.rect, frame.count):
                self._recv_part(frame, part)

    def _recv_part(self, frame: Frame, part: slice) -> torch.Tensor:
        staged = self._part(frame, part)
        self._group.recv(staged)
        return staged

    def _part(self, frame: Frame, part: slice) -> torch.Tensor:
        """Returns memory for a part, all zeros, so that no other KV is sent."""
        cache = self._view.cache
        nbytes = piece_nbytes(cache, frame.rect, part.stop - part.start)
        return torch.zeros(nbytes, dtype=torch.uint8, device=cache.device)
