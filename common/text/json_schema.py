"""Explains why llguidance rejects a JSON schema, or would fail in the middle of an answer: where,
and the fix. Schemas come from clients and may be any JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

ROW = 2000  # llguidance's limit of items (possible continuations)
_ONE_OF = (
    "oneOf with branches that may match at once is not supported: use anyOf, or give each branch a "
    "required property with a const of its own"
)


def explained(schema: Any, message: str) -> str:
    """Adds the place of the keyword or type to the library's message: ` (at $.properties.a)`."""
    where = json.JSONDecoder()
    names: tuple[str, ...] = ()
    if message.startswith("Unimplemented keys: "):
        names = tuple(where.raw_decode(message.removeprefix("Unimplemented keys: "))[0])
    elif message.startswith("Invalid type: "):
        names = (message.removeprefix("Invalid type: "),)
    elif message.startswith("oneOf constraints are not supported"):
        found = [path for path, each in _objects(schema) if "oneOf" in each]
        return f"{_ONE_OF} (at {found[0]})" if len(found) == 1 else _ONE_OF
    for path, each in _objects(schema):
        if any(name in each or each.get("type") == name for name in names):
            return f"{message} (at {path})"
    return message


def embedded(lark: str) -> Iterator[Any]:
    """Yields the schemas after `%json` in a Lark grammar."""
    for each in re.finditer(r"%json\s*(?=\{)", lark):
        with suppress(json.JSONDecodeError):  # the library will report it
            yield json.JSONDecoder().raw_decode(lark, each.end())[0]


def check_width(schema: Any) -> None:
    """Raises ValueError if, at some point of an answer, more properties could follow than
    llguidance's limit."""
    rows = _Rows(schema)
    for path, each in _objects(schema):
        if max([rows.at_beginning(each), *_runs(each)[1:]]) > ROW:
            raise ValueError(
                f"too many optional properties (at {path}); an object can have about "
                f"{ROW // 4 - 10}: make some required, or move them into nested objects"
            )


class _Rows:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}  # by id

    def at_beginning(self, schema: Any) -> int:
        """Returns the items at the beginning of an object of this schema, over all branches."""
        if not isinstance(schema, dict):
            return 0
        if id(schema) not in self._known:
            self._known[id(schema)] = 0  # a recursive reference adds nothing
            branches = [self._target(schema.get("$ref"))]
            for key in ("allOf", "anyOf", "oneOf"):
                branches += each if isinstance(each := schema.get(key), list) else []
            own = next(iter(_runs(schema)), 0)
            self._known[id(schema)] = own + sum(map(self.at_beginning, branches))
        return self._known[id(schema)]

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for step in reference[1:].split("/")[1:]:
            found = found.get(step) if isinstance(found, dict) else None
        return found


def _runs(schema: dict[str, Any]) -> list[int]:
    """Returns the items of each run of optional properties between required ones."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    names = set(map(str, required)) if isinstance(required, list) else set()
    counts = [0]
    for name in properties:
        if name in names:
            counts.append(0)
        else:
            counts[-1] += 1
    if names:
        first = 3 * counts[0] + 1
    else:  # any of them may be the last
        first = 4 * counts[0] + (-1 if schema.get("additionalProperties") is False else 7)
    return [first, *(2 * count + 3 for count in counts[1:])]


def _objects(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (path, object) of all objects in the schema, parents first."""
    pending: list[tuple[str, Any]] = [("$", schema)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            yield path, value
            pending += [(f"{path}.{key}", each) for key, each in reversed(value.items())]
        elif isinstance(value, list):
            pending += reversed([(f"{path}[{i}]", each) for i, each in enumerate(value)])
