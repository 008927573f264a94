"""The house rules: imports run downward, without cycles; the router needs no torch; the
generated stubs are what the sources generate."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from paths import ROOT
from pdserve.common.core.host import loading

PACKAGES = ("common", "kv_transfer", "prefill_node", "decode_node", "router")
RIDDLE = re.compile(r'"""\s*(?:Of|What|As|Those|Who)\b')  # how no docstring begins
OBSCURE = re.compile(r"\b(?:no[b]ody|who[e]ver)\b|\bdef test_(?:what|who|whose|those)_", re.I)
BARE_IMPORT = re.compile(rf"^\s*(?:from|import)\b.*(?<![\w.])(?:{'|'.join(PACKAGES)})\b", re.M)
FACE = (
    "cli",
    "client",
    "offline",
    "bench",
    "demo_model",
    "simulate",
)  # folders of `pdserve/` itself
SPLIT = ("common", "router")  # packages whose rooms have rules of their own

# Who may import whom, besides itself. What starts a role names it as a string and imports none.
ALLOWED = {
    "common.core": set(),
    "common.config": {"common.core"},
    "common.http": {"common.core"},
    "common.obs": {"common.core", "common.config", "common.http"},
    "common.rpc": {"common.core", "common.config", "common.obs"},
    "common.text": {"common.core"},
    "common.distributed": {"common.core", "common.config", "common.obs"},
    "common.model": {"common.core", "common.config", "common.distributed"},
    "common.planning": {"common.core", "common.config", "common.model"},
    "common.engine": {"common.core", "common.config", "common.distributed"},
    "common.worker": {
        "common.core", "common.config", "common.text", "common.distributed", "common.model",
        "common.planning", "common.engine",
    },
    "common.node": {
        "common.core", "common.config", "common.http", "common.obs", "common.rpc", "common.text",
        "common.distributed", "common.model", "common.planning", "common.engine", "common.worker",
    },
    "kv_transfer": {"common.core", "common.config", "common.rpc"},
    "prefill_node": {
        "common.core", "common.config", "common.rpc", "common.engine", "common.node",
        "common.worker", "kv_transfer",
    },
    "decode_node": {
        "common.core", "common.config", "common.rpc", "common.engine", "common.node",
        "kv_transfer",
    },
    # The router's rooms: doors (http, grpc) over what a request means (api) over how it is served
    # (requests) over what it is served by (cluster). The process (router) starts them all, so that
    # none of them imports it.
    "router.cluster": {"common.core", "common.config", "common.obs", "common.rpc", "common.text"},
    "router.requests": {
        "common.core", "common.config", "common.obs", "common.rpc", "common.text",
        "router.cluster",
    },
    "router.api": {
        "common.core", "common.config", "common.obs", "common.text", "router.cluster",
        "router.requests",
    },
    "router.http": {
        "common.core", "common.config", "common.http", "common.obs", "common.rpc", "common.text",
        "router.api", "router.cluster", "router.requests", "router.workers",
    },
    "router.workers": {"common.obs"},
    "router.grpc": {
        "common.core", "common.config", "common.obs", "common.rpc", "common.text",
        "router.api", "router.cluster", "router.requests",
    },
    "router": {
        "common.core", "common.config", "common.http", "common.obs", "common.rpc", "common.text",
        "router.api", "router.cluster", "router.grpc", "router.http", "router.requests",
        "router.workers",
    },
    "router.kit": {"common.core", "common.config", "router.cluster", "simulate"},
    # What users run and import.
    "demo_model": {"common.core", "common.config"},
    "client": {"common.core", "common.rpc"},
    "bench": {
        "common.core", "common.config", "common.distributed", "common.model", "common.planning",
        "common.engine", "common.worker", "client", "demo_model",
    },
    "cli": {
        "common.core", "common.config", "common.obs", "common.distributed", "common.planning",
        "client", "demo_model",
    },
    "offline": {"common.core", "common.config", "cli", "client"},
    "simulate": {
        "common.core", "common.config", "common.engine", "common.rpc", "router.cluster",
        "router.requests", "client", "cli", "offline",
    },
}  # fmt: skip


def area(module: str) -> str:
    """`common.core` for `pdserve.common.core.errors`, `router` for `pdserve.router.server`."""
    parts = module.split(".")[1:]
    whole = ".".join(parts[:2])
    return whole if parts[0] in SPLIT and whole in ALLOWED else parts[0]


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    folders = (*PACKAGES, *(f"pdserve/{name}" for name in FACE))
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    with loading():  # a million objects
        for path in paths:
            if "pb" not in path.parts:
                inside = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(("pdserve", *inside[inside[0] == "pdserve" :]))
                found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module, everywhere: bool = False) -> set[str]:
    """Modules a file imports when it is loaded (or `everywhere`: type checking, functions)."""
    names: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        is_guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if everywhere or not (is_guard or is_function):
            pending += ast.iter_child_nodes(node)
    return names


def test_imports_run_downward() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        for name in imports(tree, everywhere=True)
        if name.startswith("pdserve.")
        if area(name) != area(module) and area(name) not in ALLOWED.get(area(module), set())
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_the_api_room_imports_no_transport() -> None:
    """`router.api` imports neither HTTP's nor gRPC's libraries, nor protobuf messages. The rooms
    below it call nodes over gRPC."""
    transports = ("aiohttp", "grpc", "google.protobuf", "pdserve.common.http", "pdserve.common.rpc")
    wrong = [
        f"{module} imports {name}"
        for module, tree in modules().items()
        if area(module) == "router.api"
        for name in imports(tree, everywhere=True)
        if name.startswith(transports)
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_scheduling_stands_on_few_floors() -> None:
    def floors(room: str) -> int:
        return 1 + max(map(floors, ALLOWED[room]), default=0)

    assert floors("common.engine") <= 5


def test_no_import_uses_the_bare_name_of_a_source_folder() -> None:
    """`import common…` finds the folder when Python runs in the checkout, makes a second copy of
    every class, and fails once installed."""
    folders = [*PACKAGES, "tests", "docs", "benchmarks", "examples"]
    wrong = [
        f"{path.relative_to(ROOT)}: write pdserve.{name} instead of {name}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if BARE_IMPORT.search(text := path.read_text())  # few have a line that looks like one
        for name in imports(ast.parse(text), everywhere=True)
        if name.partition(".")[0] in PACKAGES
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_are_sentences() -> None:
    """They begin with a verb or their subject."""
    folders = [*PACKAGES, "pdserve", "tests", "docs", "benchmarks", "examples", "scripts"]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        f"{path.relative_to(ROOT)}: {documented.splitlines()[0]}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if RIDDLE.search(text := path.read_text())  # few have a string that looks like one
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds) and (documented := ast.get_docstring(node))
        if RIDDLE.match(f'"""{documented}')
    ]
    assert not wrong, "\n".join(wrong)


def test_names_and_sentences_are_plain() -> None:
    folders = [*PACKAGES, "pdserve", "tests", "docs", "benchmarks", "examples", "scripts"]
    paths = [path for each in folders for path in (ROOT / each).rglob("*.[pmch]*")]
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted(paths)
        if path.suffix in (".py", ".md", ".cpp", ".h") and OBSCURE.search(text := path.read_text())
        for line in text.splitlines()
        if OBSCURE.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles() -> None:
    known = modules()
    graph = {name: imports(tree) & known.keys() - {name} for name, tree in known.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


# Policy and what every process shares. The router is served without torch; the engine schedules
# without it; plans are made where there is none; a hand-off's control moves no tensor.
WITHOUT_TORCH = (
    "common/core", "common/config", "common/obs", "common/rpc", "common/text",
    "common/engine", "common/planning", "pdserve/client", "pdserve/offline", "router",
    "kv_transfer/control",
)  # fmt: skip


def test_policy_and_the_router_load_without_torch() -> None:
    names = [
        ".".join(("pdserve", *path.relative_to(ROOT).with_suffix("").parts)).replace(
            "pdserve.pdserve", "pdserve"
        )
        for room in WITHOUT_TORCH
        for path in sorted((ROOT / room).rglob("*.py"))
    ]
    code = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_nothing_executable_is_read() -> None:
    """No pickle and its kin anywhere in the product."""
    words = ("pickle", "marshal", "torch.load", "eval", "exec")
    calls = {call for word in words for call in (word, f"{word}.loads")}
    for module, tree in modules().items():
        called = {ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
        assert not called & calls, module
        assert not imports(tree, everywhere=True) & set(words), module


def test_types_are_known_to_msgspec_before_threads_need_them() -> None:
    """If several threads are the first to decode a type, msgspec (0.22) crashes the process, as
    ranks did whose peers all connected at once. A `Decoder` knows its type when it is made: with
    its module, or with what has it."""
    trees = [*modules().items()] + [
        (path.name, ast.parse(path.read_text())) for path in (ROOT / "examples").rglob("*.py")
    ]
    wrong = [
        f"{module}: make a Decoder once, instead of {ast.unparse(call)}"
        for module, tree in trees
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".decode")
        if any(keyword.arg == "type" for keyword in call.keywords)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_stubs_are_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "proto/generate.py", str(tmp_path)], check=True, cwd=ROOT)
    committed = ROOT / "common" / "rpc" / "pb"
    for path in sorted(tmp_path.iterdir()):
        fresh = (committed / path.name).read_text() == path.read_text()
        assert fresh, f"{path.name}: run `make proto`"
    generated = {path.name for path in tmp_path.iterdir()} | {"__init__.py"}
    assert {path.name for path in committed.glob("*.py*") if path.is_file()} == generated
