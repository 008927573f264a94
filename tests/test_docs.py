"""The pages say what the code says."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paths import ROOT
from pdserve.common.config.options import options
from pdserve.common.config.sources import ROLE_CONFIGS
from pdserve.common.obs.metrics import RouterMetrics
from shown import READERS, SHELLS, blocks, check_code, check_data, inline_commands
from typed import Wrong, check, commands

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md")),
    *(ROOT / name for name in ("tests/models/README.md", "examples/connector_file/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
SOURCES = ("common", "kv_transfer", "prefill_node", "decode_node", "router", "pdserve")
OTHERS = ("proto", "tests", "benchmarks", "examples", "docs", "compose")
# What follows class, def, message …, is assigned to, or is an error's code.
DEFINED = re.compile(
    r"""\b(?:class|def|message|service|rpc|enum) +(\w+)|\bself\.(\w+)|^ *(\w+) *[:=]|"(\w+)\"""",
    re.M,
)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


GENERATED = ["operate.md", "internals.md", "clients.md", "cli.md", "troubleshooting.md"]


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATED)
def test_generated_parts_are_up_to_date(generate: ModuleType, name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert "<!-- begin" in page
    assert generate.rewrite(page) == page, "run: python docs/generate.py"


def test_every_flag_and_metric_is_in_operate() -> None:
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    flags = {option.flag for config in ROLE_CONFIGS for option in options(config())}
    metrics = {metric.name for metric in RouterMetrics().registry.collect()}
    assert [name for name in sorted(flags | metrics) if f"`{name}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(path), f"{page.name}: {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    """Heading anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


# ---- names, so that nobody renames a file, a class or a test and leaves the pages behind ----


@pytest.fixture(scope="module")
def files() -> set[str]:
    """All of this repository, as paths from its root."""
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*") if path.is_file()}
    for folder in (*SOURCES, *OTHERS):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(path.relative_to(ROOT).as_posix())
    return found


@pytest.fixture(scope="module")
def code(files: set[str]) -> dict[str, str]:
    """Python and protobuf files by path."""
    return {name: (ROOT / name).read_text() for name in files if name.endswith((".py", ".proto"))}


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_paths_in_the_pages_exist(page: Path, files: set[str]) -> None:
    """Words in backticks that look like files, folders or tests of this repository; a file's name
    alone is enough where a page has said which folder it speaks of."""
    words = re.findall(r"`([\w./-]+(?:::\w+)?)`", page.read_text(encoding="utf-8"))
    assert [word for word in words if not _exists(word, files)] == []


def _exists(word: str, files: set[str]) -> bool:
    path, _, test = word.partition("::")
    if test:
        return path in files and f"def {test}(" in (ROOT / path).read_text()
    if path.partition("/")[0] in (*SOURCES, *OTHERS) and "/" in path:
        return (ROOT / path).exists()
    if re.fullmatch(r"(?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|proto)", path):
        return any(f"/{name}".endswith(f"/{path}") for name in files)
    return True


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_modules_in_the_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\bpdserve(?:\.[a-z_0-9]+)+(?=[`:, ;]|$)", text, re.M):
        package = name.split(".")[1]
        if package in SOURCES:  # not an entry point's group, nor a host's name
            path = ROOT.joinpath(*name.split(".")[1:])
            assert path.is_dir() or path.with_suffix(".py").is_file(), name


@pytest.mark.parametrize("name", ["internals.md", "where-do-i-add.md", "write-a-connector.md"])
def test_names_in_the_pages_are_in_the_code(name: str, code: dict[str, str]) -> None:
    """Classes, their methods and constants, in backticks or in a picture."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```(.*?)```", page, re.DOTALL)
    pictures = " ".join(block for block in blocks if block.startswith("\n"))  # not of a language
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    words = re.findall(r"`([A-Z]\w+(?:\.\w+)*)(?:\(.*?\))?`", text)
    words += re.findall(r"\b[A-Z]\w+\.\w+|\b[A-Z]+[a-z]+[A-Z]\w+", pictures)
    known = {"".join(found) for text in code.values() for found in DEFINED.findall(text)}
    assert [w for w in words if not known.issuperset(w.split("."))] == []
    threads = re.findall(r"\bkv-\w+", pictures)
    assert [t for t in threads if not any(f'"{t}"' in text for text in code.values())] == []


def test_files_named_in_the_code_exist(files: set[str]) -> None:
    """`name.py` in comments and docstrings of the product."""
    wrong = [
        f"{name}: {word}"
        for name in sorted(files)
        if name.startswith(SOURCES) and name.endswith(".py")
        for word in re.findall(r"`([\w./-]+\.(?:py|proto|md))`", (ROOT / name).read_text())
        if not (ROOT / word).is_file()
        and not any(f"/{each}".endswith(f"/{word}") for each in files)
    ]
    assert wrong == []


def test_every_helper_of_the_tests_is_on_their_page() -> None:
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    names = {path.stem for path in (ROOT / "tests" / "helpers").iterdir()} - {"__pycache__"}
    assert [name for name in sorted(names) if not re.search(rf"`{name}/?`", page)] == []


# ---- what a reader in trouble looks up ----

TROUBLES = ROOT / "docs" / "troubleshooting.md"
CODE = re.compile(r"[A-Z]{2,}(?:_[A-Z]+)*")


@pytest.fixture(scope="module")
def trees(code: dict[str, str]) -> list[ast.AST]:
    """The product's nodes of syntax."""
    product = [text for name, text in code.items() if name.startswith(SOURCES)]
    return [node for text in product for node in ast.walk(ast.parse(text))]


def test_every_error_code_is_explained_and_no_other(trees: list[ast.AST]) -> None:
    headings = re.findall(r"^### (.+)$", TROUBLES.read_text(encoding="utf-8"), re.M)
    explained = [code for heading in headings for code in heading.split(", ")]
    assert len(explained) == len(set(explained))
    values = [node.value for node in trees if _names_a_code(node)]
    raised = {word for value in values if value is not None for word in _words_of(value)}
    assert {"POISON_REQUEST", "DRAINING", "BAD_CONFIG", "RPC_FAILED"} <= raised
    assert sorted(raised.difference(explained)) == []
    anywhere = {word for node in trees for word in _words_of(node, deep=False)}
    assert sorted(set(explained) - anywhere) == []


def _names_a_code(node: ast.AST) -> bool:
    """`code=…` of a call, `code = …` and `default_code = …`."""
    names: list[str | None] = []
    if isinstance(node, ast.keyword):
        names = [node.arg]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
    return bool({"code", "default_code"}.intersection(names))


def _words_of(node: ast.AST, deep: bool = True) -> list[str]:
    """The strings in it that look like codes."""
    nodes = ast.walk(node) if deep else [node]
    texts = [each.value for each in nodes if isinstance(each, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and CODE.fullmatch(text)]


def test_sentences_to_look_up_are_said(trees: list[ast.AST]) -> None:
    """The first column of the tables of troubleshooting, `…` for what varies."""
    said = [text for node in trees if (text := _sentence(node))]
    page = TROUBLES.read_text(encoding="utf-8")
    tables = re.findall(r"<!-- sentences -->(.*?)<!-- end sentences -->", page, re.S)
    shown = re.findall(r"^\| `([^`]+)` \|", "".join(tables), re.M)
    assert len(shown) > 20
    assert [each for each in shown if not any(each in text for text in said)] == []


def _sentence(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "…" for each in node.values]
        return "".join(map(str, parts))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


# ---- what is shown, so that it does what the page says ----


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_shown_commands_are_taken(page: Path) -> None:
    """By parsers of flags, the Makefile, routes and the schemas of bodies."""
    shown = [(block.place, block.text) for block in blocks(page) if block.language in SHELLS]
    shown += inline_commands(page)
    assert [wrong for place, text in shown for wrong in _wrong(check, commands(text), place)] == []


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_shown_code_and_data_are_what_they_say(page: Path) -> None:
    shown = list(blocks(page))
    languages = {"", "python", *SHELLS, *READERS}
    assert [block.place for block in shown if block.language not in languages] == []
    code = [block for block in shown if block.language == "python"]
    data = [block for block in shown if block.language in READERS]
    assert [*_wrong(check_code, code), *_wrong(check_data, data)] == []


def _wrong(look: Callable[[Any], None], shown: Iterable[Any], place: str = "") -> list[str]:
    found = []
    for each in shown:
        try:
            look(each)
        except Wrong as wrong:
            found.append(f"{place or each.place}: {wrong}")
    return found


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pdserve up --prefill 1 \\\n  --max-model-len 10", ""),
        ("cd x && pdserve up --prefil 1 | head", "did you mean --prefill"),
        ("pdserve up --max-num-seqs none", "not a whole number"),
        ("pdserve up --max-num-seqs 0", "less than 1"),
        ("pdserve sing", "no command sing"),
        ("pdserve chat --loud", "unknown option --loud"),
        ("pdserve bench serve --request-rate fast", "request-rate"),
        ("PDSERVE_PREFIL=1 pdserve up --both 1", "unknown variable"),
        ("make demo DEMO_ARGS=x  # a comment's end", ""),
        ("make soup", "the Makefile has no soup"),
        ("python benchmarks/peers.py --slow", "--slow"),
        ("python benchmarks/nothing.py", "there is no benchmarks/nothing.py"),
        ("pip install '.[everything]'", "no extra everything"),
        ("curl http://127.0.0.1:8000/v1/modles", "no GET /v1/modles"),
        ('curl http://h:1/v1/completions -d \'{\n"prompt": "x"}\'', ""),
        ('curl http://h:1/v1/completions -d \'{"promt": "x"}\'', "prompt"),
        ('curl http://h:1/v1/completions -d \'{"prompt": "x", "tmperature": 1}\'', "tmperature"),
        ('grpcurl -d \'{"txt": "x"}\' h:1 pdserve.v1.Inference/Generate', "txt"),
        ("docker compose -f compose/none.yml up", "no compose/none.yml"),
        ("whistle", "nobody checks whistle"),
        ("pdserve chat -q 'open", "not closed"),
    ],
)
def test_the_checks_find_what_is_wrong(text: str, wrong: str) -> None:
    try:
        found = " ".join(_wrong(check, commands(text), "here"))
    except Wrong as error:
        found = str(error)
    assert wrong in found and bool(wrong) == bool(found)
