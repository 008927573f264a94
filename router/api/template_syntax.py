"""Reads a chat template's syntax for what could make a small conversation costly."""

from __future__ import annotations

from jinja2 import Environment, TemplateError, nodes

_MAX_NUMBER = 1024  # in `range(…)`
_MAX_SOURCE = 2**18  # characters
# Filters whose cost and result are a small multiple of their input's size.
_FILTERS = frozenset({
    "abs", "attr", "bool", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
    "first", "float", "int", "items", "join", "last", "length", "list", "lower", "lstrip", "map",
    "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "rstrip", "safe",
    "select", "selectattr", "sort", "string", "strip", "title", "tojson", "trim", "unique",
    "upper",
})  # fmt: skip
_SIZED = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})
"""Methods of a string that make it as long as a number says."""


def is_plain(template: str) -> bool:
    """Returns whether the template can make neither long texts nor many rounds out of numbers: no
    products, no filters with a size, no large ranges, no recursive loops."""
    if len(template) > _MAX_SOURCE:
        return False
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except (TemplateError, RecursionError):
        return False
    return not any(map(_is_costly, tree.find_all(nodes.Node)))


def _is_costly(node: nodes.Node) -> bool:
    match node:
        case nodes.Mul() | nodes.Pow() | nodes.For(recursive=True):
            return True
        case nodes.Mod(right=right):  # of a text it is a format
            return not (isinstance(right, nodes.Const) and isinstance(right.value, int))
        case nodes.Filter(name=name):
            return name not in _FILTERS
        case nodes.Call(node=nodes.Name(name="range"), args=given):
            numbers = [each.value for arg in given for each in _constants(arg)]
            return any(isinstance(value, int) and value > _MAX_NUMBER for value in numbers)
        case nodes.Getattr(attr=name):
            return name in _SIZED
    return False


def _constants(node: nodes.Node) -> list[nodes.Const]:
    return [node] if isinstance(node, nodes.Const) else list(node.find_all(nodes.Const))
