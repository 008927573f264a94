"""The objects that helm makes: Kubernetes knows all of their fields, and they find each other."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import yaml

from chart import (
    CHART,
    EXAMPLES,
    OBSERVABILITY,
    RELEASE,
    WITH_SECRETS,
    every_file,
    needs_helm,
    pods,
    ports_of,
    render,
    run_helm,
    selects,
)

KUBERNETES = ("1.25", "1.32", "1.37")
OURS = ["monitoring.coreos.com/v1", "keda.sh/v1alpha1"]  # of operators: Kubernetes has no schema


@needs_helm
@every_file
def test_helm_lints_it(name: str) -> None:
    run_helm("lint", "--strict", str(CHART), *(["-f", str(EXAMPLES / name)] if name else []))


@cache
def schemas(version: str) -> tuple[Path, referencing.Registry[Any]]:
    spec = find_spec("kubernetes_validate")
    if spec is None or spec.origin is None:
        pytest.skip("needs Kubernetes' schemas (pip install kubernetes-validate)")
    folder = Path(spec.origin).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())
    resource = referencing.Resource.from_contents(
        definitions, default_specification=referencing.jsonschema.DRAFT7
    )
    registry: referencing.Registry[Any] = referencing.Registry()
    return folder, registry.with_resource("_definitions.json", resource)


def check_object(made: Mapping[str, Any], version: str) -> None:
    folder, registry = schemas(version)
    group, _, number = made["apiVersion"].rpartition("/")
    parts = [made["kind"].lower(), *([group.partition(".")[0]] if group else []), number]
    schema = json.loads((folder / f"{'-'.join(parts)}.json").read_text())
    jsonschema.Draft7Validator(schema, registry=registry).validate(made)


@needs_helm
@every_file
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    checked = 0
    for made in render(name):
        if made["apiVersion"] in OURS:
            continue
        if version == "1.25":  # it prunes a field that it does not know yet, and has no such volume
            made = without_image_volumes(made)
        check_object(made, version)
        checked += 1
    assert checked > 10


def without_image_volumes(made: Any) -> Any:
    if isinstance(made, dict):
        return {
            key: {} if key == "image" and isinstance(value, dict) else without_image_volumes(value)
            for key, value in made.items()
            if not (key == "image" and isinstance(value, dict))
        }
    return [without_image_volumes(each) for each in made] if isinstance(made, list) else made


@needs_helm
def test_a_field_that_is_misspelt_would_be_found() -> None:
    made = json.loads(json.dumps(next(each for each in render() if each["kind"] == "Deployment")))
    made["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(jsonschema.ValidationError, match="livenessProb"):
        check_object(made, "1.32")


@needs_helm
@every_file
def test_everything_selects_one_component(name: str) -> None:
    templates, found = pods(name), set()
    names = {(each["kind"], each["metadata"]["name"]) for each in render(name)}
    assert len(names) == len(render(name))
    for made in render(name):
        spec, kind = made.get("spec", {}), made["kind"]
        if "scaleTargetRef" in spec:
            target = spec["scaleTargetRef"]
            assert (target["kind"], target["name"]) in names
            (scaled,) = [e for e in render(name) if e["metadata"]["name"] == target["name"]
                         and e["kind"] == target["kind"]]  # fmt: skip
            assert "replicas" not in scaled["spec"], "an upgrade would undo what was scaled"
            continue
        selector = spec.get("selector") or spec.get("podSelector")
        if not selector:
            continue
        labels = selector if kind == "Service" else selector["matchLabels"]
        (component,) = [
            c for c, pod in templates.items() if selects(labels, pod["metadata"]["labels"])
        ]
        found.add((kind, component))
        if kind == "Service":
            ports = ports_of(templates[component]["spec"]["containers"][0])
            assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"])
        if kind == "PodMonitor":
            ports = ports_of(templates[component]["spec"]["containers"][0])
            assert {each["port"] for each in spec["podMetricsEndpoints"]} <= ports.keys()
        if kind == "StatefulSet":
            assert ("Service", spec["serviceName"]) in names
            assert spec["template"]["metadata"]["labels"].items() >= labels.items()
    for component in templates.keys() - {"test"}:
        owner = "Deployment" if component == "router" else "StatefulSet"
        for kind in (owner, "Service", "PodDisruptionBudget", "NetworkPolicy"):
            assert (kind, component) in found


@needs_helm
def test_nodes_find_every_router_by_name_before_it_is_ready() -> None:
    services = {each["metadata"]["name"]: each for each in render() if each["kind"] == "Service"}
    spec = services[f"{RELEASE}-pdserve-routers"]["spec"]
    assert spec["clusterIP"] == "None" and spec["publishNotReadyAddresses"] is True
    front = services[f"{RELEASE}-pdserve"]["spec"]
    assert "clusterIP" not in front and "publishNotReadyAddresses" not in front
    assert "registry" not in {port["name"] for port in front["ports"]}, "it is not for clients"


@needs_helm
def test_a_new_chart_restarts_no_pod() -> None:
    for pod in pods().values():
        labels = pod["metadata"]["labels"].keys()
        assert pod["metadata"].get("annotations", {}).get("helm.sh/hook") or not labels & {
            "helm.sh/chart",
            "app.kubernetes.io/version",
        }


@needs_helm
def test_alerts_find_what_is_scraped() -> None:
    made = render("production.yaml")
    (rules,) = [each["spec"] for each in made if each["kind"] == "PrometheusRule"]
    files = [
        yaml.safe_load((OBSERVABILITY / name).read_text()) for name in ("rules.yml", "alerts.yml")
    ]
    assert rules == {"groups": [group for file in files for group in file["groups"]]}
    jobs = {
        rule["replacement"]
        for each in made
        if each["kind"] == "PodMonitor"
        for endpoint in each["spec"]["podMetricsEndpoints"]
        for rule in endpoint["relabelings"]
    }
    named = set(re.findall(r'job="([\w-]+)"', json.dumps(rules).replace('\\"', '"')))
    assert named and named <= jobs


@needs_helm
def test_limits_of_alerts_are_values(tmp_path: Path) -> None:
    name, ratio = "time_to_first_token_seconds:p99", "slo_misses:ratio"
    chosen = {"monitoring": {"enabled": True, "limits": {name: 2.5, ratio: 0.001}}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(chosen))
    made = render(tmp_path / "values.yaml")
    (spec,) = [each["spec"] for each in made if each["kind"] == "PrometheusRule"]
    limits = {
        rule["record"].removeprefix("pdserve_limit:"): rule["expr"]
        for group in spec["groups"]
        for rule in group["rules"]
        if rule.get("record", "").startswith("pdserve_limit:")
    }
    assert limits[name] == "vector(2.5)" and limits[ratio] == "vector(0.001)"
    assert limits["inter_token_latency_seconds:p99"] == "vector(0.5)"


@needs_helm
def test_a_package_is_whole(tmp_path: Path) -> None:
    run_helm("package", str(CHART), "-d", str(tmp_path))
    (package,) = tmp_path.glob("pdserve-*.tgz")
    subprocess.run(["tar", "xzf", package, "-C", tmp_path], check=True)
    assert (tmp_path / "pdserve/rules/alerts.yml").read_text() == (
        OBSERVABILITY / "alerts.yml"
    ).read_text()
    said = run_helm("template", RELEASE, str(tmp_path / "pdserve"), *WITH_SECRETS)
    mine = run_helm("template", RELEASE, str(CHART), *WITH_SECRETS)
    assert said == mine and "kind: StatefulSet" in said
