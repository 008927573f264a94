"""A JSON schema from a client, which may be any JSON: its references and the keywords it uses.

Schemas that hold at once are a list of elements, which `flat` resolves:

    {"$ref": …, "allOf": […]} ──▶ the assertions of each schema, and the choices between branches
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urljoin

from pdserve.common.core.structured import NO_SCHEMAS, SCHEMAS_BY_NAME
from pdserve.common.text import json_numbers, json_strings

TYPES = ("null", "boolean", "number", "string", "array", "object")
_OWN = {
    "type", "const", "enum", *json_numbers.KEYWORDS, *json_strings.KEYWORDS,
    "items", "additionalItems", "prefixItems", "minItems", "maxItems",
    "properties", "additionalProperties", "patternProperties", "required",
    "minProperties", "maxProperties", "propertyNames",
}  # fmt: skip
_UNSUPPORTED = {
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies",
    "unevaluatedItems", "unevaluatedProperties", "contains", "minContains",
    "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_ALWAYS = {"uniqueItems": False}  # values that allow everything
_MAX_ELEMENTS = 2000  # schemas that hold at once

Kind = Literal["all", "own", "any", "one"]


@dataclass(frozen=True, slots=True)
class Element:
    """A schema, its own assertions alone, or a list of branches of which any, or one, holds.
    Two are equal if they are the same part of the document."""

    kind: Kind
    part: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Element) and self.kind == other.kind and self.part is other.part

    def __hash__(self) -> int:
        return hash((self.kind, id(self.part)))


class Document:
    """A schema's parts by reference, and their places for errors."""

    def __init__(self, root: Any) -> None:
        """Raises ValueError: it is neither an object nor a boolean."""
        if not isinstance(root, dict | bool):
            raise ValueError("a schema must be an object or a boolean")
        self._root = root
        self._paths: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._named: dict[str, Any] = {"": root}  # by URI
        self._desugared: dict[int, Element] = {}
        self._scan(root)

    def _scan(self, root: Any) -> None:
        pending = [("$", "", root, "schema")]
        while pending:
            path, base, value, kind = pending.pop()
            if isinstance(value, list):
                self._paths[id(value)] = path.removesuffix(".oneOf")[:200]
                steps = [(f"{path}[{i}]", base, each, kind) for i, each in enumerate(value)]
            elif isinstance(value, dict):
                base = self._name(base, value) if kind == "schema" else base
                self._paths[id(value)], self._bases[id(value)] = path[:200], base
                steps = [
                    (f"{path}.{key}", base, each, _kind(kind, key)) for key, each in value.items()
                ]
            else:
                continue
            pending += [step for step in reversed(steps) if isinstance(step[2], dict | list)]

    def _name(self, base: str, part: dict[str, Any]) -> str:
        """Adds the names of a schema. Returns its base URI."""
        if isinstance(given := part.get("$id"), str):
            base = urljoin(base, given).removesuffix("#")
            self._named.setdefault(base, part)
        if isinstance(given := part.get("$anchor"), str):
            self._named.setdefault(f"{base}#{given}", part)
        return base

    def at(self, part: Any) -> str:
        """Returns the place of a part, for an error's end."""
        path = self._paths.get(id(part))
        return f" (at {path})" if path else ""

    def target(self, part: dict[str, Any]) -> Any:
        """Returns the schema that a part's `$ref` names.

        Raises:
            ValueError: there is none in this document.
        """
        reference = part["$ref"]
        if not isinstance(reference, str):
            raise ValueError(f"$ref must be a string{self.at(part)}")
        base, _, fragment = reference.partition("#")
        uri = urljoin(self._bases.get(id(part), ""), base) if base else self._bases[id(part)]
        found = self._named.get(uri)
        if fragment and not fragment.startswith("/"):
            found = self._named.get(f"{uri}#{fragment}")
        for step in unquote(fragment).split("/")[1:] if fragment.startswith("/") else ():
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        if not isinstance(found, dict | bool):
            where = self.at(part)
            raise ValueError(f"$ref {reference[:200]} names no schema of this document{where}")
        return found

    def flat(self, elements: Sequence[Element]) -> tuple[Element, ...] | None:
        """Resolves elements that hold at once to their own assertions and choices, in the order of
        keywords; None: nothing satisfies them, for they are false or lead only to themselves.

        Raises:
            ValueError: a keyword is not supported.
        """
        found: dict[Element, None] = {}
        seen: set[Element] = set()
        entered: set[Element] = set()
        pending = [(True, each) for each in reversed(elements)]
        while pending:
            enter, each = pending.pop()
            if not enter:
                entered.discard(each)
            elif each.kind != "all":
                found[each] = None
            elif each.part is False or each in entered:
                return None
            elif each.part is not True and each not in seen:
                seen.add(each)
                entered.add(each)
                pending.append((False, each))
                pending += [(True, part) for part in reversed(list(self._parts(each.part)))]
            if len(seen) + len(found) > _MAX_ELEMENTS:
                raise ValueError(f"more than {_MAX_ELEMENTS} schemas hold at once")
        return tuple(found)

    def _parts(self, schema: Any) -> Iterator[Element]:
        if not isinstance(schema, dict):
            raise ValueError("a schema must be an object or a boolean")
        self._check(schema)
        own = False
        for keyword, value in schema.items():
            if keyword == "$ref":
                yield Element("all", self.target(schema))
            elif keyword in ("allOf", "anyOf", "oneOf"):
                if not isinstance(value, list) or not value:
                    raise ValueError(f"{keyword} must be a list of schemas{self.at(schema)}")
                if keyword == "allOf":
                    yield from (Element("all", each) for each in value)
                else:
                    yield Element("any" if keyword == "anyOf" else "one", value)
            elif keyword in ("const", "enum") and (choice := self._composite(schema, keyword)):
                yield choice
            elif keyword in _OWN and not own:
                own = True
                yield Element("own", schema)

    def _check(self, schema: dict[str, Any]) -> None:
        for keyword in sorted(schema.keys() & _UNSUPPORTED):
            if _ALWAYS.get(keyword, keyword) != schema[keyword]:
                raise ValueError(f"{keyword} is not supported{self.at(schema)}")
        given = schema.get("type", [])
        for each in given if isinstance(given, list) else [given]:
            if each not in TYPES and each != "integer":
                raise ValueError(f"Invalid type: {str(each)[:64]}{self.at(schema)}")
        if "enum" in schema and not isinstance(schema["enum"], list):
            raise ValueError(f"enum must be a list{self.at(schema)}")

    def _composite(self, schema: dict[str, Any], keyword: str) -> Element | None:
        """Returns lists and objects of `const` or `enum` as schemas; None: it has none."""
        value = schema[keyword]
        if not composite(schema, keyword):
            return None
        if id(value) not in self._desugared:
            if keyword == "const":
                self._desugared[id(value)] = Element("all", _desugared(value))
            else:
                branches = [{"const": each} for each in value]
                self._desugared[id(value)] = Element("any", branches)
        return self._desugared[id(value)]


def _kind(of: str, key: str) -> str:
    """Returns whether what a key has is a schema, a map of schemas, or data."""
    if of != "schema":
        return "schema" if of == "map" else of
    return "map" if key in SCHEMAS_BY_NAME else "data" if key in NO_SCHEMAS else "schema"


def _desugared(value: Any) -> dict[str, Any]:
    """Returns the schema of a list or an object alone."""
    if isinstance(value, dict):
        properties = {name: {"const": each} for name, each in value.items()}
        names = list(properties)
        closed = {"properties": properties, "required": names, "additionalProperties": False}
        return {"type": "object", **closed}
    items = [{"const": each} for each in value]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def composite(part: dict[str, Any], keyword: str) -> bool:
    """Returns whether `const` or `enum` has lists or objects, which `Document.flat` resolves."""
    value = part[keyword]
    return any(isinstance(e, dict | list) for e in ([value] if keyword == "const" else value))
