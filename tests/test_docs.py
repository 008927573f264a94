"""The pages are true: links lead somewhere, files, commands, flags and metrics exist, tables and
excerpts are those of the code, and every error code is explained."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paths import ROOT
from pdserve.cli.models import known_models
from pdserve.common.config.options import options
from pdserve.common.config.simulate import CalibrateConfig, SimulateConfig
from pdserve.common.config.sources import ROLE_CONFIGS
from pdserve.common.core.host import loading
from shown import READERS, SHELLS, blocks, check_code, check_data, inline_commands
from typed import Wrong, check, commands

DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md")),
    *(ROOT / name for name in ("tests/models/README.md", "examples/connector_file/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
SOURCES = ("common", "kv_transfer", "prefill_node", "decode_node", "router", "pdserve")
OTHERS = ("proto", "tests", "benchmarks", "examples", "docs", "compose")
WITH_CODE = (*SOURCES, "proto", "tests", "benchmarks", "docs")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def files() -> frozenset[str]:
    """All of this repository, as paths from its root."""
    paths = [*ROOT.glob("*"), *(path for name in (*SOURCES, *OTHERS) for path in walk(name))]
    return frozenset(path.relative_to(ROOT).as_posix() for path in paths if path.is_file())


def walk(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]


@cache
def trees() -> tuple[ast.AST, ...]:
    """The product's nodes of syntax."""
    names = [name for name in files() if name.startswith(SOURCES) and name.endswith(".py")]
    with loading():  # a million objects
        return tuple(node for name in names for node in ast.walk(ast.parse(text_of(ROOT / name))))


# ---- what is generated ----


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_and_excerpts_are_up_to_date(generate: ModuleType) -> None:
    found = {
        page.relative_to(DOCS).as_posix(): page.read_text("utf-8") for page in generate.pages()
    }
    assert {
        "tour.md",
        "reference/hand-off.md",
        "reference/options.md",
        "reference/errors.md",
    } <= set(found)
    stale = [name for name, page in found.items() if generate.rewrite(page) != page]
    assert stale == [], "run: python docs/generate.py"


def test_an_excerpt_is_the_code(generate: ModuleType) -> None:
    link, *shown = "\n".join(generate.excerpt("docs.excerpts:excerpt")).split("\n")
    assert link == "[`docs/excerpts.py`](../docs/excerpts.py), `excerpt`"
    assert "\n".join(shown[2:-1]) in text_of(DOCS / "excerpts.py")
    assert "paragraph is shown." in "\n".join(shown)
    with pytest.raises(LookupError, match=r"docs\.excerpts:nothing"):
        "".join(generate.excerpt("docs.excerpts:nothing"))


def test_the_readme_counts_the_models() -> None:
    results = [row["result"] for row in known_models().values()]
    counts = f"Of its {len(results)} model types, {results.count('exact')} give exactly its tokens"
    assert counts in text_of(ROOT / "README.md")


# ---- what is linked and named ----


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(text_of(page)):
        if target.startswith("http"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_the_navigation() -> None:
    docs, navigation = ROOT / "docs", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.relative_to(docs) for path in docs.rglob("*.md")]
    assert [str(page) for page in pages if f" {page}\n" not in navigation] == []


@cache
def anchors(page: Path) -> frozenset[str]:
    """Heading anchors, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings)


@every_page
def test_paths_exist(page: Path) -> None:
    """Words in backticks that look like files, folders or tests of this repository, or like modules
    of pdserve. A file's name alone is enough where a page has said which folder it means."""
    text = text_of(page)
    words = re.findall(r"`([\w./-]+(?:::\w+)?)`", text)
    assert [word for word in words if not exists(word)] == []
    for name in re.findall(r"\bpdserve(?:\.[a-z_0-9]+)+(?=[`:, ;]|$)", text, re.M):
        if name.split(".")[1] in SOURCES:  # not an entry point's group, nor a host's name
            path = ROOT.joinpath(*name.split(".")[1:])
            assert path.is_dir() or path.with_suffix(".py").is_file(), name


def exists(word: str) -> bool:
    path, _, test = word.partition("::")
    if test:
        return path in files() and f"def {test}(" in text_of(ROOT / path)
    if path.partition("/")[0] in (*SOURCES, *OTHERS) and "/" in path:
        return (ROOT / path).exists()
    if re.fullmatch(r"(?:[a-z_0-9]+/)*[a-z_0-9]+\.(?:py|proto)", path):
        return any(f"/{name}".endswith(f"/{path}") for name in files())
    return True


@pytest.mark.parametrize("page", ["tour", "where-do-i-add", "internals", "concepts"])
def test_names_of_code_exist(page: str) -> None:
    """Each `name`, `Class.name` or `module.name` in the guides to the code occurs in the code."""
    prose = re.sub(r"```.*?```", "", text_of(DOCS / f"{page}.md"), flags=re.S)
    names = set(re.findall(r"`([A-Za-z_][\w.]*)`", prose))
    assert names
    assert not [name for name in sorted(names) if not words().issuperset(name.split("."))]


@cache
def words() -> set[str]:
    suffixes = (".py", ".proto", ".h", ".cpp")
    code = [path for path in files() if path.endswith(suffixes) and path.startswith(WITH_CODE)]
    return {word for path in code for word in re.findall(r"\w+", text_of(ROOT / path))}


def test_every_flag_is_in_the_reference() -> None:
    flags = {option.flag for config in ROLE_CONFIGS for option in options(config())}
    page = text_of(DOCS / "reference" / "options.md")
    assert [flag for flag in sorted(flags) if f"`{flag}`" not in page] == []


@every_page
def test_flags_in_sentences_exist(page: Path) -> None:
    if page.name in ("CHANGELOG.md", "from-vllm.md"):  # old ones; another program's
        return
    named = set(re.findall(r"`(--[a-z][a-z0-9-]+)", text_of(page))) - OF_OTHERS
    assert sorted(named - flags()) == []


OF_OTHERS = {"--scale", "--wait", "--alias"}  # of docker


@cache
def flags() -> frozenset[str]:
    """All flags of the roles and of what has options alike, and those that a program here names."""
    configs = (*ROLE_CONFIGS, SimulateConfig, CalibrateConfig)
    roles = {option.flag for config in configs for option in options(config())}
    names = [name for name in files() if name.endswith((".py", "Makefile"))]
    named = {
        flag for name in names for flag in re.findall(r"--[a-z][a-z0-9-]+", text_of(ROOT / name))
    }
    return frozenset(roles | {f"--no-{flag[2:]}" for flag in roles} | named)


@every_page
def test_metrics_exist(page: Path) -> None:
    known = set(re.findall(r"`(pdserve_\w+)`", text_of(DOCS / "reference" / "metrics.md")))
    named = re.findall(r"`(pdserve_\w+)(?:\{\w+\})?`", text_of(page))
    families = {name.removesuffix("_total") for name in known} | known
    missing = [name for name in named if name not in families and name not in packages()]
    assert page.name == "CHANGELOG.md" or missing == []


@cache
def packages() -> frozenset[str]:
    return frozenset(path.name for path in walk("examples") if path.is_dir())


# ---- what a reader in trouble looks up ----

TROUBLES = DOCS / "troubleshooting.md"
CODE = re.compile(r"[A-Z]{2,}(?:_[A-Z]+)*")


def test_every_error_code_is_explained_and_no_other() -> None:
    headings = re.findall(r"^### (.+)$", text_of(DOCS / "reference" / "errors.md"), re.M)
    explained = [code for heading in headings for code in heading.split(", ")]
    assert len(explained) == len(set(explained))
    values = [node.value for node in trees() if names_a_code(node)]
    raised = {word for value in values if value is not None for word in words_of(value)}
    assert {"POISON_REQUEST", "DRAINING", "BAD_CONFIG", "RPC_FAILED"} <= raised
    assert sorted(raised.difference(explained)) == []
    anywhere = {word for node in trees() for word in words_of(node, deep=False)}
    assert sorted(set(explained) - anywhere) == []


def names_a_code(node: ast.AST) -> bool:
    """`code=…` of a call, `code = …` and `default_code = …`."""
    names: list[str | None] = []
    if isinstance(node, ast.keyword):
        names = [node.arg]
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
    return bool({"code", "default_code"}.intersection(names))


def words_of(node: ast.AST, deep: bool = True) -> list[str]:
    """The strings in it that look like codes."""
    nodes = ast.walk(node) if deep else [node]
    texts = [each.value for each in nodes if isinstance(each, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and CODE.fullmatch(text)]


def test_sentences_to_look_up_are_said() -> None:
    """The first column of the tables of troubleshooting, `…` for what varies."""
    said = [text for node in trees() if (text := sentence(node))]
    tables = re.findall(r"<!-- sentences -->(.*?)<!-- end sentences -->", text_of(TROUBLES), re.S)
    shown = re.findall(r"^\| `([^`]+)` \|", "".join(tables), re.M)
    assert len(shown) > 20
    assert [each for each in shown if not any(each in text for text in said)] == []


def sentence(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        parts = [each.value if isinstance(each, ast.Constant) else "…" for each in node.values]
        return "".join(map(str, parts))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


# ---- what is shown ----


@every_page
def test_shown_commands_are_taken(page: Path) -> None:
    """Parsers of flags, the Makefile, routes and schemas of bodies take them."""
    shown = [(block.place, block.text) for block in blocks(page) if block.language in SHELLS]
    shown += inline_commands(page)
    assert [each for place, text in shown for each in wrong(check, commands(text), place)] == []


@every_page
def test_shown_code_and_data_are_what_they_say(page: Path) -> None:
    shown = list(blocks(page))
    languages = {"", "python", *SHELLS, *READERS}
    assert [block.place for block in shown if block.language not in languages] == []
    code = [block for block in shown if block.language == "python"]
    data = [block for block in shown if block.language in READERS]
    assert [*wrong(check_code, code), *wrong(check_data, data)] == []


def wrong(look: Callable[[Any], None], shown: Iterable[Any], place: str = "") -> list[str]:
    found = []
    for each in shown:
        try:
            look(each)
        except Wrong as error:
            found.append(f"{place or each.place}: {error}")
    return found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("pdserve up --prefill 1 \\\n  --max-model-len 10", ""),
        ("cd x && pdserve up --prefil 1 | head", "did you mean --prefill"),
        ("pdserve up --max-num-seqs none", "not a whole number"),
        ("pdserve sing", "no command sing"),
        ("pdserve chat --loud", "unknown option --loud"),
        ("PDSERVE_PREFIL=1 pdserve up --both 1", "unknown variable"),
        ("make soup", "the Makefile has no soup"),
        ("python benchmarks/peers.py --slow", "--slow"),
        ("pip install '.[everything]'", "no extra everything"),
        ("curl http://127.0.0.1:8000/v1/modles", "no GET /v1/modles"),
        ('curl http://h:1/v1/completions -d \'{"prompt": "x", "tmperature": 1}\'', "tmperature"),
        ('grpcurl -d \'{"txt": "x"}\' h:1 pdserve.v1.Inference/Generate', "txt"),
        ("docker compose -f compose/none.yml up", "no compose/none.yml"),
        ("pdserve chat -q 'open", "not closed"),
    ],
)
def test_the_checks_find_what_is_wrong(text: str, fault: str) -> None:
    try:
        found = " ".join(wrong(check, commands(text), "here"))
    except Wrong as error:
        found = str(error)
    assert fault in found and bool(fault) == bool(found)
