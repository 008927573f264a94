"""Converts a JSON schema to rules in llguidance's Lark.

    schema ─ Document.flat ─▶ what holds at once ─▶ shapes ─ which fit? ─▶ rules

A rule is made for each set of schemas that hold at once for a value. llguidance has a converter of
its own; it rounds numbers, repeats keys, and fails in the middle of an answer where a schema has no
finite text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import regex_to_lark

from pdserve.common.text import json_strings
from pdserve.common.text.json_keywords import (
    Keys,
    culprit,
    items_of,
    listed,
    properties_of,
    required_of,
    schemas_of,
    text_of,
    types_of,
    values_of,
)
from pdserve.common.text.json_schema import Document, Element
from pdserve.common.text.json_shapes import (
    ARRAY,
    COLON,
    COMMA,
    END_ARRAY,
    END_OBJECT,
    NO_ITEMS,
    NOTHING,
    OBJECT,
    Array,
    Object,
    Other,
    Rule,
    Text,
    least_fixpoint,
)

MAX_RULES = 5000
ROW = 2000  # llguidance's limit of items (possible continuations)
MAX_FIRST = 10_000  # of prefixItems
MAX_BRANCHES = 300  # of a oneOf, which are compared in pairs
_ONE_OF = (
    "oneOf with branches that may match at once is not supported: use anyOf, or give each branch a "
    "required property with a const of its own"
)
NO_TEXT = "no text matches it"
EMPTY = '""'

Shape = Text | Other | Array | Object


class JSONGrammar:
    """The rules of one schema; their names begin with `prefix`."""

    def __init__(self, schema: Any, prefix: str = "j") -> None:
        """Raises ValueError: it is not supported, or no finite text matches it."""
        self._document = Document(schema)
        self._prefix = prefix
        self._names: dict[tuple[Element, ...], str] = {}
        self._shapes: dict[str, list[Shape]] = {}
        self._pending: list[tuple[Element, ...]] = []
        self._keys: dict[str, str] = {}  # names of terminals, by their texts
        self._terminals: dict[str, str] = {}
        self._places: dict[str, Any] = {}  # a schema of each rule
        self._exclusive: list[tuple[Any, list[str]]] = []
        self.start = self._rule([Element("all", schema)])
        while self._pending:
            elements = self._pending.pop()
            self._shapes[self._names[elements]] = list(self._shapes_of(elements))
            if len(self._names) > MAX_RULES:
                raise ValueError(f"it has more than {MAX_RULES} combinations of schemas")
        order = self._cut_cycles()
        self._fitting = self._with_finite_text()
        self._check_width(order)
        for part, names in self._exclusive:
            self._check_disjoint(part, names)
        if self.start not in self._fitting:
            raise ValueError(f"{NO_TEXT}{self._reason()}")

    # ---- from schemas to shapes ----

    def _rule(self, elements: Sequence[Element]) -> str:
        """Returns the rule of a value for which all elements hold."""
        flat = self._document.flat(elements)
        if flat is None:
            self._shapes.setdefault(f"{self._prefix}none", [])
            return f"{self._prefix}none"
        if flat not in self._names:
            self._names[flat] = f"{self._prefix}{len(self._names)}"
            self._pending.append(flat)
            self._places[self._names[flat]] = next((each.part for each in flat), None)
        return self._names[flat]

    def _shapes_of(self, elements: tuple[Element, ...]) -> Iterator[Shape]:
        choice = next((i for i, each in enumerate(elements) if each.kind != "own"), None)
        if choice is None:
            schemas = [each.part for each in elements]
            try:
                yield from self._typed(schemas)
            except ValueError as error:
                where = "" if "(at " in str(error) else self._document.at(culprit(schemas, error))
                raise ValueError(f"{error}{where}") from error
            return
        before, of, after = elements[:choice], elements[choice], elements[choice + 1 :]
        names = [self._rule([*before, Element("all", each), *after]) for each in of.part]
        if of.kind == "one":
            self._exclusive.append((of.part, names))
        yield from map(Other, dict.fromkeys(names))

    def _typed(self, schemas: list[dict[str, Any]]) -> Iterator[Shape]:
        types, integer = types_of(schemas)
        if (values := values_of(schemas)) is not None:
            yield from listed(values, types, integer, schemas)
            return
        for kind in types:
            if kind == "array":
                yield self._array(schemas)
            elif kind == "object":
                yield self._object(schemas)
            elif (text := text_of(kind, integer, schemas)) is not None:
                yield Text(text, kind)

    def _array(self, schemas: list[dict[str, Any]]) -> Array:
        least, most = json_strings.bounds_of(schemas, "minItems", "maxItems")
        lists = [items_of(each) for each in schemas]
        longest = max((len(first) for first, _ in lists), default=0)
        if longest > MAX_FIRST:
            raise ValueError(f"prefixItems has more than {MAX_FIRST} schemas")
        first = []
        for place in range(longest if most is None else min(longest, most)):
            held = [f[place] if place < len(f) else rest for f, rest in lists]
            first.append(self._rule([Element("all", each) for each in held if each is not None]))
        rest = [Element("all", each) for _, each in lists if each is not None]
        return Array(tuple(first), self._rule(rest), least, most)

    def _object(self, schemas: list[dict[str, Any]]) -> Object:
        least, most = json_strings.bounds_of(schemas, "minProperties", "maxProperties")
        maps = [properties_of(each) for each in schemas]
        required = [name for each in schemas for name in required_of(each)]
        keys = Keys(self._of_keys(schemas))
        listed = keys.listed
        declared_names = [name for properties, _ in maps for name in properties]
        names = list(dict.fromkeys([*declared_names, *required, *(listed or ())]))
        patterns = list(dict.fromkeys(p for _, by_pattern in maps for p in by_pattern))
        needed = set(required)
        declared = tuple(
            (name, self._rule(list(schemas_of(name, schemas, maps, keys))), name in needed)
            for name in names
        )
        free = () if listed is not None else self._free(schemas, maps, patterns, names, keys.held)
        return Object(declared, tuple(free), least, most)

    def _of_keys(self, schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the schemas of `propertyNames`."""
        given = [each["propertyNames"] for each in schemas if "propertyNames" in each]
        found = self._document.flat([Element("all", each) for each in given])
        if found is None:
            return [{"enum": []}]
        if any(each.kind != "own" for each in found):
            raise ValueError("propertyNames with anyOf or oneOf is not supported")
        return [each.part for each in found]

    def _free(
        self,
        schemas: list[dict[str, Any]],
        maps: list[tuple[dict[str, Any], dict[str, Any]]],
        patterns: list[str],
        names: list[str],
        held_by_keys: Sequence[dict[str, Any]],
    ) -> Iterator[tuple[str, str]]:
        """Yields a terminal and a rule for the keys of each pattern, and for all others."""
        if not json_strings.disjoint(patterns):
            raise ValueError("patternProperties whose keys may match two patterns")
        others = [each.get("additionalProperties", True) for each in schemas]
        for pattern in [*patterns, None]:
            held = [
                other if pattern is None else by_pattern.get(pattern, other)
                for (_, by_pattern), other in zip(maps, others, strict=True)
            ]
            if any(each is False for each in held):
                continue
            excluded = patterns if pattern is None else []
            key = json_strings.key(pattern, excluded, names, held_by_keys)
            if key is not None:
                name = self._keys.setdefault(key, f"{self._prefix.upper()}_KEY{len(self._keys)}")
                yield name, self._rule([Element("all", each) for each in held])

    # ---- which of them fit ----

    def _cut_cycles(self) -> list[str]:
        """Removes alternatives by which a rule is only itself again. Returns the rules, each after
        its alternatives."""
        order: list[str] = []
        state: dict[str, bool] = {}  # whether a rule is still open
        for root in list(self._shapes):
            pending = [(True, root)]
            while pending:
                enter, name = pending.pop()
                if not enter:
                    state[name] = False
                    order.append(name)
                    continue
                if name in state:
                    continue
                state[name] = True
                pending.append((False, name))
                kept = [
                    shape
                    for shape in self._shapes[name]
                    if not (isinstance(shape, Other) and state.get(shape.name))
                ]
                self._shapes[name] = kept
                pending += [(True, each.name) for each in kept if isinstance(each, Other)]
        return order

    def _check_width(self, order: Sequence[str]) -> None:
        """Raises ValueError if, at some point of an answer, more properties could follow than the
        library follows at once."""
        widths: dict[str, int] = {}
        for name in order:
            shapes = self._shapes[name]
            widths[name] = sum(
                widths[each.name] if isinstance(each, Other) else each.width(self._fits)
                for each in shapes
            )
            if widths[name] > ROW:
                raise ValueError(
                    f"too many optional properties{self._document.at(self._places.get(name))}; an "
                    f"object can have about {ROW // 3 - 10}, with those of its anyOf: make some "
                    "required, or move them into nested objects"
                )

    def _with_finite_text(self) -> set[str]:
        needs = {
            name: {needed for shape in shapes for needed in shape.needs()}
            for name, shapes in self._shapes.items()
        }

        def fits(name: str, found: set[str]) -> bool:
            return any(shape.fits(found.__contains__) for shape in self._shapes[name])

        return least_fixpoint(needs, fits)

    def _reason(self) -> str:
        """Returns the place of a required property that has no text, for the error."""
        name, path, seen = self.start, "$", set[str]()
        while name not in seen:
            seen.add(name)
            for shape in self._shapes[name]:
                empty = [
                    (key, rule)
                    for key, rule, required in (shape.declared if isinstance(shape, Object) else ())
                    if required and rule not in self._fitting
                ]
                if empty:
                    path, name = f"{path}.properties.{empty[0][0][:64]}", empty[0][1]
                    break
            else:
                break
        return f" (at {path})"

    def _check_disjoint(self, part: Any, names: list[str]) -> None:
        fitting = [name for name in names if name in self._fitting]
        if len(fitting) > MAX_BRANCHES:
            raise ValueError(f"oneOf with more than {MAX_BRANCHES} branches is not supported")
        for i, one in enumerate(fitting):
            for other in fitting[i + 1 :]:
                if not self._disjoint(one, other, 8):
                    raise ValueError(_ONE_OF + self._document.at(part))

    def _disjoint(self, one: str, other: str, depth: int) -> bool:
        """Returns whether no value matches both rules; false where it is not certain."""
        pairs = [
            (a, b)
            for a in self._shapes[one]
            for b in self._shapes[other]
            if a.fits(self._fits) and b.fits(self._fits)
        ]
        if pairs and (one == other or depth == 0 or len(pairs) > 10_000):
            return False
        return all(self._apart(a, b, one, other, depth) for a, b in pairs)

    def _apart(self, a: Shape, b: Shape, one: str, other: str, depth: int) -> bool:
        if isinstance(a, Other):
            return self._disjoint(a.name, other, depth - 1)
        if isinstance(b, Other):
            return self._disjoint(one, b.name, depth - 1)
        if isinstance(a, Text) and isinstance(b, Text):
            listed = a.values is not None and b.values is not None and not a.values & b.values
            return a.type != b.type or listed
        if isinstance(a, Object) and isinstance(b, Object):
            return self._keys_apart(a, b, depth) or self._keys_apart(b, a, depth)
        return type(a) is not type(b)

    def _keys_apart(self, a: Object, b: Object, depth: int) -> bool:
        """Returns whether `b` cannot have a property that `a` requires."""
        rules = {name: rule for name, rule, _ in b.declared}
        return any(
            self._disjoint(rule, rules[name], depth - 1) if name in rules else not b.free
            for name, rule, required in a.declared
            if required
        )

    # ---- from shapes to rules ----

    def rules(self) -> Iterator[str]:
        """Yields the lines of Lark."""
        yield from (f"{name}: {terminal}" for terminal, name in self._keys.items())
        pending, seen = [self.start], {self.start}
        while pending:
            name = pending.pop()
            shapes = [each for each in self._shapes[name] if each.fits(self._fits)]
            needed = [n for each in shapes for n in each.needs() if n in self._fitting]
            pending += [each for each in dict.fromkeys(needed) if each not in seen]
            seen.update(needed)
            for rule, alternatives in self._lines(name, shapes):
                yield f"{rule}: {' | '.join(each or EMPTY for each in alternatives)}"

    def _fits(self, name: str) -> bool:
        return name in self._fitting

    def _lines(self, name: str, shapes: Sequence[Shape]) -> Iterator[Rule]:
        alternatives: list[str] = []
        texts: list[str] = []
        for number, shape in enumerate(shapes):
            match shape:
                case Text(text) if not text.startswith("%json"):
                    texts.append(f"({text})")
                case Text(text):
                    alternatives.append(text)
                case Other(other):
                    alternatives.append(other)
                case _:
                    alternatives.append(f"{name}_{number}")
                    yield from shape.rules(alternatives[-1], self._fits)
        if texts:
            terminal = " | ".join(texts)
            if terminal not in self._terminals:
                self._terminals[terminal] = name.upper()
                yield name.upper(), [terminal]
            alternatives.append(self._terminals[terminal])
        yield name, alternatives


def separators(whitespace: str | None) -> list[str]:
    """Returns the terminals between values; `whitespace` is a regex of one space between them,
    None: there is none."""
    space = "" if whitespace is None else "J_S?"
    lines = [
        f'{COMMA}: {space} "," {space}', f'{COLON}: {space} ":" {space}',
        f'{ARRAY}: "[" {space}', f'{END_ARRAY}: {space} "]"', f'{NO_ITEMS}: "[" {space} "]"',
        f'{OBJECT}: "{{" {space}', f'{END_OBJECT}: {space} "}}"', f'{NOTHING}: "{{" {space} "}}"',
    ]  # fmt: skip
    if whitespace is not None:
        regex = regex_to_lark(whitespace, "")
        lines.append(rf"J_S: /{regex}/ & /[ \n\r\t]*/")
    return lines


def to_lark(schema: Any, whitespace: str | None) -> str:
    """Returns the grammar of a schema's texts; `whitespace` as in `separators`.

    Raises:
        ValueError: the schema is not supported, or no finite text matches it.
        RecursionError: it is nested too deeply.
    """
    made = JSONGrammar(schema)
    return "\n".join([f"start: {made.start}", *made.rules(), *separators(whitespace), ""])
