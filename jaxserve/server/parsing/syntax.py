"""How a model writes thoughts and tool calls, as a value: texts as its chat template writes them, white space included.

`reader` reads any such value as a stream, `writer` makes a grammar of it, `table` holds those that are known by name.
Nothing here is a pattern: the reader itself tolerates other white space, and marks that are missing or doubled.
"""

import enum
from dataclasses import dataclass

Pair = tuple[str, str]
"""What opens something, and what closes it. Empty texts: nothing does."""


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """Arguments stand in a JSON object beside the name: `{"name": "f", "arguments": {...}}`.

    Attributes:
        name: key of the name; "": the name itself is the key of the arguments, `{"f": {...}}`.
        arguments: key of the arguments.
        id: key of a call's number, written first, as a text; "": there is none.
    """

    name: str = "name"
    arguments: str = "arguments"
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Object:
    """Arguments are an object behind the name: JSON, or with quotes of its own and keys without any.

    Attributes:
        quote: what texts stand between; keys have quotes only if these are JSON's.
    """

    quote: str = '"'


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Each argument stands between tags: texts without quotes, other values as JSON.

    Attributes:
        key: what a key stands between.
        value: what a value stands between.
        text_flag: an attribute behind the key that says whether the value is a text, without its value: ` string=`.
    """

    key: Pair
    value: Pair
    text_flag: str = ""


@dataclass(frozen=True, kw_only=True)
class PythonCall:
    """Arguments are those of a call in Python: `f(a=1, b="x")`."""


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Thoughts, words and calls are messages with headers, as OpenAI's harmony format has them (`harmony`)."""


Arguments = Wrapped | Object | Tags | PythonCall | Channels


class Ids(enum.Enum):
    """What the ids of calls look like that a chat template takes back."""

    ANY = "call_ and 24 hexadecimal digits"
    NINE = "nine letters and digits"
    NUMBERED = "what the model itself writes around the name: functions.f:0"


@dataclass(frozen=True, kw_only=True)
class Calls:
    """How tool calls are written.

    An answer with calls is: `section[0]`, then each call, with `separator` between two of them, then `section[1]`. A
    call is `call[0]`, the name between the texts of `name`, its arguments, and `call[1]`; `Wrapped` arguments hold the
    name themselves. In `name`, `{index}` stands for the number of the call.

    Attributes:
        others: what sections stand between, too: that is read, but never written.
        is_list: calls stand between square brackets inside the section.
        is_bare: calls may begin an answer without any mark.
        is_parallel: an answer may hold several calls.
        signs: texts of a chat template by which this syntax is unmistakable, all of them.
        not_signs: texts that its chat template has none of.
    """

    arguments: Arguments
    section: Pair = ("", "")
    others: tuple[Pair, ...] = ()
    call: Pair = ("", "")
    name: Pair = ("", "")
    separator: str = ""
    is_list: bool = False
    is_bare: bool = False
    is_parallel: bool = True
    ids: Ids = Ids.ANY
    signs: tuple[str, ...] = ()
    not_signs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """How thoughts are written: `opening[0]`, thoughts, `closing[0]`, then the answer.

    Attributes:
        opening, closing: what thoughts stand between; further texts are read, but never written.
        answer: what the answer stands between, where it has marks of its own.
        calls_end: a call of a tool that is offered ends thoughts that are open.
        reopens: thoughts may come again after the answer has begun.
        starts_open: an answer begins with thoughts if the prompt's end does not say otherwise.
        stay: thoughts stay in the content, behind the opening mark.
        signs, not_signs: as those of `Calls`.
    """

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    answer: Pair = ("", "")
    calls_end: bool = True
    reopens: bool = False
    starts_open: bool = False
    stay: bool = False
    signs: tuple[str, ...] = ()
    not_signs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Syntax:
    """One model's syntax; None: it has no thoughts, or it is not known how it calls tools."""

    calls: Calls | None = None
    thoughts: Thoughts | None = None
