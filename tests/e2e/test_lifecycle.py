"""Roles that come and go on their own: start in any order, drain, stop, die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import reference
from callers import storm
from close_audit import HAS_COMPILER, CloseAudit
from cluster import Cluster, Service, text_of
from paths import MODELS
from warm import WarmCluster, run_roles, slowness

MODEL = "mistral"
PROMPT = "Once upon a time there was a naïve girl named Zoë. She lived in an old mill"
ROUTING = {
    "queue_timeout": 0.5,
    "heartbeat_timeout": 10,  # no node dies here, and a late one is not lost
    "request_timeout": 6 * slowness(),  # how long a stream waits for a decode node to come back
    "max_concurrent_requests": 1,
    "max_queued_requests": 0,
}
LONG = 150  # tokens
UP = (str(Path(sys.executable).with_name("pdserve")), "up", "--port=0")


def expected(service: Service, num_tokens: int) -> str:
    ids = tuple(reference.encode(service.model, PROMPT))
    return reference.decode(service.model, reference.greedy(service.model, ids, num_tokens))


def check_exact(service: Service) -> None:
    answer = service.complete(PROMPT, max_tokens=24, ignore_eos=True)
    assert answer["choices"][0]["text"] == expected(service, 24)
    service.wait_idle()


def check_refused(service: Service, status: int) -> str:
    """Checks that the request is refused; returns the reason."""
    response = service.post("/v1/completions", prompt=PROMPT)
    assert response.status_code == status, response.text
    assert int(response.headers["Retry-After"]) >= 1
    return str(response.json()["error"]["message"])


class LongStream:
    """A streamed completion that has begun: one token is there, the prefill node's."""

    def __init__(self, service: Service) -> None:
        self._events = service.stream(PROMPT, max_tokens=LONG, ignore_eos=True)
        self._begin = next(self._events)

    def text(self) -> str:
        return text_of(iter([self._begin])) + text_of(self._events)

    def error(self) -> dict[str, str]:
        """The error of the last event."""
        *_, last = self._events
        error: dict[str, str] = last["error"]
        return error


# ---- one by one -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roles() -> Iterator[WarmCluster]:
    """Nodes first, router last."""
    with WarmCluster(MODEL, 0, 0, router=ROUTING, drain_timeout=60) as roles:
        roles.kill("router")
        roles.start_held("decode")
        roles.start_node("prefill")
        roles.wait_for(lambda: roles.log().count("trying again") >= 2)
        roles.start_router()
        roles.wait_nodes()
        yield roles


def drain(roles: WarmCluster, role: str) -> int:
    """Tells the one node of a role to end; its pid."""
    (name,) = roles.names(role)
    return roles.drain(name)


def ended(roles: WarmCluster, pid: int) -> int:
    """The exit code, once there is one."""
    roles.wait_for(lambda: roles.exit_code(pid) is not None)
    return int(roles.exit_code(pid) or 0)


def test_nodes_wait_for_their_router(roles: WarmCluster) -> None:
    assert {node["role"] for node in roles.nodes()} == {"prefill", "decode"}
    check_exact(roles)


def test_a_router_that_restarts_finds_its_nodes_again(roles: WarmCluster) -> None:
    before = {node["node_id"] for node in roles.nodes()}
    roles.kill("router")
    roles.start_router()
    roles.wait_nodes()
    assert {node["node_id"] for node in roles.nodes()} == before
    check_exact(roles)


def test_a_full_queue(roles: WarmCluster) -> None:
    with roles.standing_still("decode"):
        stream = LongStream(roles)
        assert check_refused(roles, 429) == "0 requests are waiting already"
    assert stream.text() == expected(roles, LONG)
    check_exact(roles)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_node_drains(roles: WarmCluster, role: str) -> None:
    """Its stream finishes though it got SIGTERM, then it leaves; another one takes over."""
    with roles.standing_still("decode"):
        stream = LongStream(roles)
        pid = drain(roles, role)
        roles.wait_for(lambda: not roles.nodes(role))
    assert stream.text() == expected(roles, LONG)
    assert ended(roles, pid) == 0
    assert check_refused(roles, 503) == f"no usable {role} node"
    assert roles.get("/ready").status_code == 503
    start = roles.start_held if role == "decode" else roles.start_node
    start(role)
    roles.wait_nodes()
    check_exact(roles)


def test_a_node_of_another_layout_is_never_paired(roles: WarmCluster) -> None:
    assert ended(roles, drain(roles, "prefill")) == 0
    roles.start_node("prefill", block_size=32)
    roles.wait_for(lambda: roles.nodes("prefill"))
    ready = roles.get("/ready")
    assert ready.status_code == 503
    assert "block_size 32 ≠ 16" in ready.json()["error"]["message"]
    assert "block_size 32 ≠ 16" in check_refused(roles, 503)
    state = roles.get("/v1/cluster").json()
    assert (state["ready"], state["pairings"]) == (False, [])
    assert {node["state"] for node in state["nodes"]} == {"unpaired"}
    assert all("block_size 32 ≠ 16" in node["reason"] for node in state["nodes"])
    sizes = {node["role"]: node["fingerprint_parts"]["block_size"] for node in state["nodes"]}
    assert sizes == {"prefill": "32", "decode": "16"}
    roles.start_node("prefill")
    roles.wait_for(lambda: len(roles.get("/v1/cluster").json()["pairings"]) == 1)
    check_exact(roles)
    states = sorted(node["state"] for node in roles.nodes())
    assert states == ["ready", "ready", "unpaired"]


def test_a_second_signal_stops_at_once(roles: WarmCluster) -> None:
    with roles.standing_still("decode"):
        stream = LongStream(roles)
        pid = drain(roles, "decode")
        roles.wait_for(lambda: not roles.nodes("decode"))
        os.kill(pid, signal.SIGTERM)
        assert stream.error()["code"] == "no_node"
    assert ended(roles, pid) == 0
    assert "stopping with work in flight: second signal" in roles.log()


def test_all_leave_in_order(roles: WarmCluster) -> None:
    assert set(roles.stop().values()) == {0}
    assert roles.home.processes() == []


# ---- deaths ---------------------------------------------------------------------------------


SMALL_SHM = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
IN_A_FULL_SHM = f"""#!/bin/sh
exec unshare --mount sh -c '
    {SMALL_SHM} && head -c 1M /dev/zero > /dev/shm/filler
    exec "$@"' up {UP[0]} "$@"
"""


@pytest.fixture(scope="module")
def has_full_shm() -> bool:
    """Whether processes can be given a /dev/shm of their own: root may do that."""
    command = ["sh", "-c", f"unshare --mount {SMALL_SHM}"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory, has_full_shm: bool) -> Iterator[Cluster]:
    """None of its processes closes a descriptor twice, whatever is killed, to the end; and none
    needs /dev/shm."""
    audit = CloseAudit(tmp_path_factory.mktemp("audit"))
    script = tmp_path_factory.mktemp("bin") / "pdserve"
    script.write_text(IN_A_FULL_SHM)
    script.chmod(0o755)
    program = script if has_full_shm else None
    options = {"decode_tp": 2, "restart": "on-failure"}
    with Cluster(MODEL, audit.environment, program, **options) as cluster:
        yield cluster
    assert not audit.told(), audit.told()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="there is no g++ here")
@pytest.mark.parametrize(
    ("code", "whose"),
    [
        ("import os; os.close(0); os.close(0)", "which was not open"),
        (
            "import os, zmq; socket = zmq.Context().socket(zmq.PULL)\n"
            "os.close(socket.get(zmq.FD)); os._exit(0)",
            "another library's",
        ),
    ],
)
def test_a_descriptor_that_is_not_the_closer_s_is_told_of(
    code: str, whose: str, tmp_path: Path
) -> None:
    audit = CloseAudit(tmp_path)
    subprocess.run([sys.executable, "-c", code], env=os.environ | audit.environment)
    assert audit.told().count("closed") == 1 and whose in audit.told()


@pytest.mark.slow
def test_a_full_dev_shm_stops_nothing(fragile: Cluster, has_full_shm: bool) -> None:
    if not has_full_shm:
        pytest.skip("mounting a small /dev/shm needs root")
    processes = psutil.Process(fragile.processes["up"].pid).children(recursive=True)
    assert len(processes) >= 5  # the router, two nodes, the ranks of one
    for process in processes:
        assert not os.statvfs(f"/proc/{process.pid}/root/dev/shm").f_bfree
    check_exact(fragile)


@pytest.mark.slow
def test_a_storm_of_hang_ups_with_several_ranks(fragile: Cluster) -> None:
    storm(fragile, 30)
    check_exact(fragile)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_its_node(fragile: Cluster) -> None:
    node = fragile.node_process("decode")
    assert node is not None
    ranks = node.children()
    assert len(ranks) == 2
    ranks[1].kill()
    fragile.wait_for(lambda: "decode-0: exit code 1; restart" in fragile.log())
    assert f"rank 1 (pid {ranks[1].pid}) was killed by SIGKILL" in fragile.log()
    fragile.wait_for(lambda: not any(rank.is_running() for rank in ranks))


@pytest.mark.slow
def test_sigkill_of_up_leaves_no_process(fragile: Cluster) -> None:
    up = fragile.processes.pop("up")
    up.kill()
    up.wait()
    fragile.wait_for(lambda: fragile.home.processes() == [])


# ---- invalid options -------------------------------------------------------------------------

ROUTER = ("router", "--port=0", "--grpc-port=0", "--registry-port=0")
WRONG = [
    ((*UP, "--model={model}", "--frobnicate"), "--frobnicate"),
    ((*UP, "--model={model}", "--block-size=0"), "--block-size"),
]
WRONG_FORKED = [
    (("prefill_node", "--model=/no/such/model"), "the folder /no/such/model does not exist"),
    (("prefill_node", "--model={model}", "--tensor-parallel-size=3"), "3 does not divide"),
    (("prefill_node", "--model={model}", "--num-gpu-blocks-override=3"), "has 3 blocks"),
    ((*ROUTER, "--model=/no/such/model"), "the folder /no/such/model does not exist"),
    # Open to strangers beyond this host.
    ((*ROUTER, "--model={model}", "--host=0.0.0.0"), "give all roles the same --cluster-key"),
    (("prefill_node", "--model={model}", "--kv-host=0.0.0.0"), "same --cluster-key"),
    (("decode_node", "--model={model}", "--router=a:8002,b:8002,a:8002"), "names a router twice"),
    (("decode_node", "--model={model}", "--router=a:8002,"), "nothing must be HOST:PORT"),
    (("prefill_node", "--model={model}", "--router=nowhere"), "must be HOST:PORT"),
]


def test_wrong_options_end_with_2_and_a_clear_line(tmp_path: Path) -> None:
    model = MODELS / MODEL

    def run(command: Sequence[str]) -> tuple[int, str]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
        return done.returncode, done.stdout + done.stderr

    commands = [[word.format(model=model) for word in words] for words, _ in WRONG]
    forked = [[word.format(model=model) for word in words] for words, _ in WRONG_FORKED]
    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(run, commands), *run_roles(tmp_path, forked)]
    for (command, clue), (code, output) in zip(WRONG + WRONG_FORKED, results, strict=True):
        assert code == 2, f"{command}: {code}\n{output}"
        assert clue in output
        assert "Traceback" not in output, output
