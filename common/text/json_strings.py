"""Terminals for JSON's strings and keys: literals, lengths, formats and patterns.

llguidance quotes a pattern's texts itself (`%json`), but only as a rule. A key must be a terminal,
for declared names are excluded from it. So free keys have no character that JSON escapes: then the
pattern's own texts are those of the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from pdserve.common.text import json_regex
from pdserve.common.text.json_regex import translated

CHARACTER = r'[^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])'
PLAIN = r'/[^"\\\x00-\x1f\x7f]*/'
KEYWORDS = ("minLength", "maxLength", "pattern", "format")
_LIMITS = LLParserLimits(verbose_errors=False, precompute_large_lexemes=False)


def _ipv6() -> str:
    group = "[0-9a-fA-F]{1,4}"

    def groups(count: int) -> str:
        return f"({group}(:{group}){{0,{count - 1}}})?" if count else ""

    short = (rf"({group}:){{{left - 1}}}{group}" if left else "" for left in range(8))
    parts = [f"{before}::{groups(7 - left)}" for left, before in enumerate(short)]
    return f"({group}:){{7}}{group}|{'|'.join(parts)}"


_LEAP = "[1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00"
_DATE = (
    "([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|({_LEAP})-02-29)"
)
# Second 60 is left out: RFC 3339 allows it only where a leap second was inserted.
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"  # at most 253 characters
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_COUNT = "[0-9]{1,9}"
_HOURS = rf"T({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_DAYS = rf"({_COUNT}Y({_COUNT}M({_COUNT}D)?)?|{_COUNT}M({_COUNT}D)?|{_COUNT}D)"
_URI_CHARACTER = r"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_QUERY = rf"({_URI_CHARACTER}|[/?])*"
FORMATS = {
    "date-time": f"{_DATE}T{_TIME}",
    "date": _DATE,
    "time": _TIME,
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|{_COUNT}W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+.-]*:(//({_HOST}|{_IPV4}|\[({_ipv6()})\])(:[0-9]{{1,4}})?"
        rf"(/{_URI_CHARACTER}*)*|/?{_URI_CHARACTER}+(/{_URI_CHARACTER}*)*)"
        rf"(\?{_QUERY})?(#{_QUERY})?"
    ),
}
# JSON Schema's others. What it does not define, as OpenAPI's `password`, means nothing to it.
UNSUPPORTED_FORMATS = {
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex",
    "relative-json-pointer", "uri-reference", "uri-template",
}  # fmt: skip


def literal(text: str) -> str:
    """Returns the terminal of a text. The library's lexer takes no DEL in a string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def quoted(text: str) -> str:
    """Returns the terminal of a text as a JSON string."""
    return literal(literal(text))


def _regex(text: str) -> str:
    """Returns a regex as a terminal."""
    return f"/{regex_to_lark(text, '')}/"


def _length(value: Any, name: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer of 0 or more")
    return value


def bounds_of(
    schemas: Sequence[Mapping[str, Any]], least: str, most: str
) -> tuple[int, int | None]:
    """Returns the largest of the keyword `least` and the smallest of `most`."""
    low = [_length(each[least], least) for each in schemas if least in each]
    high = [_length(each[most], most) for each in schemas if most in each]
    return max(low, default=0), min(high, default=None)


def string(schemas: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the terminal of the strings that all schemas allow, or a rule beginning with
    `%json`; None: there are none.

    Raises:
        ValueError: a keyword's value is wrong or not supported.
    """
    low, high = bounds_of(schemas, "minLength", "maxLength")
    if high is not None and low > high:
        return None
    if max(low, high or 0) > 2**31:
        raise ValueError("minLength or maxLength is too large")
    formats, patterns = _formats(schemas), _patterns(schemas)
    if not formats and not patterns:
        times = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
        return rf'/"({CHARACTER}){times}"/'
    length = {"minLength": low} | ({} if high is None else {"maxLength": high})
    if patterns:
        every = [{"pattern": each} for each in patterns]
        every += [{"pattern": f"^({each})$"} for each in formats]
        whole = {"type": "string", "allOf": every, **(length if length != {"minLength": 0} else {})}
        rule = f"%json {json.dumps(whole, ensure_ascii=False)}"
        return rule if rule_fits(rule) else None
    parts = [_regex(each) for each in formats]
    if length != {"minLength": 0}:
        parts.append(_of_length(low, high))
    terminal = rf'"\"" ({" & ".join(parts)}) "\""'
    return terminal if terminal_fits(terminal) else None


def _of_length(low: int, high: int | None) -> str:
    return f"/(?s:.{{{low},{'' if high is None else high}}})/"


def _formats(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for name in (each["format"] for each in schemas if "format" in each):
        if not isinstance(name, str):
            raise ValueError("format must be a string")
        if name in UNSUPPORTED_FORMATS:
            raise ValueError(f"format {name} is not supported; known are {', '.join(FORMATS)}")
        found += [FORMATS[name]] if name in FORMATS else []  # others are annotations
    return list(dict.fromkeys(found))


def _patterns(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [each["pattern"] for each in schemas if "pattern" in each]
    if not all(isinstance(each, str) for each in found):
        raise ValueError("pattern must be a string")
    return [translated(each) for each in dict.fromkeys(found)]


def allows(text: str, schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether all schemas of strings allow the text."""
    low, high = bounds_of(schemas, "minLength", "maxLength")
    if len(text) < low or (high is not None and len(text) > high):
        return False
    patterns = [*_patterns(schemas), *(f"^({each})$" for each in _formats(schemas))]
    return all(_found(each, text) for each in patterns)


# ---- keys ------------------------------------------------------------------------------------


def key(
    pattern: str | None,
    others: Sequence[str],
    names: Sequence[str],
    held: Sequence[Mapping[str, Any]] = (),
) -> str | None:
    """Returns the terminal of the free keys that `pattern` matches (all, if it is None), and that
    follow the schemas `held`, without those that `others` match and `names`; None: there are
    none."""
    low, high = bounds_of(held, "minLength", "maxLength")
    parts = [PLAIN, *map(_regex, _formats(held))]
    parts += [f"({_search(each)})" for each in _patterns(held)]
    if (low, high) != (0, None):
        parts.append(_of_length(low, high))
    if pattern is not None:
        parts.append(f"({_search(translated(pattern))})")
    if excluded := [*map(_search, map(translated, others)), *map(literal, names)]:
        parts.append(f"~({' | '.join(excluded)})")
    terminal = rf'"\"" ({" & ".join(parts)}) "\""'
    return terminal if terminal_fits(terminal) else None


def disjoint(patterns: Sequence[str]) -> bool:
    """Returns whether no key matches two of the patterns."""
    found = [f"({_search(translated(each))})" for each in patterns]
    pairs = [f"{a} & {b} & {PLAIN}" for i, a in enumerate(found) for b in found[i + 1 :]]
    return not any(map(terminal_fits, pairs))


def _search(regex: str) -> str:
    """Returns the terminal of the texts within which a translated pattern matches.

    Raises:
        ValueError: it is not supported.
    """
    found = []
    for branch in json_regex.branches(regex):
        start = "" if branch.startswith("^") else "(?s:.*)"
        end = "" if branch.endswith("$") else "(?s:.*)"
        inner = branch.removeprefix("^").removesuffix("$")
        anchored = {"^", "$", r"\b", r"\B"}.intersection(json_regex.tokens(inner))
        if anchored or regex.startswith("(?i)"):
            raise ValueError(f"the pattern of a key is not supported: {regex[:100]}")
        found.append(f"/{start}({regex_to_lark(inner, '')}){end}/")
    return " | ".join(found)


# ---- whether there are any -------------------------------------------------------------------


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _begun(grammar: str) -> LLMatcher | None:
    """Returns a matcher over bytes; None: no text matches.

    Raises:
        ValueError: the grammar is invalid or too large.
    """
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        message = str(matcher.get_error())
        if any(word in message for word in ("nsatisfiable", "Regex is empty")):
            return None
        raise ValueError(message.removesuffix("<non-verbose/>").strip())
    any_next = any(matcher.compute_bitmask())
    if matcher.is_error() and "NoExtension" not in (message := str(matcher.get_error())):
        raise ValueError(message.removesuffix("<non-verbose/>").strip())
    return matcher if any_next and not matcher.is_error() else None


@lru_cache(maxsize=4096)
def terminal_fits(terminal: str) -> bool:
    """Returns whether any text matches a terminal."""
    return _begun(LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {terminal}")) is not None


@lru_cache(maxsize=4096)
def rule_fits(rule: str) -> bool:
    """Returns whether any text matches a rule of the library, which begins with `%json`."""
    return _begun(LLMatcher.grammar_from_lark(f"start: {rule}")) is not None


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> LLMatcher | None:
    schema = json.dumps({"type": "string", "pattern": pattern}, ensure_ascii=False)
    return _begun(LLMatcher.grammar_from_json_schema(schema, overrides={}))


def matches(pattern: str, text: str) -> bool:
    """Returns whether a schema's pattern matches somewhere within a text."""
    return _found(translated(pattern), text)


def _found(regex: str, text: str) -> bool:
    if (begin := _matcher(regex)) is None:
        return False
    try:
        given = literal(text).encode()
    except UnicodeEncodeError:
        return False
    matcher = begin.deep_copy()
    return matcher.try_consume_tokens(list(given)) == len(given) and matcher.is_accepting()
