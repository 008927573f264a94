"""The pages as a site: mkdocs builds it without a warning, and a reader needs no other host."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from paths import ROOT

# test_docs.py follows links and anchors in every run; this takes seconds.
pytestmark = pytest.mark.slow
LOADED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"([^\"]+)|<link\b[^>]*\bhref=\"([^\"]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: it fails at a link or an anchor that leads nowhere, and at a page that the navigation
    lacks."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = relative(ROOT / "docs", "*.md") | {"index", "contributing", "changelog"}
    assert pages <= relative(site, "*.html")
    assert relative(site / "reference", "*.html") == relative(ROOT / "docs" / "reference", "*.md")


def relative(folder: Path, pattern: str) -> set[str]:
    """Paths of files, without their suffixes."""
    return {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob(pattern)}


def test_files_that_pages_name_are_there(site: Path) -> None:
    tour = (site / "tour.html").read_text(encoding="utf-8")
    assert 'href="source/router/requests/pipeline.py.html"' in tour
    path = site / "source" / "router" / "requests" / "pipeline.py.html"
    assert "Pipeline" in path.read_text(encoding="utf-8")
    security = (site / "reference" / "security.html").read_text(encoding="utf-8")
    assert 'href="../source/common/rpc/auth.py.html"' in security
    internals = (site / "internals.html").read_text(encoding="utf-8")
    assert 'href="source/proto/index.html"' in internals
    assert 'href="cluster.proto.html"' in (site / "source" / "proto" / "index.html").read_text()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    found = {
        next(filter(None, match))
        for page in pages
        for match in LOADED.findall(page.read_text(encoding="utf-8"))
    }
    assert any(target.endswith(".js") for target in found)
    assert [target for target in found if re.match(r"(?:https?:)?//", target)] == []
    assert "fonts.g" not in (site / "index.html").read_text(encoding="utf-8")


def test_an_error_code_is_found(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"] for entry in index["docs"]}
    assert "reference/errors.html#lease_expired" in places
    assert not any(place.startswith("source/router") for place in places)  # code is not searched


def test_tables_are_tables(site: Path) -> None:
    """mkdocs wants an empty line before lists and tables, GitHub does not."""
    begun = re.compile(r"<p>(?:(?!</p>).)*?\n\s*(?:\* |- |\||\d+\. )", re.S)
    pages = [*site.glob("*.html"), *site.glob("reference/*.html")]
    assert [page.name for page in pages if begun.search(page.read_text(encoding="utf-8"))] == []
