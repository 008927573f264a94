"""Hooks of mkdocs. The pages are written to be read in a checkout and on GitHub: files beside docs/
to which they link become pages, too, and headings get the anchors that GitHub gives them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Pages from beside docs/ that are in the navigation.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES = {".py": "python", ".proto": "protobuf", ".cpp": "cpp", ".h": "cpp", ".yml": "yaml"}
_LINK = re.compile(r"\]\(([^)#\s:]+)((?:#[^)\s]+)?)\)")
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
_COMMENT = re.compile(r"^<!--.*?-->$", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def slug(title: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is linked, and what that links to if it is a page or a folder."""
    seen = {f"docs/{file.src_uri}" for file in files}
    todo = [*MOVED, *(origin for origin in seen if origin.endswith(".md"))]
    while todo:
        origin = todo.pop()
        text = text_of(origin)
        if origin not in seen:
            seen.add(origin)
            files.append(File.generated(config, place(origin), content=text))
        if has_links(origin):
            todo += [target for target in targets(origin, text) if target not in seen]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    origin = origin_of(page.file.src_uri)
    if not has_links(origin):
        return markdown
    parts = _FENCED.split(markdown)
    parts[::2] = [rewrite(text, origin, page.file.src_uri) for text in parts[::2]]
    return "".join(parts)


def has_links(origin: str) -> bool:
    """Returns whether links of the file are rewritten: not if it is shown as code."""
    return origin.endswith(".md") or (ROOT / origin).is_dir()


def rewrite(text: str, origin: str, here: str) -> str:
    """Links as the site has them. Comments become empty lines: a table begins after one."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.relpath(place(resolve(origin, found[1])), posixpath.dirname(here))
        return f"]({target}{found[2]})"

    return _LINK.sub(link, _COMMENT.sub("\n", text))


def targets(origin: str, text: str) -> set[str]:
    """Returns the paths that a page or a folder links to."""
    text = "".join(_FENCED.split(text)[::2])
    return {resolve(origin, found[1]) for found in _LINK.finditer(text)}


def resolve(origin: str, target: str) -> str:
    """Returns a link as a path from the checkout's root."""
    folder = origin if (ROOT / origin).is_dir() else posixpath.dirname(origin)
    path = posixpath.normpath(posixpath.join(folder, target))
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{origin} links to {target}, which is not there")
    return path


def place(origin: str) -> str:
    """Returns the place of a path of the checkout among the site's sources."""
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    if (ROOT / origin).is_dir():
        return f"source/{origin}/index.md"
    return MOVED.get(origin) or f"source/{origin.removesuffix('.md')}.md"


def origin_of(src_uri: str) -> str:
    for origin, moved in MOVED.items():
        if src_uri == moved:
            return origin
    if not src_uri.startswith("source/"):
        return f"docs/{src_uri}"
    path = src_uri.removeprefix("source/").removesuffix(".md")
    if path.endswith("/index") and not (ROOT / f"{path}.md").exists():
        return path.removesuffix("/index")
    return path if (ROOT / path).exists() else f"{path}.md"


def text_of(origin: str) -> str:
    """Returns a page as it is, a folder as a list of its files, a file as a block of code."""
    path = ROOT / origin
    if origin.endswith(".md"):
        return path.read_text(encoding="utf-8")
    head = f"---\ntitle: {origin}\nsearch: {{exclude: true}}\n---\n\n# {origin}\n\n"
    if path.is_dir():
        names = sorted(each.name for each in path.iterdir() if each.is_file())
        return head + "".join(f"* [{name}]({name})\n" for name in names)
    language = LANGUAGES.get(path.suffix, "text")
    return f"{head}````{language}\n{path.read_text(encoding='utf-8')}````\n"
