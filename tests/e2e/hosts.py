"""Hosts on a network that can be cut: network namespaces around a bridge. Linux, root only."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000  # linux/sched.h
ROUTER = "10.77.0.1"
_libc = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str:
    """Why there can be no such network here; empty when there can."""
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
    """This thread's namespace is the router's host; `add` makes others, at one switch."""

    def __init__(self) -> None:
        self._hosts: list[subprocess.Popen[bytes]] = []
        _run("ip link set lo up")
        _run("ip link add br0 type bridge")
        _run(f"ip addr add {ROUTER}/24 dev br0")
        _run("ip link set br0 up")

    def add(self) -> tuple[str, tuple[str, ...]]:
        """A host's address, and what a process calls first to be on it (`WarmStart.start`)."""
        number = len(self._hosts) + 2
        host = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        self._hosts.append(host)
        while os.readlink(f"/proc/{host.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            pass
        _run(f"ip link add v{number} type veth peer name eth0 netns {host.pid}")
        _run(f"ip link set v{number} master br0 up")
        address = f"10.77.0.{number}"
        for command in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _run(f"nsenter -t {host.pid} -n ip {command}")
        return address, ("hosts:enter", str(host.pid))

    def cut(self, *addresses: str) -> None:
        """Nobody reaches these hosts any more, without a word to anybody."""
        for address in addresses:
            _run(f"ip link set v{address.rpartition('.')[2]} down")

    def heal(self, *addresses: str) -> None:
        for address in addresses:
            _run(f"ip link set v{address.rpartition('.')[2]} up")

    def isolate(self, *addresses: str, isolated: bool = True) -> None:
        """These hosts do not reach each other, but the router and the router them."""
        for address in addresses:
            state = "on" if isolated else "off"
            _run(f"bridge link set dev v{address.rpartition('.')[2]} isolated {state}")

    def close(self) -> None:
        for host in self._hosts:
            host.kill()
            host.wait()


@contextmanager
def network() -> Iterator[Network]:
    """Puts this thread into a namespace of its own, and back."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.unshare(CLONE_NEWNET))
        made = Network()
        try:
            yield made
        finally:
            made.close()
    finally:
        _check(_libc.setns(home, CLONE_NEWNET))
        os.close(home)


def enter(pid: str) -> None:
    """This process goes to the host of `pid`; its steps take 30 ms, so that a test can keep up."""
    host = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    _check(_libc.setns(host, CLONE_NEWNET))
    os.close(host)
    _slow_down(0.03)


def _slow_down(seconds: float) -> None:
    from common.distributed.inprocess import InProcessExecutor

    step = InProcessExecutor.step

    async def slow(self: InProcessExecutor, message: bytes) -> bytes:
        await asyncio.sleep(seconds)
        return await step(self, message)

    InProcessExecutor.step = slow  # type: ignore[method-assign]


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "network namespace")
