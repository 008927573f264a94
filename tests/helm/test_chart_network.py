"""Which pod reaches which port of which other one, by the chart's NetworkPolicies."""

from __future__ import annotations

import pytest

from chart import allowed, needs_helm, pods, policies, ports_of, selects, shown

KV = 45678  # one that the kernel might choose


@needs_helm
@pytest.mark.parametrize("name", ["", "production.yaml"])
def test_only_peers_reach_a_port(name: str) -> None:
    open_to_all = not name  # the other one names clients and scrapers
    table = {
        ("stranger", "router", 8000): open_to_all,
        ("stranger", "router", 8001): open_to_all,
        ("stranger", "router", 8002): False,
        ("test", "router", 8000): True,
        ("prefill", "router", 8002): True,
        ("decode", "router", 8002): True,
        ("decode", "router", 8000): False,
        ("router", "prefill", 9001): True,
        ("router", "decode", 9001): True,
        ("router", "decode", KV): False,
        ("prefill", "decode", 9001): True,
        ("prefill", "decode", KV): True,
        ("decode", "prefill", 9001): False,
        ("stranger", "decode", 9001): False,
        ("stranger", "prefill", 9001): False,
        ("stranger", "decode", KV): False,
        ("stranger", "decode", 9000): open_to_all,
    }
    assert {edge: allowed(name, *edge) for edge in table} == table


@needs_helm
def test_kv_ports_are_those_that_the_kernel_chooses() -> None:
    """In a new network namespace, which a pod has; this machine's own range may be another one."""
    rules = policies()["decode"]["ingress"]
    (ports,) = [port for rule in rules for port in rule["ports"] if "endPort" in port]
    assert (ports["port"], ports["endPort"]) == (32768, 60999)


@needs_helm
def test_only_a_model_of_the_hub_needs_the_world() -> None:
    world = {"ports": [{"port": 443}]}
    assert all(world in policy["egress"] for policy in policies("hub.yaml").values())
    assert all(world not in policy["egress"] for policy in policies("gpu.yaml").values())


@needs_helm
def test_the_pool_of_the_page_has_the_routers() -> None:
    (pool,) = [each["spec"] for each in shown() if each.get("kind") == "InferencePool"]
    found = [
        component
        for component, pod in pods().items()
        if selects(pool["selector"]["matchLabels"], pod["metadata"]["labels"])
    ]
    assert found == ["router"]
    ports = ports_of(pods()["router"]["spec"]["containers"][0])
    assert pool["targetPorts"] == [{"number": ports["http"]}]
