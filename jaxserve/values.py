"""Checks and conversions of callers' values, driven by the annotations of the fields that take them.

SamplingParams, the configs and the arguments of LLM are checked by this one set of rules. Arrays and scalars of NumPy,
JAX and other libraries count as what they hold, any iterable as a sequence; no other type is converted. The limits of a
field are in its annotation, as msgspec.Meta.
"""

import abc
import difflib
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, override

import msgspec

from jaxserve.errors import InvalidRequest


class FieldNames(msgspec.StructMeta):
    """The metaclass of structs whose constructors name an unknown keyword, and the field closest to it."""

    @override
    def __call__(self, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            taken = self.accepted(fields)
            check_names(self.__name__, taken, known=self.__struct_fields__)
            if len(taken) == len(fields):
                raise
        return super().__call__(*args, **taken)

    def accepted(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords to look at when some are unknown. A struct may leave some out, or refuse them."""
        return fields


def check_names(owner: str, names: Iterable[str], *, known: Sequence[str], kind: str = "field") -> None:
    """Raise TypeError if one of `names` is not among `known`, the names that `owner` takes."""
    if complaints := unknown_names(owner, names, known=known, kind=kind):
        raise TypeError("; ".join(complaints))


def unknown_names(owner: str, names: Iterable[str], *, known: Sequence[str], kind: str) -> list[str]:
    """Return a sentence about each of `names` that is not among `known`, with the closest one that is."""
    complaints = []
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            word = f"; did you mean {close[0]!r}?" if close else ""
            if not close and not any("; there are" in complaint for complaint in complaints):
                word = f"; there are {', '.join(known)}"
            complaints.append(f"{owner} has no {kind} {name!r}{word}")
    return complaints


class Rule(abc.ABC):
    """The values that a field takes. `words` describes them in messages."""

    words: str

    @abc.abstractmethod
    def takes(self, value: Any) -> bool:
        """Return true if the value is of a type that the field takes."""

    @abc.abstractmethod
    def plain(self, value: Any, path: str) -> Any:
        """Convert a value of such a type to plain Python data. Raises ValueError, naming `path`."""

    def __call__(self, value: Any, path: str) -> Any:
        """Check a value and convert it to plain Python data. Raises ValueError, naming `path`."""
        value = _without_array(value)
        if not self.takes(value):
            raise ValueError(f"{path} must be {self.words}, got {value!r:.100}")
        return self.plain(value, path)


def _without_array(value: Any) -> Any:
    """Convert an array or scalar of an array library to Python's own types; return other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, type) else value


def convert(name: str, value: Any, rule: Rule) -> Any:
    """Return the value of the field or argument `name` as plain Python data. Raises InvalidRequest, which names it."""
    try:
        return rule(value, name)
    except ValueError as error:
        raise InvalidRequest(str(error), param=name) from None


def rules(owner: type) -> dict[str, Rule]:
    """Return the rules for the fields of a class, by name."""
    return {name: rule(hint) for name, hint in typing.get_type_hints(owner, include_extras=True).items()}


def rule(hint: Any) -> Rule:
    """Return the rule for values with this annotation."""
    limits = msgspec.Meta()
    if typing.get_origin(hint) is Annotated:
        hint, limits = typing.get_args(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _AnyOf([rule(argument) for argument in arguments])
    if origin is Literal:
        return _Choice(arguments)
    if origin is Sequence:
        return _List(rule(arguments[0]), limits)
    if origin is Mapping:
        return _Table(rule(arguments[0]), rule(arguments[1]), limits)
    if origin is dict:
        return _Json()
    return _SCALARS[hint](limits) if hint in _SCALARS else _Instance(hint)


class _Nothing(Rule):
    words = "None"

    def __init__(self, _: msgspec.Meta):
        pass

    @override
    def takes(self, value: Any) -> bool:
        return value is None

    @override
    def plain(self, value: Any, path: str) -> None:
        return None


class _Flag(Rule):
    words = "True or False"

    def __init__(self, _: msgspec.Meta):
        pass

    @override
    def takes(self, value: Any) -> bool:
        return isinstance(value, bool)

    @override
    def plain(self, value: Any, path: str) -> bool:
        return value


class _Number(Rule):
    def __init__(self, limits: msgspec.Meta):
        self._excluded = limits.gt
        self._low = -math.inf if limits.ge is None else limits.ge
        self._high = math.inf if limits.le is None else limits.le

    def check_range(self, value: float, path: str) -> None:
        """Raise ValueError for a number out of range, and for NaN."""
        if value != value:
            raise ValueError(f"{path} must be a number, got nan")
        is_low = not self._low <= value if self._excluded is None else not self._excluded < value
        if is_low or not value <= self._high:
            low = f"[{self._low}" if self._excluded is None else f"({self._excluded}"
            words = f"in {low}, {self._high}]"
            if self._high == math.inf:
                words = f"at least {self._low}" if self._excluded is None else f"more than {self._excluded:g}"
            elif self._low == self._high:
                words = f"{self._low:g}"
            raise ValueError(f"{path} must be {words}, got {value!r:.100}")


class _Integer(_Number):
    words = "an integer"

    @override
    def takes(self, value: Any) -> bool:
        return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))

    @override
    def plain(self, value: Any, path: str) -> int:
        value = int(value)
        self.check_range(value, path)
        return value


class _Real(_Number):
    words = "a number"

    @override
    def takes(self, value: Any) -> bool:
        return type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))

    @override
    def plain(self, value: Any, path: str) -> float:
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{path} is too large") from None
        self.check_range(value, path)
        return value


class _Text(Rule):
    words = "a text"

    def __init__(self, limits: msgspec.Meta):
        self._limits = limits

    @override
    def takes(self, value: Any) -> bool:
        return isinstance(value, str)

    @override
    def plain(self, value: Any, path: str) -> str:
        value = str.__str__(value)  # str() would print the name of an enum's member
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{path} has half of a surrogate pair, which is no text, in {value!r:.100}") from None
        if len(value) < (self._limits.min_length or 0):
            raise ValueError(f"{path} must not be empty")
        if self._limits.max_length is not None and len(value) > self._limits.max_length:
            raise ValueError(f"{path} has {len(value)} characters, at most {self._limits.max_length} are allowed")
        return value


_SCALARS: Mapping[Any, Callable[[msgspec.Meta], Rule]] = {
    types.NoneType: _Nothing,
    bool: _Flag,
    int: _Integer,
    float: _Real,
    str: _Text,
}


class _Choice(Rule):
    def __init__(self, choices: Sequence[str]):
        self._choices = choices
        self.words = f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])

    @override
    def takes(self, value: Any) -> bool:
        return isinstance(value, str) and value in self._choices

    @override
    def plain(self, value: Any, path: str) -> str:
        return str.__str__(value)


class _Instance(Rule):
    """The rule for objects of a class that checks its own fields."""

    def __init__(self, kind: type):
        self._kind = kind
        self.words = kind.__name__

    @override
    def takes(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    @override
    def plain(self, value: Any, path: str) -> Any:
        return value


class _AnyOf(Rule):
    def __init__(self, alternatives: Sequence[Rule]):
        self._alternatives = alternatives
        self.words = " or ".join(each.words for each in alternatives if not isinstance(each, _Nothing))

    @override
    def takes(self, value: Any) -> bool:
        return any(alternative.takes(value) for alternative in self._alternatives)

    @override
    def plain(self, value: Any, path: str) -> Any:
        return next(each for each in self._alternatives if each.takes(value)).plain(value, path)


def _check_length(count: int, limits: msgspec.Meta, path: str) -> None:
    if count < (limits.min_length or 0):
        raise ValueError(f"{path} must not be empty")
    if limits.max_length is not None and count > limits.max_length:
        raise ValueError(f"{path} has {count} entries, at most {limits.max_length} are allowed")


class _List(Rule):
    def __init__(self, entry: Rule, limits: msgspec.Meta):
        self._entry = entry
        self._limits = limits
        self.words = f"a list of {entry.words.removeprefix('an ').removeprefix('a ')}s"

    @override
    def takes(self, value: Any) -> bool:
        return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, Mapping))

    @override
    def plain(self, value: Any, path: str) -> tuple[Any, ...]:
        entries = tuple(value)
        _check_length(len(entries), self._limits, path)
        # fast path: a vocabulary has many ids
        if isinstance(self._entry, _Integer) and set(map(type, entries)) == {int}:
            for extreme in (min(entries), max(entries)):
                self._entry.check_range(extreme, path)
            return entries
        return tuple([self._entry(entry, f"{path}[{index}]") for index, entry in enumerate(entries)])


class _Table(Rule):
    """The rule for a mapping. Integer keys may be given as text, since JSON has no others."""

    words = "a dict"

    def __init__(self, key: Rule, value: Rule, limits: msgspec.Meta):
        self._key = key
        self._value = value
        self._limits = limits

    @override
    def takes(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    @override
    def plain(self, value: Any, path: str) -> dict[Any, Any]:
        _check_length(len(value), self._limits, path)
        plain, problems = {}, {}
        for key, entry in value.items():
            try:
                plain[self._key(_number_in(key), f"a key of {path}")] = self._value(entry, f"{path}[{key!r:.100}]")
            except ValueError as error:
                problems[f"{key!r:.100}"] = str(error)
        if problems:
            first, *more = problems
            also = f" (and {', '.join(more)})" if more else ""
            raise ValueError(f"{problems[first]}{also}")
        return plain


def _number_in(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.removeprefix("-").isdecimal() and len(key) < 20 else key


class _Json(Rule):
    """The rule for a JSON object: its keys are texts, its values plain."""

    words = "a dict"

    @override
    def takes(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    @override
    def plain(self, value: Any, path: str) -> dict[str, Any]:
        text = _Text(msgspec.Meta())

        def plain(value: Any) -> Any:
            value = _without_array(value)
            if value is None or isinstance(value, bool):
                return value
            if isinstance(value, str):
                return text(value, f"a text in {path}")
            if isinstance(value, numbers.Integral):
                return int(value)
            if isinstance(value, numbers.Real) and math.isfinite(value):
                return float(value)
            if isinstance(value, Mapping):
                return {text(key, f"a key in {path}"): plain(entry) for key, entry in value.items()}
            if isinstance(value, (list, tuple)):
                return [plain(entry) for entry in value]
            raise ValueError(f"{path} is not JSON: it has {value!r:.100} in it")

        try:
            return plain(value)
        except RecursionError:
            raise ValueError(f"{path} is nested too deeply") from None
