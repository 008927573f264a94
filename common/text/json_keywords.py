"""Reads the keywords of schemas that hold at once for a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.common.text import json_numbers, json_strings
from pdserve.common.text.json_schema import TYPES, Element, composite
from pdserve.common.text.json_shapes import Text


def types_of(schemas: Sequence[dict[str, Any]]) -> tuple[list[str], bool]:
    """Returns the types that all schemas allow, and whether numbers must be integers."""
    allowed, integer = list(TYPES), False
    for schema in schemas:
        if (given := schema.get("type")) is None:
            continue
        names = given if isinstance(given, list) else [given]
        integer |= "integer" in names and "number" not in names
        named = dict.fromkeys("number" if each == "integer" else each for each in names)
        allowed = [each for each in named if each in allowed]
    return allowed, integer


def _scalar(value: Any) -> tuple[str, Any]:
    """Returns the type of a value that is no list or object, and what is equal if it is."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean"), value
    if isinstance(value, str):
        return "string", value
    return "number", json_numbers.number_of(value, "a constant")


def values_of(schemas: Sequence[dict[str, Any]]) -> dict[tuple[str, Any], Any] | None:
    """Returns the values that `const` and `enum` of all schemas allow; None: they list none."""
    found: dict[tuple[str, Any], Any] | None = None
    for schema in schemas:
        for keyword in ("const", "enum"):
            if keyword in schema and not composite(schema, keyword):
                listed = schema["enum"] if keyword == "enum" else [schema["const"]]
                values = {_scalar(each): each for each in listed}
                found = values if found is None else {k: found[k] for k in found if k in values}
    return found


def _literal(
    kind: str, key: Any, value: Any, integer: bool, schemas: Sequence[dict[str, Any]]
) -> str | None:
    """Returns the terminal of a listed value; None: the schemas exclude it."""
    if kind == "string":
        return json_strings.quoted(value) if json_strings.allows(value, schemas) else None
    if kind == "number":
        if (numbers := json_numbers.range_of(schemas, integer)) is None or key not in numbers:
            return None
        return json_strings.literal(str(int(key)) if integer else json_numbers.literal(value))
    return json_strings.literal({None: "null", True: "true", False: "false"}[value])


def listed(
    values: dict[tuple[str, Any], Any],
    types: list[str],
    integer: bool,
    schemas: Sequence[dict[str, Any]],
) -> Iterator[Text]:
    """Yields the terminals of listed values, by type."""
    for kind in types:
        texts = {
            key: text
            for (its, key), value in values.items()
            if its == kind and (text := _literal(kind, key, value, integer, schemas)) is not None
        }
        if texts:
            yield Text(" | ".join(texts.values()), kind, frozenset(texts))


def text_of(kind: str, integer: bool, schemas: Sequence[dict[str, Any]]) -> str | None:
    """Returns the terminal of a type's values, or `%json`; None: there are none."""
    if kind == "string":
        return json_strings.string(schemas)
    if kind != "number":
        return '"null"' if kind == "null" else '"true" | "false"'
    if (numbers := json_numbers.range_of(schemas, integer)) is None:
        return None
    text = json_numbers.number(numbers)
    return text if not text.startswith("%json") or json_strings.rule_fits(text) else None


def _list_of_schemas(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list of schemas")
    return value


def items_of(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """Returns the schemas of the first items, and that of the others; None: any."""
    items = schema.get("items")
    if isinstance(items, list):  # until draft 2019-09
        return items, schema.get("additionalItems")
    return _list_of_schemas(schema.get("prefixItems", []), "prefixItems"), items


def properties_of(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns `properties` and `patternProperties`."""
    found = [schema.get(name, {}) for name in ("properties", "patternProperties")]
    if not all(isinstance(each, dict) for each in found):
        raise ValueError("properties and patternProperties must be objects of schemas")
    return found[0], found[1]


def required_of(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise ValueError("required must be a list of strings")
    return names


class Keys:
    """The keys that `propertyNames` allows."""

    def __init__(self, held: Sequence[dict[str, Any]]) -> None:
        """`held`: the schemas that hold for each key."""
        self.held = held
        self._values = values_of(held) if "string" in types_of(held)[0] else {}

    @property
    def listed(self) -> list[str] | None:
        """All keys; None: they are not listed."""
        if self._values is None:
            return None
        return [key for kind, key in self._values if kind == "string" and key in self]

    def __contains__(self, key: str) -> bool:
        listed = self._values is None or ("string", key) in self._values
        return listed and json_strings.allows(key, self.held)


def schemas_of(
    name: str,
    schemas: Sequence[dict[str, Any]],
    maps: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    keys: Keys,
) -> Iterator[Element]:
    """Yields the schemas that hold for a declared property."""
    if name not in keys:
        yield Element("all", False)
    for schema, (properties, by_pattern) in zip(schemas, maps, strict=True):
        matched = [each for p, each in by_pattern.items() if json_strings.matches(p, name)]
        if name in properties:
            matched.insert(0, properties[name])
        if not matched:
            matched = [schema.get("additionalProperties", True)]
        yield from (Element("all", each) for each in matched)


def culprit(schemas: Sequence[dict[str, Any]], error: ValueError) -> Any:
    """Returns the schema with the keyword that an error begins with."""
    word = str(error).split(" ", 1)[0].removesuffix(":")
    return next((each for each in schemas if word in each), schemas[0] if schemas else None)
