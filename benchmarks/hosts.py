"""Hosts on a network that can be cut: network namespaces around a bridge. Linux, root only."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdserve.common.core.plugins import import_string

CLONE_NEWNET = 0x40000000  # linux/sched.h
ROUTER = "10.77.0.1"
UNUSED = "02:00:00:00:00:00"  # a hardware address that no host here has
_libc = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str:
    """Returns why this machine cannot make such a network; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "bridge", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    probe = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "br0", "type", "bridge"], check=False
    )
    return "the kernel allows no network namespace with a bridge" if probe.returncode else ""


class Network:
    """A network of hosts at one switch. This thread's namespace is the router's host; `add` makes
    others. Every host has a second address, `front(address)`, for a relay before its servers."""

    def __init__(self) -> None:
        self._hosts: list[subprocess.Popen[bytes]] = []
        _run("ip link set lo up")
        _run("ip link add br0 type bridge")
        _run(f"ip addr add {ROUTER}/16 dev br0")
        _run("ip link set br0 up")
        self._router = _resident()

    @property
    def enter_router(self) -> tuple[str, str]:
        """Returns the function, with arguments, by which a process enters the router's host."""
        return "benchmarks.hosts:enter", str(self._router.pid)

    def add(self, *then: str) -> tuple[str, tuple[str, ...]]:
        """Adds a host. Returns its address, and the function by which a process enters it
        (`WarmStart.start`). `then`: a function to call there, as `module:name`, and its
        arguments."""
        number = len(self._hosts) + 2
        host = _resident("unshare", "-n")
        self._hosts.append(host)
        while os.readlink(f"/proc/{host.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            pass
        _run(f"ip link add v{number} type veth peer name eth0 netns {host.pid}")
        _run(f"ip link set v{number} master br0 up")
        address = f"10.77.0.{number}"
        for part in (
            f"addr add {address}/16 dev eth0",
            f"addr add {front(address)}/16 dev eth0",
            "link set eth0 up",
            "link set lo up",
        ):
            _run(f"nsenter -t {host.pid} -n ip {part}")
        return address, ("benchmarks.hosts:enter", str(host.pid), *then)

    def add_routed(self) -> str:
        """Adds a host with a default route, by which some programs find their own address."""
        address, _ = self.add()
        _run(f"{self._on(address)}ip route add default via {ROUTER}")
        return address

    def cut(self, *addresses: str) -> None:
        """Drops all packets to these hosts silently."""
        for address in addresses:
            _run(f"ip link set v{_number(address)} down")

    def heal(self, *addresses: str) -> None:
        for address in addresses:
            _run(f"ip link set v{_number(address)} up")

    def isolate(self, *addresses: str, isolated: bool = True) -> None:
        """Cuts these hosts off from each other; they and the router still reach each other."""
        for address in addresses:
            state = "on" if isolated else "off"
            _run(f"bridge link set dev v{_number(address)} isolated {state}")

    def drop(self, source: str, target: str, dropped: bool = True) -> None:
        """Drops, or no longer drops, packets from one host to another. The reverse direction stays
        open."""
        device = "br0" if source == ROUTER else "eth0"
        for address in (target, front(target)):
            neighbour = f"{address} lladdr {UNUSED} dev {device}"
            state = (
                "permanent" if dropped else "failed"
            )  # failed: the kernel resolves the address again
            _run(f"{self._on(source)}ip neigh replace {neighbour} nud {state}")

    def slow(self, address: str, rate: str) -> bool:
        """Limits a host's sending rate ("20mbit"); returns whether the kernel supports it."""
        limit = f"tc qdisc add dev eth0 root tbf rate {rate} burst 32kb latency 1s"
        command = f"{self._on(address)}{limit}".split()
        return shutil.which("tc") is not None and subprocess.run(command).returncode == 0

    def _on(self, address: str) -> str:
        """Returns the prefix for a command that runs on the host."""
        return "" if address == ROUTER else f"nsenter -t {self.pid(address)} -n "

    def pid(self, address: str) -> int:
        """Returns the pid of a process on this host that lives as long as the network."""
        return self._hosts[_number(address) - 2].pid

    def close(self) -> None:
        for host in (self._router, *self._hosts):
            host.communicate()


def _resident(*before: str) -> subprocess.Popen[bytes]:
    """Starts a process that keeps a network namespace. It reads a pipe of this process until that
    closes, so it also ends when this process is killed."""
    return subprocess.Popen([*before, "cat"], stdin=subprocess.PIPE)


def front(address: str) -> str:
    """Returns a host's second address; the router's host has none."""
    return address.replace("10.77.0.", "10.77.1.")


def _number(address: str) -> int:
    return int(address.rpartition(".")[2])


@contextmanager
def network() -> Iterator[Network]:
    """Has this thread in a new network namespace while the block runs."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.unshare(CLONE_NEWNET))
        made = Network()
        try:
            yield made
        finally:
            made.close()
    finally:
        go(home)
        os.close(home)


def go(namespace: int) -> None:
    """Moves this thread to the host of this namespace descriptor."""
    _check(_libc.setns(namespace, CLONE_NEWNET))


def enter(pid: str, *then: str) -> None:
    """Moves this process to the host of `pid`; see `Network.add`."""
    host = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    go(host)
    os.close(host)
    if then:
        import_string(then[0])(*then[1:])


def slow_steps(seconds: str) -> None:
    """Makes each step of this process's engine this much longer, so that a test can keep up."""
    from pdserve.common.distributed.executor import InProcessExecutor
    from pdserve.common.distributed.fanout import FanOutExecutor

    for kind in (InProcessExecutor, FanOutExecutor):
        kind.step = _after(float(seconds), kind.step)  # type: ignore[method-assign]


def _after(seconds: float, step: Any) -> Any:
    async def slow(self: Any, message: bytes) -> Any:
        await asyncio.sleep(seconds)
        return await step(self, message)

    return slow


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "network namespace")
