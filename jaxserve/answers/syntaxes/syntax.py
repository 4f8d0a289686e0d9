"""How a model writes thoughts and tool calls, as a value: texts as its chat template writes them, including white
space.

`reader` reads any such value as a stream, `writer` makes a grammar of it, `table` holds those that are known by name.
Nothing here is a pattern: the reader itself tolerates other white space, and missing or doubled marks.
"""

import enum
import secrets
import string
from dataclasses import dataclass

from jaxserve.answers.syntaxes import harmony

Pair = tuple[str, str]
"""The mark that opens something, and the mark that closes it; "" if there is none."""


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """Arguments in a JSON object together with the name: `{"name": "f", "arguments": {...}}`.

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
    """Arguments as an object after the name: JSON, or with quotes of its own and unquoted keys.

    Attributes:
        quote: the quotation mark of texts; keys have quotes only if it is JSON's.
    """

    quote: str = '"'


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Each argument between tags: texts without quotes, other values as JSON.

    Attributes:
        key: the marks around a key.
        value: the marks around a value.
        has_entities: a key has `&` and `"` as `&amp;` and `&quot;`.
        text_flag: an attribute after the key that says whether the value is a text, without its value: ` string="`.
        flags: values of that attribute: the first one is for texts, the others for other values.
        has_cdata: values may be in `<![CDATA[` and `]]>`.
    """

    key: Pair
    value: Pair
    text_flag: str = ""
    flags: tuple[str, ...] = ("true", "false")
    has_cdata: bool = False
    has_entities: bool = False


@dataclass(frozen=True, kw_only=True)
class Elements:
    """Each argument in an element of its name: texts without quotes, other values as JSON, or as elements within it,
    those of a list named `item`.

    Attributes:
        mark: the text before every tag.
    """

    mark: str


@dataclass(frozen=True, kw_only=True)
class PythonCall:
    """Arguments are those of a call in Python: `f(a=1, b="x")`."""


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Thoughts, words and calls are messages with headers, as OpenAI's harmony format has them (`harmony`)."""


Arguments = Wrapped | Object | Tags | Elements | PythonCall | Channels


class Ids(enum.Enum):
    """The form of call ids that a chat template accepts."""

    ANY = "call_ and 24 hexadecimal digits"
    NINE = "nine letters and digits"
    NUMBERED = "what the model itself writes around the name: functions.f:0"

    def make(self, name: str, number: int, *, own: str | None) -> str:
        """Return an id for the call `number` of an answer. `own` is the id that the model wrote, if it did."""
        if self is Ids.NINE:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        if self is Ids.NUMBERED:
            return own or f"functions.{name}:{number}"
        return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class Calls:
    """How tool calls are written.

    An answer with calls is: `section[0]`, then each call, with `separator` between two of them, then `section[1]`. A
    call is `call[0]`, the name between the texts of `name`, its arguments, and `call[1]`; `Wrapped` arguments hold the
    name themselves. In `name`, `{index}` is the number of the call, and `{server}` a word that says nothing. In
    `call[0]`, `{name}` is the call's name once more, and none of `no_names`.

    Attributes:
        others: further marks of sections, which are read, but never written.
        no_names: names that never are those of a tool.
        is_list: calls are between square brackets inside the section.
        is_bare: calls may begin an answer without any mark.
        is_parallel: an answer may hold several calls.
        tag_prefix: a text after which all tags have their word; models put a blank there, and misspell the word of a
            section's marks.
        signs: texts of which a chat template in this syntax contains all. Rows before this one in the table have
            been ruled out by then.
    """

    arguments: Arguments
    section: Pair = ("", "")
    others: tuple[Pair, ...] = ()
    call: Pair = ("", "")
    name: Pair = ("", "")
    separator: str = ""
    no_names: tuple[str, ...] = ()
    is_list: bool = False
    is_bare: bool = False
    is_parallel: bool = True
    ids: Ids = Ids.ANY
    tag_prefix: str = ""
    signs: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """All texts that have marks of calls in them."""
        match self.arguments:
            case Channels():
                return [*harmony.MARKS]
            case Object(quote=quote):
                own = [quote]
            case Tags(key=key, value=value):
                own = [*key, *value]
            case _:
                own = []
        return [*self.section, *self.call, *self.name, *own]

    @property
    def openings(self) -> list[str]:
        """The marks that begin calls, by which they are known in the midst of other text."""
        tag = self.name[0][self.name[0].rfind("<") :].strip()
        call = self.call[0].rpartition("{name}")[2].strip()
        marks = [self.section[0].strip(), call, tag if tag.startswith("<") and ">" not in tag else ""]
        return [mark for mark in marks if mark]


@dataclass(frozen=True, kw_only=True)
class Thoughts:
    """How thoughts are written: `opening[0]`, thoughts, `closing[0]`, then the answer.

    Attributes:
        opening, closing: the marks around thoughts; further texts are read, but never written.
        answer: the marks around the answer, if it has any.
        channels: further marks that begin a part of the answer, and end thoughts; `{name}` stands for any name.
        dropped: marks that begin a text for nobody, which ends at the next mark.
        calls_end: a call of a tool that is offered ends open thoughts.
        reopens: thoughts may come again after the answer has begun.
        starts_open: an answer begins with thoughts unless the end of the prompt says otherwise.
        stay: thoughts stay in the content, after the opening mark.
        lead: what words at the beginning of an answer have before them, where the prompt has begun its mark.
        hidden: texts that are not shown, in thoughts or in words; a tag stands for its end, too, and for attributes,
            white space at the end for any.
        signs: as in `Calls`.
    """

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    answer: Pair = ("", "")
    calls_end: bool = True
    reopens: bool = False
    starts_open: bool = False
    stay: bool = False
    channels: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    lead: str = ""
    hidden: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """All texts that have marks of thoughts in them."""
        return [*self.opening, *self.closing, *self.answer, *self.channels, *self.dropped, *self.hidden]

    def are_open(self, written: str) -> bool | None:
        """Return true if a text leaves thoughts open; None if it contains none of their marks.

        `written` must be what the chat template itself writes at the end of a prompt, never the text of a message.
        """
        opening, closing = (
            max((written.rfind(mark.strip()) for mark in marks), default=-1) for marks in (self.opening, self.closing)
        )
        return None if opening == closing else opening > closing


@dataclass(frozen=True)
class Syntax:
    """One model's syntax; None: it has no thoughts, or it is not known how it calls tools."""

    calls: Calls | None = None
    thoughts: Thoughts | None = None
