"""`pdserve cluster-check`: on one host, joined by hand, with what is broken, and its advice."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import hosts
from benchmarks.fleet import free_port
from pdserve.cli.cluster_check import main
from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.check import RankHost, advice
from pdserve.common.distributed.communicator import CommunicatorContext, make_communicator
from pdserve.common.distributed.environment import LOOPBACK, address_towards
from pdserve.common.distributed.measure import OPERATIONS
from pdserve.common.distributed.torch_communicator import GlooCommunicator

QUICK = ["--device=cpu", "--sizes=1024,70000", "--seconds=0.01", "--timeout=20"]


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert main([*QUICK, "--tp=2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and not any(check["error"] for check in report["checks"])
    assert {check["rank"] for check in report["checks"]} == {0, 1}
    assert report["transports"]["tp"].startswith("shared memory (send and recv: gloo over")
    assert [each["variables"]["NCCL_DEBUG"] for each in report["ranks"]] == ["WARN", "WARN"]
    figures = {(each["operation"], each["nbytes"]): each for each in report["figures"]}
    assert figures.keys() == {(name, size) for name in OPERATIONS for size in (1024, 70000)}
    assert all(each["latency_us"] > 0 and each["gb_per_s"] > 0 for each in figures.values())


@pytest.mark.usefixtures("forked_ranks")
def test_four_ranks_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--tp=2", "--pp=2", "--sizes=1024"]) == 0
    text = capsys.readouterr().out
    assert "tp groups: [0, 1] [2, 3]" in text
    assert "pp groups: [0, 2] [1, 3]" in text
    for group in ("world", "tp", "pp"):
        assert f"{group} tensors go over shared memory" in text
        assert f"│ {group} " in text
    assert "checks passed" in text


def start(*options: str, enter: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = "import sys; from pdserve.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [*enter, sys.executable, "-c", command, "cluster-check", *QUICK, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def test_a_rank_that_finds_no_rank_0_says_so_in_a_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    argv = ["--rank=1", "--world-size=2", f"--init-method={where}", "--timeout=0.3"]
    assert main(argv) == 1
    said = capfd.readouterr().err
    assert said == (
        f"pdserve cluster-check: error: nothing answers at {where} within 0.3 s, "
        "connection refused: start rank 0 there, with the same --init-method (RANK_LOST)\n"
    )


@pytest.mark.slow
def test_ranks_joined_by_hand() -> None:
    where = f"--init-method=tcp://127.0.0.1:{free_port()}"
    ranks = [
        start(f"--rank={rank}", "--world-size=2", where, "--device-communicator=gloo")
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=250)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], first + second
    assert "tp tensors go over gloo over address 127.0.0.1" in first
    assert second == "rank 1: 0 checks failed; rank 0 has the figures\n"


@pytest.mark.slow
@pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable())
def test_ranks_on_two_hosts() -> None:
    """gloo listens where the other host reaches it, whatever the host's name resolves to."""
    with hosts.network() as network:
        places = [network.add() for _ in range(2)]
        where = f"--init-method=tcp://{places[0][0]}:29500"
        ranks = [
            start(f"--rank={rank}", "--world-size=2", where, enter=("nsenter", "-t", pid, "-n"))
            for rank, (_, (_, pid)) in enumerate(places)
        ]
        first, second = (rank.communicate(timeout=250)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], first + second
    assert "tp tensors go over gloo over address 10.77.0.2" in first
    assert "10.77.0.3" in first  # where rank 1 is


class WrongSums(GlooCommunicator):
    """Rank 1 gets sums of float16 that are wrong."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        super().all_reduce(tensor)
        if tensor.dtype is torch.float16 and self.context.rank == 1:
            tensor.view(-1)[0] += 1


class Mortal(GlooCommunicator):
    """Rank 1 dies in its first collective."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.context.rank == 1:
            os._exit(9)
        super().all_reduce(tensor)


@pytest.mark.usefixtures("forked_ranks")
def test_a_wrong_result_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--tp=2", f"--device-communicator={__name__}:WrongSums"]) == 1
    text = capsys.readouterr().out
    assert "WRONG: all_reduce of float16 in the tp group, rank 1: 1 of 24 elements" in text
    assert "│ tp " not in text  # what is wrong is not measured


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_dies_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--tp=2", f"--device-communicator={__name__}:Mortal"]) == 1
    assert "RANK_" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--tp=3", "--world-size=2"], "2 ranks are not 3"),
        (["--rank=0"], "needs --world-size"),
        (["--rank=0", "--world-size=2", "--init-method=tcp://host:port"], "tcp://HOST:PORT"),
        (["--rank=2", "--world-size=2", "--init-method=tcp://127.0.0.1:1"], "not one of 2"),
        (["--tp=2", "--device-communicator=carrier-pigeon"], "unknown name 'carrier-pigeon'"),
    ],
)
def test_options_that_make_no_sense(options: list[str], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        main([*QUICK, *options])


def test_a_name_that_leads_nowhere_is_told_by_who_cannot_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert address_towards("tcp://nowhere:1") == LOOPBACK


@pytest.mark.parametrize(
    "option", ["--tp=0", "--pp=0", "--world-size=0", "--rank=-1", "--sizes=8,0", "--timeout=nan"]
)
def test_numbers_that_make_no_sense(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They were taken for none, and nothing was checked with success."""
    with pytest.raises(SystemExit):
        main([option])
    assert f"argument --{option[2:].partition('=')[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "second_host", "hint"),
    [
        ("shm", "b", "one Linux x86-64 host"),
        ("nccl", "a", "NCCL needs CUDA devices, not cpu"),
        ("symm_mem", "a", "pass --device-communicator nccl"),
    ],
)
def test_a_communicator_that_cannot_serve_the_group(name: str, second_host: str, hint: str) -> None:
    hosts = ("a", second_host)
    context = CommunicatorContext(
        "tp", (0, 1), 0, hosts, "10.0.0.1", torch.device("cpu"), None, 1.0
    )
    with pytest.raises(ConfigError, match=hint):
        make_communicator(name, context)


# ---- advice ----

HOST = RankHost(
    rank=0,
    host="a",
    host_identity="a",
    address="10.0.0.1",
    device="cpu",
    cores=4,
    name_addresses=["10.0.0.1"],
    interfaces=["lo", "eth0"],
    infiniband=[],
    variables={},
)
OTHER = replace(HOST, rank=1, host="b", host_identity="b", address="10.0.0.2")
GPU = "cuda:0 (H100)"


@pytest.mark.parametrize(
    ("ranks", "hint"),
    [
        ([replace(HOST, name_addresses=["127.0.1.1"]), OTHER], "interface of 10.0.0.1"),
        ([replace(HOST, device=GPU), replace(OTHER, infiniband=["x"])], "a: no InfiniBand"),
        ([HOST] * 5, "5 ranks share 4 cores"),
        ([replace(HOST, variables={"OMP_NUM_THREADS": "4"})] * 2, "set it to 2"),
        ([replace(HOST, variables={"GLOO_SOCKET_IFNAME": "ib0"})], "it has: lo, eth0"),
        ([replace(HOST, variables={"NCCL_SOCKET_IFNAME": "=et,ens"})], "=et,ens names no"),
        ([replace(HOST, infiniband=["x"], variables={"NCCL_IB_DISABLE": "1"})], "disables x"),
    ],
)
def test_advice_names_the_fix(ranks: list[Any], hint: str) -> None:
    (line,) = advice(ranks)
    assert hint in line
