"""The pods: what they may do, how they are probed and stopped, and what the roles' own parsers make
of their arguments."""

from __future__ import annotations

import re
from ipaddress import ip_address

from chart import NODES, RELEASE, config_of, every_file, needs_helm, pods, ports_of, render, values
from pdserve.cli.doctor import _parser as doctor_parser


@needs_helm
@every_file
def test_no_pod_may_do_more_than_it_must(name: str) -> None:
    """Pods meet the Pod Security Standard "restricted", and a little more."""
    for component, pod in pods(name).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, component
        assert spec["enableServiceLinks"] is False, "else a Service's variables look like options"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001, "the user of the images"
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert re.fullmatch(r"[\w./-]+:[\w.]+", container["image"])
            paths = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "/tmp" in paths, "the root cannot be written to"
        volumes = [volume["name"] for volume in spec["volumes"]]
        mounted = {
            mount["name"]
            for container in [*spec["containers"], *spec.get("initContainers", ())]
            for mount in container["volumeMounts"]
        }
        assert mounted == set(volumes) and len(mounted) == len(volumes)


@needs_helm
@every_file
def test_every_role_is_probed_and_drained(name: str) -> None:
    for component, pod in pods(name).items():
        if component == "test":
            continue
        (container,) = pod["spec"]["containers"]
        config, ports = config_of(component, pod), ports_of(container)
        probes = {each: container[f"{each}Probe"] for each in ("startup", "liveness", "readiness")}
        paths = {each: probe["httpGet"]["path"] for each, probe in probes.items()}
        assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
        answering = config.server.port if component == "router" else config.node.metrics_port
        assert {ports[probe["httpGet"]["port"]] for probe in probes.values()} == {answering}
        https = component == "router" and config.server.ssl_certfile is not None
        scheme = {probe["httpGet"].get("scheme", "HTTP") for probe in probes.values()}
        assert scheme == {"HTTPS" if https else "HTTP"}
        drain = (config.server if component == "router" else config.node).drain_timeout
        before = float(
            container.get("lifecycle", {}).get("preStop", {"exec": {"command": [0]}})["exec"][
                "command"
            ][-1]
        )
        assert pod["spec"]["terminationGracePeriodSeconds"] > drain + before
        assert component != "router" or before >= 1, "proxies forget it before it refuses requests"


@needs_helm
@every_file
def test_arguments_are_options_and_fit_together(name: str) -> None:
    given, made = values(name), pods(name)
    router = config_of("router", made["router"])
    for role in NODES:
        if role not in made:
            continue
        config, (container,) = config_of(role, made[role]), made[role]["spec"]["containers"]
        assert config.node.router == f"{RELEASE}-pdserve-routers:{router.server.registry_port}"
        assert config.auth == router.auth and len(config.auth.cluster_key) >= 32
        assert config.tls == router.tls
        assert config.engine.model.model == router.model.model
        assert config.engine.model.max_model_len == router.model.max_model_len
        assert ports_of(container) == {
            "grpc": config.node.grpc_port, "metrics": config.node.metrics_port,
        }  # fmt: skip
        names = {config.node.advertise_host}
        if role != "both":
            assert config.transfer.kv_connector == "tcp", "pods share no memory"
            names.add(config.transfer.kv_host)
        (address,) = names
        if config.tls.tls_cert:
            assert address == f"a-0.{RELEASE}-pdserve-{role}.default.svc.cluster.local"
        else:
            ip_address(address)
        gpus = given.get(role, {}).get("gpus", 0)
        limits = container["resources"]["limits"]
        assert limits.get("nvidia.com/gpu", 0) == gpus
        assert config.engine.parallel.device == ("cuda" if gpus else "cpu")
        assert config.engine.parallel.tensor_parallel_size == max(1, gpus)
        assert ("gpu" in container["image"]) == bool(gpus)
    (container,) = made["router"]["spec"]["containers"]
    assert ports_of(container) == {
        "http": router.server.port, "grpc": router.server.grpc_port,
        "registry": router.server.registry_port,
    }  # fmt: skip
    assert router.server.api_key and router.server.admin_api_key


@needs_helm
@every_file
def test_files_that_arguments_name_are_mounted(name: str) -> None:
    for component, pod in pods(name).items():
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]:
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            named = [value for word in container["args"] for value in [word.rpartition("=")[2]]]
            named += [each["value"] for each in container["env"] if "value" in each]
            for path in (each for each in named if each.startswith("/")):
                assert any(path.startswith(mount) for mount in mounts), (component, path)


@needs_helm
def test_the_embedded_model_is_unpacked_first() -> None:
    for component, pod in pods().items():
        if component == "test":
            continue
        (first,) = pod["spec"]["initContainers"]
        assert first["args"][0] == "model" and "node" in first["image"], "the router's has no torch"
        config = config_of(component, pod)
        model = config.model if component == "router" else config.engine.model
        assert first["args"][1] == model.model
    assert not any("initContainers" in pod["spec"] for pod in pods("gpu.yaml").values())


@needs_helm
def test_a_model_of_the_hub_is_downloaded_to_the_volume() -> None:
    for component in ("router", "both"):
        (container,) = pods("hub.yaml")[component]["spec"]["containers"]
        environment = {each["name"]: each.get("value") for each in container["env"]}
        assert environment["HF_HOME"] == "/models" and "HF_TOKEN" in environment
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "models"]
        assert mount["readOnly"] is False


@needs_helm
@every_file
def test_helm_s_test_is_the_doctor(name: str) -> None:
    (container,) = pods(name)["test"]["spec"]["containers"]
    command, *flags = container["args"]
    assert command == "doctor"
    options = doctor_parser().parse_args(flags)
    https = bool(values(name).get("tls", {}).get("clients"))
    assert options.cluster == f"{'https' if https else 'http'}://{RELEASE}-pdserve:8000"
    assert options.json and options.timeout == 60
    assert "PDSERVE_ADMIN_API_KEY" in {each["name"] for each in container["env"]}
    (pod,) = [each for each in render(name) if each["kind"] == "Pod"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
