"""JSON whose numbers keep the value that the client wrote: a float of Python rounds
0.1000000000000000055 to 0.1, and 1e400 to infinity."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, NoReturn

import msgspec

# Numbers that may not survive as a float: 16 digits or more, or an exponent of three.
_LONG = re.compile(rb"\d[\d.]{15}|[eE][+-]?\d{3}")


class ExactFloat(float):
    """A float that also keeps its text, whose value it rounds."""

    text: str

    def __new__(cls, text: str) -> ExactFloat:
        made = super().__new__(cls, text)
        made.text = text
        return made


def _float(text: str) -> float:
    value = float(text)
    return value if Decimal(repr(value)) == Decimal(text) else ExactFloat(text)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def loads(text: str | bytes | bytearray) -> Any:
    """Parses JSON. Numbers that a float would round are `ExactFloat`.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_float=_float, parse_constant=_no_constant)


def may_round(raw: bytes | bytearray) -> bool:
    """Returns whether a JSON text may have numbers that a float rounds; false is certain."""
    return _LONG.search(raw) is not None


def dumps(value: Any) -> str:
    """Returns compact JSON, with the text of each `ExactFloat`.

    Raises:
        ValueError, RecursionError: it cannot be JSON, as `json.dumps`.
    """
    if not has_exact(value):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return msgspec.json.encode(_raw(value)).decode()


def has_exact(value: Any) -> bool:
    """Returns whether there is an `ExactFloat` in parsed JSON."""
    pending = [value]
    while pending:
        match pending.pop():
            case ExactFloat():
                return True
            case dict() as part:
                pending += part.values()
            case list() as part:
                pending += part
    return False


def _raw(value: Any) -> Any:
    match value:
        case ExactFloat():
            return msgspec.Raw(value.text.encode())
        case dict():
            return {key: _raw(each) for key, each in value.items()}
        case list():
            return [_raw(each) for each in value]
        case _:
            return value


def decimal_of(number: int | float) -> Decimal:
    """Returns the value of a number from `loads`."""
    if isinstance(number, ExactFloat):
        return Decimal(number.text)
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)
