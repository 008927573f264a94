"""The chart's values: what the schema and the chart refuse, and what they say. What needs `helm` is
skipped where it is not on PATH: `make test-helm` fetches it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import pdserve
from chart import (
    CHART,
    EXAMPLES,
    OBSERVABILITY,
    RELEASE,
    every_file,
    needs_helm,
    run_helm,
    shown,
    values,
)
from paths import ROOT
from pdserve.demo_model.embedded import embedded_folder


@pytest.fixture(scope="module")
def schema() -> Any:
    loaded = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(loaded)
    return loaded


def complaints(schema: Any, given: Any) -> list[str]:
    found = jsonschema.Draft7Validator(schema).iter_errors(given)
    return [f"{'.'.join(map(str, each.path))}: {each.message}" for each in found]


@every_file
def test_values_are_what_the_schema_allows(schema: Any, name: str) -> None:
    assert complaints(schema, values(name)) == []


def test_the_schema_knows_all_values_and_no_others(schema: Any) -> None:
    def names(known: Any, given: Any, path: str = "") -> Iterator[str]:
        known = (
            schema["definitions"][known["$ref"].rpartition("/")[2]] if "$ref" in known else known
        )
        if properties := known.get("properties"):
            assert known.get("additionalProperties") is False, path
            assert properties.keys() - {"global"} == given.keys(), path
            for name in given:
                yield f"{path}{name}"
                yield from names(properties[name], given[name], f"{path}{name}.")

    assert "decode.autoscaling.target" in set(names(schema, values("")))


def test_values_of_the_page_are_allowed(schema: Any) -> None:
    given = [each for each in shown() if "kind" not in each]
    assert len(given) == 2 and [complaints(schema, each) for each in given] == [[], []]
    gpu = values("gpu.yaml")
    assert given[0] == gpu, "the one that the page installs"


BAD: list[tuple[Any, str]] = [
    ({"prefil": {"replicas": 2}}, "'prefil' was unexpected"),
    ({"prefill": {"replicas": "two"}}, "prefill.replicas: 'two' is not of type 'integer'"),
    ({"prefill": {"replicas": -1}}, "prefill.replicas: -1 is less than the minimum of 0"),
    ({"router": {"replicas": 0}}, "router.replicas: 0 is less than the minimum of 1"),
    ({"router": {"gpus": 1}}, "'gpus' was unexpected"),
    ({"decode": {"gpus": 1.5}}, "decode.gpus: 1.5 is not of type 'integer'"),
    ({"decode": {"autoscaling": {"target": 70}}}, "target: 70 is greater than the maximum of 1"),
    ({"model": {"path": "/data/Qwen3-8B"}}, "model.path: '/data/Qwen3-8B' does not match"),
    ({"model": {"volume": {"nfs": {}, "hostPath": {}}}}, "model.volume: "),
    ({"args": "--max-model-len=8192"}, "args: '--max-model-len=8192' is not of type 'array'"),
    ({"args": ["max-model-len=8192"]}, "args.0: 'max-model-len=8192' does not match"),
    ({"keys": {"secret": "No_Name"}}, "keys.secret: 'No_Name' does not match"),
    ({"sharedMemory": "1 GB"}, "sharedMemory: '1 GB' does not match"),
    ({"images": {"pullPolicy": "Sometimes"}}, "images.pullPolicy: 'Sometimes' is not one of"),
]


@pytest.mark.parametrize(("given", "says"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_a_value_that_cannot_be_is_named(schema: Any, given: Any, says: str) -> None:
    assert any(says in complaint for complaint in complaints(schema, given))


def test_an_example_is_short() -> None:
    lines = (EXAMPLES / "gpu.yaml").read_text().splitlines()
    assert len(lines) <= 30


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == pdserve.__version__
    names = (CHART / "templates" / "_names.tpl").read_text()
    assert f'default "{embedded_folder(Path("/models"))}"' in names


@pytest.mark.parametrize("name", ["rules.yml", "alerts.yml"])
def test_rules_are_those_of_compose(name: str) -> None:
    assert (CHART / "rules" / name).resolve() == OBSERVABILITY / name


def test_keda_queries_existing_metrics() -> None:
    text = (CHART / "templates" / "nodes.yaml").read_text()
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    table = page.partition("## Nodes")[2]
    named = re.findall(r'"(pdserve_\w+)"', text)
    assert len(named) == 2 and all(f"| `{name}` | gauge |" in table for name in named)


@needs_helm
@pytest.mark.parametrize(("given", "says"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_helm_refuses_a_value_that_cannot_be(given: Any, says: str, tmp_path: Path) -> None:
    (file := tmp_path / "values.yaml").write_text(json.dumps(given))
    said = run_helm("template", RELEASE, str(CHART), "-f", str(file), fails=True)
    assert "values don't meet the specifications of the schema" in said
    assert says.partition(":")[0].strip("'").partition(".0")[0].split("'")[0] in said


@needs_helm
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": {"path": "/models/Qwen"}}, "name the volume that has it in model.volume"),
        ({"model": {"volume": {"hostPath": {"path": "/m"}}}}, "model.path must name a folder of"),
        ({"decode": {"replicas": 0}}, "there must be prefill and decode nodes"),
        (
            {"decode": {"gpus": 2, "tensorParallelSize": 4}},
            "decode.tensorParallelSize is 4, and a node has 2 GPUs",
        ),
        ({"prefill": {"autoscaling": {"enabled": True}}}, "give its URL in prometheus"),
        (
            {"router": {"replicas": 9, "autoscaling": {"enabled": True}}},
            "router.autoscaling.maxReplicas is 4, fewer than router.replicas, which is 9",
        ),
        ({"args": ["--cluster-key=abc"]}, "--cluster-key does not belong in args"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_do_not_fit_together(given: Any, says: str, tmp_path: Path) -> None:
    (file := tmp_path / "values.yaml").write_text(json.dumps(given))
    assert says in run_helm("template", RELEASE, str(CHART), "-f", str(file), fails=True)
