"""A client's Lark grammar: its JSON schemas become rules of our own, and each of its rules must
have a finite text."""

from __future__ import annotations

import json
import re

from pdserve.common.core import exact_json
from pdserve.common.core.structured import COMPACT_WHITESPACE
from pdserve.common.text.json_grammar import JSONGrammar, separators
from pdserve.common.text.lark_rules import check_rules

# A comment begins like a regex; `%json` counts outside of both and of strings.
_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"i?|(?://|#)[^\n]*|/(?:[^/\\\n]|\\.)+/[imslux]*|%json\s*(?=\{)'
)


def with_schemas(lark: str) -> str:
    """Returns the grammar with rules in place of `%json`.

    Raises:
        ValueError: a schema is not supported, or a schema or a rule has no finite text.
    """
    pieces: list[str] = []
    lines: list[str] = []
    place = 0
    while (token := _TOKEN.search(lark, place)) is not None:
        pieces.append(lark[place : token.start()])
        place = token.end()
        if not token[0].startswith("%json"):
            pieces.append(token[0])
            continue
        end = json.JSONDecoder().raw_decode(lark, place)[1]
        made = JSONGrammar(exact_json.loads(lark[place:end]), f"j_{len(pieces)}_")
        pieces.append(made.start)
        lines += made.rules()
        place = end
    whole = "".join([*pieces, lark[place:]])
    check_rules(whole)
    if not lines:
        return lark
    return "\n".join([whole, *lines, *separators(COMPACT_WHITESPACE), ""])
