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
        parts.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
    terminal = rf'"\"" ({" & ".join(parts)}) "\""'
    return terminal if terminal_fits(terminal) else None


def _formats(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for name in (each["format"] for each in schemas if "format" in each):
        if not isinstance(name, str) or name not in FORMATS:
            known = ", ".join(FORMATS)
            raise ValueError(f"Unknown format: {str(name)[:64]}; known are {known}")
        found.append(FORMATS[name])
    return list(dict.fromkeys(found))


def _patterns(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    found = [each["pattern"] for each in schemas if "pattern" in each]
    if not all(isinstance(each, str) for each in found):
        raise ValueError("pattern must be a string")
    return list(dict.fromkeys(found))


def allows(text: str, schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether all schemas of strings allow the text."""
    low, high = bounds_of(schemas, "minLength", "maxLength")
    if len(text) < low or (high is not None and len(text) > high):
        return False
    patterns = [*_patterns(schemas), *(f"^({each})$" for each in _formats(schemas))]
    return all(matches(each, text) for each in patterns)


# ---- keys ------------------------------------------------------------------------------------


def key(pattern: str | None, others: Sequence[str], names: Sequence[str]) -> str | None:
    """Returns the terminal of the free keys that `pattern` matches (all, if it is None), without
    those that `others` match and `names`; None: there are none."""
    parts = [PLAIN]
    if pattern is not None:
        parts.append(f"({_search(pattern)})")
    if excluded := [*map(_search, others), *map(literal, names)]:
        parts.append(f"~({' | '.join(excluded)})")
    terminal = rf'"\"" ({" & ".join(parts)}) "\""'
    return terminal if terminal_fits(terminal) else None


def disjoint(patterns: Sequence[str]) -> bool:
    """Returns whether no key matches two of the patterns."""
    found = [f"({_search(each)})" for each in patterns]
    pairs = [f"{a} & {b} & {PLAIN}" for i, a in enumerate(found) for b in found[i + 1 :]]
    return not any(map(terminal_fits, pairs))


def _search(pattern: str) -> str:
    """Returns the terminal of the texts within which a pattern matches.

    Raises:
        ValueError: it has an anchor within a group.
    """
    branches = []
    for branch in _branches(pattern):
        start = "" if branch.startswith("^") else "(?s:.*)"
        end = "" if _ends_anchored(branch) else "(?s:.*)"
        inner = branch.removeprefix("^")
        inner = inner[:-1] if not end else inner
        if any(at for at in _tokens(inner) if at in ("^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z")):
            raise ValueError(f"the pattern of a key is not supported: {pattern[:100]}")
        branches.append(f"/{start}({regex_to_lark(inner, 'dw')}){end}/")
    return " | ".join(branches)


def _ends_anchored(branch: str) -> bool:
    return branch.endswith("$") and (len(branch[:-1]) - len(branch[:-1].rstrip("\\"))) % 2 == 0


def _tokens(pattern: str) -> list[str]:
    """Returns a regex's characters, with its escapes and its character classes as one."""
    found: list[str] = []
    place = 0
    while place < len(pattern):
        start = place
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            place += 2 if pattern[place + 1 : place + 2] == "^" else 1
            place += pattern[place : place + 1] == "]"  # a member, as the first
            while place < len(pattern) and pattern[place] != "]":
                place += 2 if pattern[place] == "\\" else 1
        place += 1
        found.append(pattern[start:place])
    return found


def _branches(pattern: str) -> list[str]:
    """Splits a regex at its outermost `|`."""
    depth, found = 0, [""]
    for token in _tokens(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found


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
    """Returns whether a pattern matches somewhere within a text."""
    if (begin := _matcher(pattern)) is None:
        return False
    try:
        given = literal(text).encode()
    except UnicodeEncodeError:
        return False
    matcher = begin.deep_copy()
    return matcher.try_consume_tokens(list(given)) == len(given) and matcher.is_accepting()
