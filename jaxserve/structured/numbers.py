"""Numbers of a JSON schema as the grammar engine represents them: doubles and 64-bit integers.

A value that a double would round (`const`, `enum`) is refused, and so is a bound beyond 64 bits. Any other bound that a
double cannot represent is moved inwards to the next one that it can: some values at the very edge cannot be generated
then, but nothing that is generated violates the schema.
"""

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

_EXACT = 2**53  # integers up to here, and their neighbours, are exact doubles
_LIMIT = 2**63
_MAX_UNSIGNED = 2**32 - 1
_MAX_REMAINDERS = 200_000  # takes two seconds
_MAX_INTEGER = 10**7


class Literal(float):
    """A number with a fraction or an exponent that keeps its source text."""

    def __new__(cls, text: str) -> "Literal":
        """Parse a number. Raises ValueError if it is beyond the range of doubles."""
        number = super().__new__(cls, text)
        if math.isinf(number):
            raise ValueError(f"the number {text[:40]} is too large")
        number.text = text
        return number

    text: str


class Beyond(ValueError):
    """A number that cannot be followed, of a `keyword` that could be left out."""

    def __init__(self, keyword: str, problem: str):
        """Initialize with the keyword, and what is wrong with its value."""
        super().__init__(f"{keyword}: {problem}")
        self.keyword = keyword


def exact(number: float) -> Decimal:
    """Return the exact value of a number of a schema, without rounding to a double."""
    return Decimal(number.text if isinstance(number, Literal) else repr(number))


def is_number(value: object) -> TypeGuard[float]:
    """Return true if a value of a schema is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def inexact(value: Any) -> float | None:
    """Return the first number in a `const` or `enum` value that would be rounded to another one, or None."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif is_number(item) and not _is_held_as_value(item):
            return item
    return None


def move_bounds_inside(schema: dict[str, Any], *, is_integer: bool) -> None:
    """Replace the bounds of a schema by representable ones; with `is_integer`, only integers are bounded.

    Raises ValueError, naming the keyword.
    """
    for keyword, exclusive, is_lower in (
        ("minimum", "exclusiveMinimum", True),
        ("maximum", "exclusiveMaximum", False),
    ):
        bound, strict = schema.get(keyword), schema.get(exclusive)
        if isinstance(strict, bool):  # as in drafts up to 4
            del schema[exclusive]
            if strict and is_number(bound):
                schema[exclusive] = strict = schema.pop(keyword)
                bound = None
        inside: list[float] = []
        if is_number(bound):
            inside.append(_inside(keyword, bound, is_lower=is_lower, is_strict=False, is_integer=is_integer))
        if is_number(strict) and not (_is_held(strict) and abs(strict) < _EXACT):
            inside.append(_inside(exclusive, strict, is_lower=is_lower, is_strict=True, is_integer=is_integer))
            del schema[exclusive]
        if inside:
            schema[keyword] = max(inside) if is_lower else min(inside)


def multiple_of(number: float) -> Fraction:
    """Return the value of `multipleOf`.

    Raises ValueError unless it is exactly an integer over a power of ten, and the grammar engine can divide by it in 32
    bits.
    """
    coefficient, exponent = float(min(abs(number), _LIMIT)), 0
    while coefficient % 1:  # the grammar engine's own steps, which round in the same way
        coefficient *= 10
        exponent += 1
    value = abs(Fraction(exact(number)))
    if not value:
        raise ValueError("multipleOf must be greater than 0")
    if not _can_divide(int(coefficient), 10**exponent) or Fraction(int(coefficient), 10**exponent) != value:
        raise Beyond("multipleOf", f"{show(number)} has too many digits to be followed")
    return value


def can_be_combined(multiples: Iterable[Fraction]) -> bool:
    """Return true if the grammar engine, which does not check for overflow, can combine these `multipleOf` values."""
    numbers = list(multiples)
    if len(numbers) < 2:
        return True
    scale = 1
    while any((number * scale).denominator != 1 for number in numbers):
        scale *= 10
    integers = [int(number * scale) for number in numbers]
    multiple = math.lcm(*integers)
    return multiple * max(integers) <= _MAX_UNSIGNED and _can_divide(multiple, scale)


def _can_divide(coefficient: int, scale: int) -> bool:
    """Return true if digit-by-digit division stays within 32 bits: a remainder times ten, plus a digit.

    For integers the grammar engine examines all remainders, except those that a factor of ten rules out, so their
    number is limited too.
    """
    num_remainders = coefficient
    while scale == 1 and num_remainders and num_remainders % 10 == 0:
        num_remainders //= 10
    is_quick = scale > 1 or (num_remainders <= _MAX_REMAINDERS and coefficient <= _MAX_INTEGER)
    return is_quick and 10 * coefficient + 9 * scale <= _MAX_UNSIGNED


def _is_held_as_value(number: float) -> bool:
    if abs(number) >= _LIMIT:
        return False
    return _is_held(number) or (isinstance(number, int) and int(float(number)) == number)


def _is_held(number: float) -> bool:
    return abs(number) < _LIMIT and Decimal(repr(float(number))) == exact(number)


def _inside(keyword: str, bound: float, *, is_lower: bool, is_strict: bool, is_integer: bool) -> float:
    """Return the nearest double within a bound.

    If fractions are allowed, the grammar engine compares with the double's shortest decimal, so this must be within the
    bound as well.
    """
    limit = exact(bound)
    if abs(limit) > _LIMIT:
        raise Beyond(keyword, f"{show(bound)} is beyond 64 bits, which cannot be followed")
    inward = math.inf if is_lower else -math.inf
    candidate = float(bound)
    while abs(candidate) <= _LIMIT:
        forms = [Decimal(int(candidate)) if candidate.is_integer() else Decimal(repr(candidate))]
        if not is_integer:
            forms.append(Decimal(repr(candidate)))
        if abs(candidate) < _LIMIT and all(
            (form > limit) == is_lower if form != limit else not is_strict for form in forms
        ):
            return int(candidate) if candidate.is_integer() else candidate
        candidate = math.nextafter(candidate, inward)
    raise Beyond(
        keyword, f"no number beyond {show(bound)} can be compared exactly, so that the bound cannot be followed"
    )


def show(number: float) -> str:
    """Format a number for a message, as it was written unless it is very long."""
    text = number.text if isinstance(number, Literal) else repr(number)
    return text if len(text) <= 40 else f"{text[:40]}..."
