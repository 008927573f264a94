"""Terminals for JSON's numbers: within bounds that are exact, and of bounded length.

A number is matched digit by digit, as text:

    NUMBER & at least the minimum & at most the maximum        for each sign
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from math import gcd
from typing import Any

from pdserve.common.core.exact_json import decimal_of, dumps

DIGITS = 20  # of an integer, and before the point; a bound with more digits allows more
FRACTION = 17  # digits after the point; a bound with more digits allows more
_EXPONENT = 400  # a schema's own numbers are below 10 to this, and their digits end before it
_FEW = 1000  # fractions that are listed
_SAFE = 2**53
KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a schema allows."""

    low: Decimal | None = None
    high: Decimal | None = None
    above: bool = False  # whether `low` is excluded
    below: bool = False
    step: Fraction | None = None  # they are its multiples
    integer: bool = False

    def __contains__(self, number: Decimal) -> bool:
        return (
            (self.low is None or number > self.low or (number == self.low and not self.above))
            and (
                self.high is None or number < self.high or (number == self.high and not self.below)
            )
            and (self.step is None or Fraction(number) % self.step == 0)
            and (not self.integer or number == number.to_integral_value())
        )


def number_of(value: Any, name: str) -> Decimal:
    """Raises ValueError: it is not a number, or beyond all use."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number")
    number = decimal_of(value)
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int) or max(abs(number.adjusted()), -exponent) > _EXPONENT:
        raise ValueError(f"{name} is too large, or has too many digits")
    return number or Decimal(0)  # there is a negative zero


def literal(value: int | float) -> str:
    """Returns the text of a number in a schema, with its exact value."""
    number_of(value, "a constant")
    return dumps(value)


def range_of(schemas: Sequence[Mapping[str, Any]], integer: bool) -> Range | None:
    """Returns the numbers that all schemas allow; None: there are none.

    Raises:
        ValueError: a keyword's value is wrong.
    """
    lows: list[tuple[Decimal, bool]] = []
    highs: list[tuple[Decimal, bool]] = []
    step: Fraction | None = None
    for schema in schemas:
        for name, exclusive, into in (
            ("minimum", "exclusiveMinimum", lows),
            ("maximum", "exclusiveMaximum", highs),
        ):
            strict = schema.get(exclusive)
            if name in schema:  # draft 4 has booleans
                into.append((number_of(schema[name], name), strict is True))
            if strict is not None and not isinstance(strict, bool):
                into.append((number_of(strict, exclusive), True))
        if "multipleOf" in schema:
            given = Fraction(number_of(schema["multipleOf"], "multipleOf"))
            if given <= 0:
                raise ValueError("multipleOf must be more than 0")
            step = given if step is None else _common(step, given)
    low, above = max(lows, default=(None, False))
    high, below = min(highs, default=(None, False), key=lambda each: (each[0], not each[1]))
    if integer:
        low = None if low is None else _whole(low, above, ROUND_CEILING, 1)
        high = None if high is None else _whole(high, below, ROUND_FLOOR, -1)
        above = below = False
        step = None if step is None or step.numerator == 1 else Fraction(step.numerator)
    made = Range(low, high, above, below, step, integer)
    return made if _any_in(made) else None


def _whole(bound: Decimal, excluded: bool, rounding: str, step: int) -> Decimal:
    whole = bound.to_integral_value(rounding)
    return whole + step if excluded and whole == bound else whole


def _common(a: Fraction, b: Fraction) -> Fraction:
    """Returns the least common multiple."""
    top, bottom = a.numerator * b.denominator, b.numerator * a.denominator
    return Fraction(top * bottom // gcd(top, bottom), a.denominator * b.denominator)


def _any_in(of: Range) -> bool:
    if of.low is None or of.high is None:
        return True
    low, high = Fraction(of.low), Fraction(of.high)
    if of.step is None:
        return low < high or (low == high and not (of.above or of.below))
    first, last = -(-low // of.step), high // of.step
    first += of.above and first * of.step == low
    last -= of.below and last * of.step == high
    return first <= last


# ---- as terminals ----------------------------------------------------------------------------


def number(of: Range) -> str:
    """Returns the terminal, or the rule, of these numbers.

    Raises:
        ValueError: they cannot be matched.
    """
    fraction = "" if of.integer else _fraction(of)
    if of.step is not None and not fraction:
        if (step := of.step).denominator != 1 or set(str(step).rstrip("0")) != {"1"}:
            return _multiples(of)
        zeros = len(str(step)) - 1
        whole = f"(0|[1-9][0-9]{{0,{_digits(of) - 1}}}{'0' * zeros})"
    else:
        whole = f"(0|[1-9][0-9]{{0,{_digits(of) - 1}}})"
    exponent = ""
    if of.low is of.high is of.step is None and not of.integer:
        exponent = "([eE][+-]?[0-9]{1,2})?"
    if of.low is of.high is None:
        return f"/-?{whole}{fraction}{exponent}/"
    return " | ".join(_signed(of, f"{whole}{fraction}"))


def _digits(of: Range) -> int:
    bounds = [abs(each) for each in (of.low, of.high) if each is not None]
    return max([DIGITS, *(each.adjusted() + 2 for each in bounds)])


def _fraction(of: Range) -> str:
    """Returns the regex of what follows the integer part; empty: nothing does."""
    places = [-each.as_tuple().exponent for each in (of.low, of.high) if each is not None]  # type: ignore[operator]
    most = max([FRACTION, *(each + 2 for each in places)])
    if of.step is None:
        return rf"(\.[0-9]{{1,{most}}})?"
    bottom = of.step.denominator
    if of.step.numerator != 1 or bottom == 1:
        return ""
    if set(str(bottom).rstrip("0")) == {"1"}:
        return rf"(\.[0-9]{{1,{len(str(bottom)) - 1}}})?"
    if bottom > _FEW:
        raise ValueError(f"multipleOf {float(of.step)} is not supported")
    parts = [format(_decimal(Fraction(i, bottom)), "f")[2:] for i in range(1, bottom)]
    return rf"(\.(0|{'|'.join(parts)}))?"


def _decimal(value: Fraction) -> Decimal:
    with localcontext() as context:
        context.prec = 2 * _EXPONENT
        return Decimal(value.numerator) / Decimal(value.denominator)


def _multiples(of: Range) -> str:
    """Returns a rule: the library can count remainders, with bounds that a float holds."""
    bounds: dict[str, Any] = {"minimum": -(10**15) + 1, "maximum": 10**15 - 1}
    for name, bound, excluded in (("minimum", of.low, of.above), ("maximum", of.high, of.below)):
        if bound is None:
            continue
        if abs(bound) > _SAFE or Decimal(repr(float(bound))) != bound:
            raise ValueError(f"multipleOf beside {name} {bound} is not supported")
        bounds.pop(name)
        bounds[f"exclusive{name.capitalize()}" if excluded else name] = _plain(bound)
    if (low := of.low) is not None and low >= 10**15:
        bounds["maximum"] = bounds.get("maximum", _SAFE)
    assert of.step is not None
    kind = "integer" if of.integer else "number"
    return "%json " + dumps({"type": kind, **bounds, "multipleOf": _plain(_decimal(of.step))})


def _plain(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _signed(of: Range, shape: str) -> list[str]:
    found = []
    if of.high is None or of.high > 0 or (of.high == 0 and not of.below):
        low = None if of.low is None or of.low < 0 else of.low
        parts = [f"/{shape}/"]
        parts += [] if low is None else [f"/{_at_least(low, of.above)}/"]
        parts += [] if of.high is None else [f"/{_at_most(of.high, of.below)}/"]
        found.append(" & ".join(parts))
    if of.low is None or of.low < 0:
        least = None if of.high is None or of.high > 0 else abs(of.high)
        parts = [f"/{shape}/"]
        parts += [] if least is None else [f"/{_at_least(least, of.below)}/"]
        parts += [] if of.low is None else [f"/{_at_most(-of.low, of.above)}/"]
        found.append(f'"-" ({" & ".join(parts)})')
    return found


def _split(bound: Decimal) -> tuple[str, str]:
    whole, _, fraction = format(bound, "f").partition(".")
    return whole, fraction.rstrip("0")


def _at_least(bound: Decimal, excluded: bool) -> str:
    """Returns the regex of the texts of numbers from `bound` ≥ 0; some are longer than allowed."""
    whole, fraction = _split(bound)
    rest = r"(\.[0-9]+)?"
    found = [rf"[1-9][0-9]{{{len(whole)},}}{rest}"]
    for i, digit in enumerate(whole):
        if digit < "9":
            following = len(whole) - i - 1
            found.append(rf"{whole[:i]}[{int(digit) + 1}-9][0-9]{{{following}}}{rest}")
    last = r"[0-9]*[1-9][0-9]*" if excluded else r"[0-9]*"
    if not fraction:
        found.append(rf"{whole}\.{last}" if excluded else rf"{whole}{rest}")
        return "|".join(found)
    for i, digit in enumerate(fraction):
        if digit < "9":
            found.append(rf"{whole}\.{fraction[:i]}[{int(digit) + 1}-9][0-9]*")
    found.append(rf"{whole}\.{fraction}{last}")
    return "|".join(found)


def _at_most(bound: Decimal, excluded: bool) -> str:
    """Like `_at_least`, up to `bound` ≥ 0."""
    whole, fraction = _split(bound)
    rest = r"(\.[0-9]+)?"
    found = []
    if len(whole) > 1:
        found += [rf"[0-9]{rest}", rf"[1-9][0-9]{{1,{len(whole) - 2}}}{rest}"][: len(whole) - 1]
    for i, digit in enumerate(whole):
        least = 1 if i == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            following = len(whole) - i - 1
            digits = f"[{least}-{int(digit) - 1}]"
            found.append(rf"{whole[:i]}{digits}[0-9]{{{following}}}{rest}")
    if not fraction:
        found += [] if excluded else [rf"{whole}(\.0+)?"]
        return "|".join(found) or r"[^\s\S]"
    found.append(whole)
    for i, digit in enumerate(fraction):
        if i:
            found.append(rf"{whole}\.{fraction[:i]}0*")
        if digit > "0":
            found.append(rf"{whole}\.{fraction[:i]}[0-{int(digit) - 1}][0-9]*")
    found += [] if excluded else [rf"{whole}\.{fraction}0*"]
    return "|".join(found)
