"""Reads one call after the other: by a name and arguments as the syntax has them, or as an object that holds both."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex

from jaxserve.answers.literals.schema import arguments_of, json_value, keys_of, property_kind, property_names
from jaxserve.answers.literals.source import Pattern, Sink, Source, Steps, drop
from jaxserve.answers.literals.value import ValueReader, to_json
from jaxserve.answers.parsing.elements import ElementReader
from jaxserve.answers.parsing.marks import KEY, TEXT_NAME, Marks
from jaxserve.answers.parsing.tagged import TaggedReader
from jaxserve.answers.syntaxes.syntax import Arguments, Elements, Object, PythonCall, Tags, Wrapped

_OBJECT, _OBJECT_END = regex.compile(r"\{"), regex.compile(r"\}")
_BRACKET, _LIST, _CALL, _COMMA, _QUOTE = (regex.compile(text) for text in (r"[\{\[]", r"\[", r"\(", ",", '"'))
_ITEM = regex.compile(r"[\{\"'\d-]|(?:true|false|null)(?=\W)")
_QUOTED_OBJECT = regex.compile(r"\"(?=\{\s{0,8}\"[^\"\\]{1,64}\"\s{0,8}:)")  # a text whose quotes are not escaped

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type", "tool_call_id", "call_id", "index")


@dataclass
class Block:
    """What has been read of a block of calls.

    Attributes:
        is_marked: a mark has begun it.
        in_section, in_list: such a mark, or a bracket, is open.
        has_calls: there were calls of tools that are offered.
        is_closed: its closing mark has been read.
    """

    is_marked: bool = False
    in_section: bool = False
    in_list: bool = False
    has_calls: bool = False
    is_closed: bool = False

    @property
    def is_inside(self) -> bool:
        """True if what follows is between marks that only calls have."""
        return self.in_section or (self.in_list and (self.is_marked or self.has_calls))


class CallReader:
    """Reads single calls of tools that are offered; other calls are read to their end, and lead to nothing."""

    def __init__(
        self,
        source: Source,
        marks: Marks,
        tools: Mapping[str, Mapping[str, Any]],
        arguments: Arguments,
        *,
        start: Callable[[str, str | None], None],
        argue: Sink,
    ):
        """`tools` are the schemas of parameters. `start` is told the name and the id of a call that begins, and `argue`
        its arguments, piece by piece.
        """
        self._source = source
        self._marks = marks
        self._tools = tools
        self._arguments = arguments
        self._begin = start
        self._argue = argue
        self._ends = replace(marks.value_ends, is_offered=tools.__contains__)
        self._schema: Mapping[str, Any] = {}  # of the call that is read

    def read(self, block: Block) -> Generator[None, None, bool]:
        """Read one call from its name on. Returns false if there is none.

        Where other calls may follow, a call of a tool that is not offered is read to its end, so that nothing in it is
        taken for a call, and the following ones are read. Inside marks that only calls have, so is any other object.
        """
        source, marks = self._source, self._marks
        if (yield from source.peek(_OBJECT)) is not None:
            return (yield from self._read_wrapped(block))
        if isinstance(self._arguments, Wrapped):
            return False
        others: list[tuple[str, int]] = []
        for pattern in marks.names if block.is_marked else marks.names[:1]:
            match = yield from source.peek(pattern)
            name = "" if match is None else self._offered(match["name"])
            if match is not None and name in self._tools:
                head = source.take(len(match[0]))
                return (yield from self._read_named(name, head, is_marked=block.is_marked))
            if match is not None:
                others.append((match["name"], len(match[0])))
        if block.is_marked and marks.nameless is not None and (yield from source.accept(marks.nameless)) is not None:
            return (yield from self._read_nameless())
        if self._may_go_on(block) and others and not isinstance(self._arguments, Tags | Elements):
            name, length = others[0]
            return (yield from self._read_named(name, source.take(length)))
        return False

    def _may_go_on(self, block: Block) -> bool:
        """Return whether other calls may follow."""
        return block.in_section or block.in_list or self._marks.bare is not None

    def _offered(self, name: str) -> str:
        """Return the name of a tool as it is offered; models that write namespaces may write it as its own one."""
        first, _, second = name.partition(".")
        return first if first == second and name not in self._tools else name

    def skip_item(self) -> Generator[None, None, bool]:
        """Take an item of a list of calls that is none. Returns false if there is no item."""
        if isinstance(self._arguments, PythonCall) or (yield from self._source.peek(_ITEM)) is None:
            return False
        yield from ValueReader(self._source, drop).read()
        return True

    def _read_named(self, name: str, head: str, *, is_marked: bool = False) -> Generator[None, None, bool]:
        """Read what follows a name. Returns false if nothing there makes it a call; after a mark of calls, the end of
        the answer does.
        """
        source, marks = self._source, self._marks
        is_sure, call_id = head != name, None
        is_marked |= head != name
        while True:
            yield from source.spaces()
            between = yield from source.accept(marks.after_name)
            if between is None:
                break
            is_sure |= between.lastgroup == "mark"
            if between.lastgroup == "index":
                call_id = head + between[0]
            elif between.lastgroup == "id":
                call_id = between[0].removeprefix("[CALL_ID]")
        is_python = isinstance(self._arguments, PythonCall)
        if name not in self._tools:
            if (yield from source.peek(_CALL if is_python else _BRACKET)) is None:
                return False
            quote = self._arguments.quote if isinstance(self._arguments, Object) else '"'
            yield from ValueReader(source, drop, quote=quote, positions=() if is_python else None).read()
            return True
        has_arguments = (yield from source.peek(marks.arguments)) is not None
        if is_marked and not is_python and any(map(source.is_rest_of, (marks.after_name, marks.arguments))):
            source.take(len(source.buffer))
            self._start(name, call_id)
            self._argue("{}")
            return True
        is_sure &= not isinstance(self._arguments, Tags | Elements) and bool(source.buffer)
        if not (is_sure or has_arguments):
            return False
        self._start(name, call_id)
        match self._arguments:
            case Elements() if (yield from source.peek(_OBJECT)) is None:
                yield from ElementReader(source, self._argue, marks, self._schema).read()
            case Tags() if (yield from source.peek(_OBJECT)) is None:
                is_offered = self._tools.__contains__
                yield from TaggedReader(source, self._argue, marks, self._schema, is_offered=is_offered).read()
            case PythonCall() if (yield from source.peek(_CALL)) is not None:
                yield from self._values(self._argue, property_names(self._schema)).read()
            case _:
                yield from self._read_arguments(self._argue, ends=marks.ends)
        return True

    def _read_nameless(self) -> Generator[None, None, bool]:
        """Read a call that has a number, but no name, which is known if only one tool has such arguments."""
        pieces: list[str] = []
        yield from self._values(pieces.append).read()
        arguments = "".join(pieces)
        keys = keys_of(arguments)
        fitting = [name for name in self._tools if keys and keys <= {*property_names(self._tools[name])}]
        if len(fitting) == 1:
            self._start(fitting[0])
            self._argue(arguments)
        return True

    def _converter(self, key: str, is_quoted: bool) -> Callable[[str], str] | None:
        """Return the converter of a value of this key; None if it stays what it is written as."""
        kind = property_kind(self._schema, key)
        stays = not kind.types or (is_quoted and "string" in kind.types)
        return None if stays else lambda text: json_value(text, kind)

    def _read_wrapped(self, block: Block) -> Generator[None, None, bool]:
        """Read an object that calls a tool. Returns False as soon as it is clear that it does not."""
        source, wrapped = self._source, self._arguments
        name: str | None = None
        call_id: str | None = None
        held: list[str] | None = None  # arguments that came before the name
        has_arguments = False
        own = wrapped if isinstance(wrapped, Wrapped) else Wrapped()
        name_keys, argument_keys = (own.name, *_NAME_KEYS), (own.arguments, *_ARGUMENT_KEYS)
        source.take(1)
        while True:
            yield from source.spaces()
            if (yield from source.accept(_COMMA)) is not None:
                continue
            match = yield from source.accept(KEY)
            if match is None:
                break
            key = match["key"]
            yield from source.spaces()
            is_name_key = not own.name and key in self._tools
            if name is None and (is_name_key or key in name_keys):
                named = match if is_name_key else (yield from source.accept(TEXT_NAME))
                found = None if named is None else named["key" if is_name_key else "name"]
                if found is None or found not in self._tools:
                    if found is None or not self._may_go_on(block):
                        return False
                    return (yield from self._skip_wrapped(argument_keys, has_arguments=has_arguments))
                name = found
                self._start(found, call_id)
                if held is not None:
                    self._argue("".join(held))
            if is_name_key or (key in argument_keys and not has_arguments):
                has_arguments = True
                if name is None:
                    held = []
                yield from self._read_arguments(self._argue if held is None else held.append)
            elif name is None and key not in _OTHER_KEYS:
                if block.is_inside or (self._may_go_on(block) and not own.name):
                    yield from ValueReader(source, drop).read_on("value")
                    return True
                return False
            else:
                other: list[str] = []
                yield from ValueReader(source, other.append).read()
                call_id = _text("".join(other)) if "id" in key else call_id
        if name is None:
            return False
        yield from source.accept(_OBJECT_END)
        if not has_arguments:
            self._argue("{}")
        return True

    def _skip_wrapped(self, argument_keys: Sequence[str], *, has_arguments: bool) -> Generator[None, None, bool]:
        """Read an object on after the name of a tool that is not offered. Returns false if it is no call."""
        source = self._source
        yield from source.accept(_COMMA)
        yield from source.spaces()
        if (yield from source.peek(_OBJECT_END)) is None and not has_arguments:
            following = yield from source.peek(KEY)
            if following is None or following["key"] not in (*argument_keys, *_OTHER_KEYS):
                return False
        yield from ValueReader(source, drop).read_on("key")
        return True

    def _values(self, sink: Sink, positions: Sequence[str] | None = None) -> ValueReader:
        """Return a reader of a value in a call, which ends where another call begins."""
        quote = self._arguments.quote if isinstance(self._arguments, Object) else '"'
        return ValueReader(
            self._source, sink, quote=quote, ends=self._ends, positions=positions, converters=self._converter
        )

    def _start(self, name: str, call_id: str | None = None) -> None:
        self._schema = self._tools[name]
        self._begin(name, call_id)

    def _read_arguments(self, sink: Sink, *, ends: Pattern | None = None) -> Steps:
        yield from read_arguments(self._source, sink, self._schema, self._values, ends=ends)


def read_arguments(
    source: Source,
    sink: Sink,
    schema: Mapping[str, Any],
    values: Callable[[Sink], ValueReader],
    *,
    ends: Pattern | None,
) -> Steps:
    """Read the arguments of a call that are one value, with one of the readers that `values` makes.

    `ends` is what follows them if they come after a name; the value may then be empty, or a text without quotes.
    """
    yield from source.spaces()
    has_ended = ends is not None and (yield from source.peek(ends)) is not None
    quote = "" if has_ended else (yield from source.accept(_QUOTED_OBJECT))
    if not has_ended and (quote or (yield from source.peek(_OBJECT)) is not None):
        yield from values(sink).read()
        if quote:
            yield from source.accept(_QUOTE)
        return
    pieces: list[str] = []
    if not has_ended and (ends is None or (yield from source.peek(_LIST)) is not None):
        yield from values(pieces.append).read()
        value = "".join(pieces)
    else:
        if ends is not None:
            yield from source.until(ends, pieces.append)
        text = "".join(pieces).strip().removesuffix("```").strip()
        value = to_json(text) or (text and json.dumps(text, ensure_ascii=False))
    if not source.is_cut or source.buffer:
        sink(arguments_of(value, schema))


def _text(value: str) -> str | None:
    """Return the text of a JSON string; None if it is not one, or one that cannot be sent."""
    try:
        text = json.loads(value)
        return text if isinstance(text, str) and text.encode() is not None else None
    except (ValueError, RecursionError):
        return None
