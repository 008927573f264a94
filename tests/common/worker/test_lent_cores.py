"""Cores that processes lend each other: results stay the same to the bit, an owner gets its core
back at once, and processes that die or stop keep none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import core_sharer
from lent_core import COMPUTING, idle_owner, member
from pdserve.common.core.core_table import ENTRY_NBYTES, lent_seconds
from pdserve.common.core.errors import ConfigError
from pdserve.common.model.kernels import native
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import TorchKernels
from pdserve.common.worker import lent_cores
from pdserve.common.worker.lent_cores import LentCores, join_lent_cores
from waiting import wait_until

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")


@pytest.fixture
def kernels() -> NativeKernels:
    return NativeKernels()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "cores"


@contextmanager
def computing_process(table: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a core of its own and a step that does not end: see `core_sharer.py`."""
    command = [sys.executable, core_sharer.__file__, str(table)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def products(kernels: NativeKernels) -> Callable[[], list[Tensor]]:
    """Returns calls that compute large tensors, by each kernel that shares its tiles by rows."""
    torch.manual_seed(0)
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(2048, 512).to(dtype)
        kernels.packer.pack(weight)
        made.append((torch.randn(300, 512).to(dtype), weight))
    int8 = torch.randint(-127, 128, (2048, 512), dtype=torch.int8)
    kernels.packer.pack(int8)
    scales = torch.rand(2048).bfloat16()

    def compute() -> list[Tensor]:
        out = [kernels.packer.linear(x, weight) for x, weight in made]
        out.append(kernels.packer.linear(made[1][0], int8, scales=scales))
        out += [kernels.rms_norm(each, each[0], 1e-6) for each in out]
        out += [kernels.silu_and_mul(each) for each in out[:3]]
        return [*out, *kernels.add_rms_norm(out[0], out[0], out[0][0], 1e-6)]

    return compute


def test_results_are_the_same_to_the_bit(table: Path, kernels: NativeKernels) -> None:
    compute = products(kernels)
    expected = compute()
    table.touch()
    with idle_owner(table), member(table, kernels) as cores:

        def helped() -> bool:
            with cores.computing():
                same = all(map(torch.equal, compute(), expected))
            assert same
            return sum(lent_seconds(table)) > 0.01

        wait_until(helped)


def test_an_owner_gets_its_core_back(table: Path, kernels: NativeKernels) -> None:
    """From a guest that computes, from one that is stopped, and from one that dies."""

    def held() -> bool:
        return int.from_bytes(table.read_bytes()[:4], sys.byteorder) > 3

    def stop_while_held() -> None:
        while True:
            wait_until(held)
            guest.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, guest.pid, os.WSTOPPED | os.WNOWAIT)
            if held():
                return
            guest.send_signal(signal.SIGCONT)

    def computes() -> bool:
        return guest.stdout is not None and guest.stdout.readline() == "right\n"

    with member(table, kernels) as cores, computing_process(table) as guest:
        wait_until(held)
        with cores.computing():
            assert not held()
            assert computes() and not held()
        stop_while_held()
        with cores.computing():
            assert not held()
        guest.send_signal(signal.SIGCONT)
        assert all(computes() for _ in range(50))
        stop_while_held()
        guest.kill()
        guest.wait()
        with cores.computing():
            assert not held()


def test_the_core_of_an_owner_that_ended_goes_to_the_next(
    table: Path,
    kernels: NativeKernels,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    table.write_bytes(bytes(ENTRY_NBYTES))
    monkeypatch.setattr(lent_cores, "PATIENCE_S", 0.0)
    with idle_owner(table):
        assert join_lent_cores(str(table), 1, 1, kernels) is None
    assert "0 of its 1 cores have no owner, and 1 are wanted; this rank shares none" in caplog.text
    with member(table, kernels) as cores, cores.computing():
        assert table.read_bytes()[:4] == COMPUTING


def test_an_invalid_core_table_is_refused(tmp_path: Path, kernels: NativeKernels) -> None:
    odd = tmp_path / "odd"
    odd.write_bytes(b"x" * 100)
    for file, said in (
        (odd, "a file of 100 bytes"),
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "cores", "No such file"),
        (Path("/dev/null"), "No such device|Invalid argument"),
    ):
        with pytest.raises(ConfigError, match=said):
            LentCores(file, 1, 2, kernels)


def test_kernels_that_cannot_share_say_so(
    table: Path, caplog: pytest.LogCaptureFixture, kernels: NativeKernels
) -> None:
    assert join_lent_cores(None, 1, 2, kernels) is None
    assert join_lent_cores(str(table), 1, 2, TorchKernels()) is None
    assert "--share-cores has no effect" in caplog.text and not table.exists()


def test_no_tile_is_taken_for_another_jobs(tmp_path: Path) -> None:
    program, kernels = tmp_path / "job_stress", Path(native.__file__).parent
    source = Path(core_sharer.__file__).with_name("job_stress.cpp")
    command = ["g++", "-std=c++17", "-O2", "-pthread", f"-I{kernels}", str(source), "-o"]
    subprocess.run([*command, str(program)], check=True)
    run = subprocess.run([program, "300000"], check=True, capture_output=True, text=True)
    assert int(run.stdout) == 0
