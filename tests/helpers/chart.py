"""Renders the Helm chart, and reads the result."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from paths import ROOT
from pdserve.common.config.node import BothNodeConfig, WorkerNodeConfig
from pdserve.common.config.router import RouterConfig
from pdserve.common.config.sources import parse

CHART = ROOT / "compose" / "helm" / "pdserve"
EXAMPLES = ROOT / "compose" / "helm" / "examples"
FILES = ["", *sorted(path.name for path in EXAMPLES.glob("*.yaml"))]  # "": the defaults
RELEASE = "llm"
NODES = ("prefill", "decode", "both")
OBSERVABILITY = ROOT / "compose" / "observability"
CONFIGS: dict[str, type] = {
    "router": RouterConfig,
    "prefill": WorkerNodeConfig,
    "decode": WorkerNodeConfig,
    "both": BothNodeConfig,
}
every_file = pytest.mark.parametrize("name", FILES)
# Fields with generated keys, which differ each time.
WITH_SECRETS = ("--set", "keys.secret=pdserve-keys")

needs_helm = pytest.mark.skipif(not shutil.which("helm"), reason="needs helm: make test-helm")


def run_helm(*arguments: str, fails: bool = False) -> str:
    """Runs helm; returns its output, or with `fails` its error."""
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


@cache
def _rendered(name: str | Path, settings: tuple[tuple[str, str], ...]) -> list[Any]:
    file = ["-f", str(EXAMPLES / name)] if name else []
    words = [word for setting in settings for word in ("--set", "=".join(setting))]
    said = run_helm("template", RELEASE, str(CHART), "--namespace", "default", *file, *words)
    return [made for made in yaml.safe_load_all(said) if made]


def render(name: str | Path = "", **settings: str) -> list[Any]:
    """Returns the objects of a release with the values of an example, another file, or the
    defaults. `settings`: for `--set`."""
    return _rendered(name, tuple(settings.items()))


def values(name: str) -> Any:
    """Returns the values of an example, or the defaults."""
    return yaml.safe_load((CHART / "values.yaml" if not name else EXAMPLES / name).read_text())


def pods(name: str = "") -> dict[str, Any]:
    """Returns component → pod template."""
    found = {}
    for made in render(name):
        template = made if made["kind"] == "Pod" else made.get("spec", {}).get("template")
        if template:
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            assert component not in found
            found[component] = template
    return found


def ports_of(container: Any) -> dict[str, int]:
    """Returns port name → number."""
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def config_of(component: str, pod: Any) -> Any:
    """Parses the container's arguments and variables with the role's own parser."""
    (made,) = pod["spec"]["containers"]
    known = {"POD_IP": "10.1.2.3", "POD_NAME": "a-0", "NODE_NAME": "b"}
    environ = {}
    for variable in made["env"]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            environ[variable["name"]] = "0123456789abcdef0123456789abcdef"
        elif "fieldRef" in source:
            environ[variable["name"]] = known[variable["name"]]
        else:
            environ[variable["name"]] = variable["value"]
    command, *flags = [
        re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], word) for word in made["args"]
    ]
    assert command == component
    return parse(CONFIGS[component], prog=f"pdserve {command}", argv=flags, environ=environ)


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def shown() -> list[Any]:
    """Returns the YAML documents in docs/kubernetes.md."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    return [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)]


def policies(name: str = "") -> dict[str, Any]:
    found = [each for each in render(name) if each["kind"] == "NetworkPolicy"]
    key = "app.kubernetes.io/component"
    return {each["spec"]["podSelector"]["matchLabels"][key]: each["spec"] for each in found}


def allowed(name: str, source: str, target: str, port: int) -> bool:
    """Returns whether the policies let `source` (or "stranger") call a port of `target`."""
    spec, labels = policies(name), {c: p["metadata"]["labels"] for c, p in pods(name).items()}

    def fits(rules: Sequence[Any], peers: str, other: str) -> bool:
        return any(
            any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"]
                if p.get("protocol", "TCP") == "TCP")
            and (peers not in rule or any(reaches(peer, other) for peer in rule[peers]))
            for rule in rules
        )  # fmt: skip

    def reaches(peer: Any, other: str) -> bool:
        pod = peer.get("podSelector")
        return "namespaceSelector" not in peer and other in labels and pod is not None and selects(
            pod["matchLabels"], labels[other])  # fmt: skip

    leaves = source not in spec or fits(spec[source]["egress"], "to", target)
    return leaves and fits(spec[target]["ingress"], "from", source)
