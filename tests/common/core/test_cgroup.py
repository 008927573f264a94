"""The cores and the memory that a container may use: made-up cgroup trees of both versions, and a
real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from paths import MODELS
from pdserve.common.core import host as cgroup
from pdserve.common.core.host import memory_left, memory_limit, usable_cores

GIB = 2**30


@pytest.fixture(autouse=True)
def host_of_eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup.os, "sched_getaffinity", lambda pid: set(range(8)))


def proc(folder: Path, memberships: str, mounts: str, files: Mapping[str, str]) -> Path:
    """A made-up /proc/self; `files` are the groups' own, below `folder`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    (folder / "cgroup").write_text(memberships)
    (folder / "mountinfo").write_text(mounts.replace("/sys/fs/cgroup", str(folder)))
    return folder


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1 = (
    "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def test_a_container_of_version_2_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {
        "cpu.max": "250000 100000",
        "memory.max": str(GIB),
        "memory.current": str(GIB // 2),
        "memory.stat": f"anon 1\ninactive_file {GIB // 4}\nactive_file 7",
    }
    found = proc(tmp_path, "0::/\n", V2, files)
    assert usable_cores(found) == 2
    assert memory_left(found) == 3 * GIB // 4


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "pod/cpu.max": "100000 100000",
        "pod/memory.max": str(GIB),
        "pod/memory.current": str(GIB - 5),
        "pod/memory.stat": "inactive_file 0",
        "pod/app/cpu.max": "max 100000",
        "pod/app/memory.max": str(4 * GIB),
        "pod/app/memory.high": str(3 * GIB),
        "pod/app/memory.current": "0",
    }
    found = proc(tmp_path, "0::/pod/app\n", V2, files)
    assert usable_cores(found) == 1
    assert memory_left(found) == 5


@pytest.mark.parametrize(
    ("quota", "cores"), [("350000", 3), ("50000", 1), ("-1", 8), ("1600000", 8)]
)
def test_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    files = {
        "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": quota,
        "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        "memory/docker/abc/memory.limit_in_bytes": str(900 * 10**6),
        "memory/docker/abc/memory.usage_in_bytes": str(600 * 10**6),
        "memory/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 100000000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "1",
    }
    memberships = "3:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n"
    found = proc(tmp_path, memberships, V1, files)
    assert usable_cores(found) == cores
    assert memory_left(found) == 400 * 10**6
    assert memory_limit(found) == 900 * 10**6


def test_a_group_that_is_not_mounted_here(tmp_path: Path) -> None:
    """Without a cgroup namespace a container is told its path on the host, but its own group is
    what is mounted; and with one, a process moved out of it has a path above the root."""
    mounts = V2.replace(" / ", " /docker/abc ", 1)
    files = {"cpu.max": "100000 100000"}
    assert usable_cores(proc(tmp_path, "0::/docker/abc\n", mounts, files)) == 1
    assert usable_cores(proc(tmp_path, "0::/../other\n", V2, files)) == 1


def test_without_limits_it_is_the_affinity(tmp_path: Path) -> None:
    unlimited = {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}
    assert usable_cores(proc(tmp_path, "0::/\n", V2, unlimited)) == 8
    assert memory_left(proc(tmp_path, "0::/\n", V2, unlimited)) is None
    nowhere = tmp_path / "no-proc"
    assert usable_cores(nowhere) == 8
    assert memory_left(nowhere) is None and memory_limit(nowhere) is None


# ---- a real group ----------------------------------------------------------------------------


@pytest.fixture
def limited() -> Iterator[list[Path]]:
    """The groups, one or one of each controller, of half a core and 512 MiB."""
    groups = []
    for controller, files in {
        "cpu": {"cpu.max": "50000 100000", "cpu.cfs_quota_us": "50000"},
        "memory": {"memory.max": str(GIB // 2), "memory.limit_in_bytes": str(GIB // 2)},
    }.items():
        group = next(_made(controller, list(files)), None)
        if group is None:
            pytest.skip(f"no group with a {controller} limit can be made here (needs root)")
        groups.append(group)
        for name, text in files.items():
            if (group / name).exists():
                (group / name).write_text(text)
    yield groups
    for group in groups:
        if group.exists():
            group.rmdir()


def _made(controller: str, files: list[str]) -> Iterator[Path]:
    for parent in cgroup._groups(controller, cgroup.PROC):
        group = parent / f"pdserve-test-{os.getpid()}"
        try:
            group.mkdir(exist_ok=True)
        except OSError:
            continue
        if any((group / name).exists() for name in files):
            yield group
        else:
            group.rmdir()


def test_in_a_real_group(limited: list[Path]) -> None:
    code = (
        "import os, sys; from pdserve.common.core.host import memory_left, usable_cores;"
        "[open(f'{group}/cgroup.procs', 'w').write(str(os.getpid())) for group in sys.argv[1:]];"
        "print(usable_cores(), memory_left())"
    )
    command = [sys.executable, "-c", code, *map(str, limited)]
    cores, left = subprocess.check_output(command, text=True).split()
    assert cores == "1"
    assert GIB // 4 < int(left) <= GIB // 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "None 1000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "9"}, "None 9"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_s_threads_look_for_each_other_briefly(
    given: dict[str, str], expected: str, role: str
) -> None:
    """OpenMP reads it when torch is loaded, which must not have happened yet."""
    code = (
        f"import os, sys, pdserve.{role}_node.__main__ as node, pdserve.common.node.main as main\n"
        "def load(path):\n"
        "    names = ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')\n"
        "    print(*map(os.environ.get, names), 'torch' in sys.modules)\n"
        "    sys.exit(0)\n"
        "main.import_string = load\n"
        f"node.main(['--model', '{MODELS}/llama-gqa'])"
    )
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code]
    output = subprocess.check_output(command, text=True, env={**environment, **given})
    assert output == f"{expected} False\n"
