"""CPU collectives over TCP (gloo): between hosts, and what shared memory does not do."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.distributed.communicator import CommunicatorContext
from common.distributed.torch_communicator import TorchCommunicator

INTERFACE = "GLOO_SOCKET_IFNAME"


class GlooCommunicator(TorchCommunicator):
    """Listens on loopback where all ranks share a host; else on GLOO_SOCKET_IFNAME, or on the
    address under which this host reaches the meeting point. (By itself gloo takes whatever
    address the host's name resolves to, which often is loopback.)"""

    def connect(self, context: CommunicatorContext) -> Any:
        # torch has no public name for gloo's options.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=context.timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(**_listen(context))]
        return dist.ProcessGroupGloo(context.store, context.rank, context.size, options)

    @property
    def transport(self) -> str:
        ((kind, where),) = _listen(self.context).items()
        return f"gloo over {'address' if kind == 'hostname' else kind} {where}"

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """gloo has no such algorithm: all of the sum, of which the rest is dropped."""
        total = tensor.clone()
        self.all_reduce(total)
        return total[self.context.rank].clone()


def _listen(context: CommunicatorContext) -> dict[str, str]:
    if context.one_host:
        return {"hostname": "127.0.0.1"}
    if interface := os.environ.get(INTERFACE):
        return {"interface": interface.split(",")[0]}
    return {"hostname": context.address}
