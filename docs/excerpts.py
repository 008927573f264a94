"""Excerpts of the code, for the tour."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def excerpt(symbol: str) -> Iterator[str]:
    """Yields a definition as its file has it, with a link to the file. Of a long docstring only the
    first paragraph is shown. Raises LookupError: there is no such file or definition."""
    module, _, name = symbol.partition(":")
    path = Path(*module.split(".")).with_suffix(".py")
    if not (ROOT / path).is_file():
        raise LookupError(f"a page shows {symbol}, and there is no {path}")
    source = (ROOT / path).read_text(encoding="utf-8")
    node = _definition(ast.parse(source), name, symbol)
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    assert node.end_lineno is not None
    lines = _with_short_docstring(node, source.splitlines())
    shown = [line for line in lines[first - 1 : node.end_lineno] if line is not None]
    indent = len(shown[0]) - len(shown[0].lstrip())
    yield f"[`{path.as_posix()}`](../{path.as_posix()}), `{name}`\n"
    yield "```python"
    yield from (line[indent:] for line in shown)
    yield "```"


def _definition(tree: ast.AST, name: str, symbol: str) -> ast.stmt:
    for part in name.split("."):
        found = [node for node in getattr(tree, "body", ()) if part in _names(node)]
        if not found:
            raise LookupError(f"a page shows {symbol}, and the code has no {part} there")
        tree = found[0]
    assert isinstance(tree, ast.stmt)
    return tree


def _names(node: ast.stmt) -> list[str]:
    """Returns the names that a statement defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _with_short_docstring(node: ast.stmt, lines: list[str]) -> list[str | None]:
    """Returns the lines of a file; None: a left out line of the docstring."""
    shown: list[str | None] = [*lines]
    body = getattr(node, "body", None)
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        start, end = body[0].lineno, body[0].end_lineno or body[0].lineno
        blank = next((i for i in range(start, end) if not lines[i].strip()), None)
        if blank is not None:
            shown[blank - 1] = f'{lines[blank - 1]}"""'
            shown[blank:end] = [None] * (end - blank)
    return shown
