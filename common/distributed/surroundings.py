"""What in a rank's host and environment matters to collectives, and what should be mended."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.common.core.host import usable_cores

PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Of one rank."""

    rank: int
    host: str  # its name
    host_identity: str  # see `environment.host_identity`
    address: str  # under which the other hosts reach it
    device: str
    cores: int  # that this rank may run on
    name_addresses: list[str]  # what the host's name resolves to
    interfaces: list[str]
    infiniband: list[str]  # adapters
    variables: dict[str, str]


def look_around(rank: int, identity: str, address: str, device: torch.device) -> Surroundings:
    name = socket.gethostname()
    kind = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    adapters = sorted(path.name for path in INFINIBAND.glob("*"))
    return Surroundings(
        rank=rank,
        host=name,
        host_identity=identity,
        address=address,
        device=f"{device}{kind}",
        cores=usable_cores(),
        name_addresses=_resolve(name),
        interfaces=[interface for _, interface in socket.if_nameindex()],
        infiniband=adapters,
        variables={
            variable: value
            for variable, value in sorted(os.environ.items())
            if variable.startswith(PREFIXES) or variable in NAMES
        },
    )


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def advice(ranks: list[Surroundings]) -> list[str]:
    """What to mend, the gravest first; nothing where all is well."""
    several = len({each.host_identity for each in ranks}) > 1
    found = [line for each in ranks for line in _of_one(each, several)]
    return list(dict.fromkeys(found + _of_hosts(ranks, several)))


def _of_one(rank: Surroundings, several: bool) -> list[str]:
    """`several`: the ranks are on several hosts."""
    lines = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = rank.variables.get(variable, "")
        if wanted and not _known(wanted, rank.interfaces):
            names = ", ".join(rank.interfaces)
            lines.append(f"{rank.host}: {variable}={wanted} names no interface; there are: {names}")
    if several and all(map(_is_loopback, rank.name_addresses)):
        lines.append(
            f"{rank.host}: the host's name leads to loopback only, where other hosts cannot reach "
            f"it: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of {rank.address}"
        )
    if several and rank.device.startswith("cuda") and not rank.infiniband:
        lines.append(
            f"{rank.host}: no InfiniBand adapter: NCCL goes over TCP between hosts, which is slow "
            "for tensor parallelism; keep --tensor-parallel-size within a host"
        )
    if rank.variables.get("NCCL_IB_DISABLE") == "1" and rank.infiniband:
        lines.append(f"{rank.host}: NCCL_IB_DISABLE=1 leaves {rank.infiniband[0]} idle: unset it")
    return lines


def _of_hosts(ranks: list[Surroundings], several: bool) -> list[str]:
    lines = []
    for identity in dict.fromkeys(each.host_identity for each in ranks):
        here = [each for each in ranks if each.host_identity == identity]
        count, first = len(here), here[0]
        if not first.device.startswith("cpu"):
            continue
        if count > first.cores:
            lines.append(
                f"{first.host}: {count} ranks share {first.cores} cores: they wait for each other; "
                "start fewer ranks"
            )
        threads = first.variables.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) * count > first.cores:
            lines.append(
                f"{first.host}: OMP_NUM_THREADS={threads} for each of {count} ranks on "
                f"{first.cores} cores: set it to {max(first.cores // count, 1)}"
            )
    return lines


def _known(wanted: str, interfaces: list[str]) -> bool:
    """NCCL takes prefixes, separated by commas; "=" asks for the whole name, "^" excludes."""
    if wanted.startswith("^"):
        return True
    names = tuple(wanted.removeprefix("=").split(","))
    if wanted.startswith("="):
        return not set(names).isdisjoint(interfaces)
    return any(each.startswith(names) for each in interfaces)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
