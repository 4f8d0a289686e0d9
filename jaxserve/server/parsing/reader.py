"""Reads an answer in any syntax (a `syntax.Syntax`) as a stream, by the same rules for all of them.

- Only tools that are offered are called. Text that only looked like a call is shown unchanged.
- White space around thoughts and calls belongs to the marks and is dropped; before text that is not a mark it stays.
- The marks of a section may be missing or doubled; inside one, text outside calls is dropped once there is a call.
- A call that begins ends the one before it. Missing parts of its arguments are completed; missing arguments are `{}`.
- A call ends thoughts that are open, unless more thoughts follow it up to their end: then it was only thought of.
- An answer that was cut (`finish(is_cut=True)`) shows no beginning of a mark or a call.
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, override

import regex

from jaxserve.server.parsing.answer import AnswerReader
from jaxserve.server.parsing.events import Content, Event, Reasoning, joined
from jaxserve.server.parsing.literal import ValueReader, to_json
from jaxserve.server.parsing.marks import KEY, TEXT_NAME, marks_of
from jaxserve.server.parsing.schema import arguments_of, json_value, property_kind, property_names
from jaxserve.server.parsing.source import Pattern, Sink, Steps, drop
from jaxserve.server.parsing.tagged import TaggedReader
from jaxserve.server.syntaxes.syntax import Object, PythonCall, Syntax, Tags, Wrapped

_OBJECT, _OBJECT_END = regex.compile(r"\{"), regex.compile(r"\}")
_BRACKET, _LIST, _CALL, _COMMA, _QUOTE = (regex.compile(text) for text in (r"[\{\[]", r"\[", r"\(", ",", '"'))
_QUOTED_OBJECT = regex.compile(r"\"(?=\{\s{0,8}\"[^\"\\]{1,64}\"\s{0,8}:)")  # a text whose quotes are not escaped

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("id", "type", "tool_call_id", "call_id", "index")


class _Held(NamedTuple):
    """What had been read before a call in thoughts: events, calls, and white space that may belong to a mark."""

    events: list[Event]
    num_calls: int
    spaces: list[str]


class Reader(AnswerReader):
    """Reads one answer. `tools` are the schemas of the parameters of those that are offered, by name."""

    def __init__(
        self,
        syntax: Syntax,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        is_open: bool = False,
        max_calls: int | None = None,
    ):
        """`is_open`: the prompt has ended inside of thoughts. Calls beyond `max_calls` are dropped."""
        super().__init__(tools, max_calls=max_calls)
        calls = syntax.calls if tools else None
        self._arguments = Wrapped() if calls is None else calls.arguments
        stays = syntax.thoughts is not None and syntax.thoughts.stay
        self._thoughts = None if stays else syntax.thoughts
        self._marks = marks_of(calls, self._thoughts)
        self._ends = replace(self._marks.value_ends, is_offered=tools.__contains__)
        self._is_thinking = is_open and not stays
        self._has_thought = is_open
        self._in_answer = False  # between the marks of the answer
        self._is_fresh = True  # nothing has been said since the beginning, the last thoughts, or the last call
        self._is_trimming = is_open  # leading white space is dropped
        self._spaces: list[str] = []  # white space that has arrived and may belong to a mark
        self._schema: Mapping[str, Any] = {}  # of the call that is read
        self._held: _Held | None = None  # there was a call in thoughts, which may be no more than a thought
        if stays and is_open and syntax.thoughts is not None:
            self._events.append(Content("".join(syntax.thoughts.opening[:1])))

    @property
    @override
    def is_thinking(self) -> bool:
        return self._is_thinking or self._held is not None

    @property
    @override
    def may_think(self) -> bool:
        return self._thoughts is not None and (self._is_fresh or self.is_thinking or self._may_reopen)

    @property
    @override
    def is_undecided(self) -> bool:
        return super().is_undecided or self._held is not None

    @property
    def _may_reopen(self) -> bool:
        return self._thoughts is not None and self._thoughts.reopens and self._has_thought

    def _say(self, text: str) -> None:
        """Show words or thoughts; white space waits until it is clear that no mark follows."""
        told = text.strip() if self._is_trimming else text.rstrip()
        if not told:
            self._spaces.append(text)
            return
        spaces = "" if self._is_trimming else "".join(self._spaces)
        self._events.append((Reasoning if self._is_thinking else Content)(spaces + told))
        self._spaces = [text[len(text.rstrip()) :]]
        self._is_fresh = self._is_trimming = False

    def _turn(self, *, to_thoughts: bool) -> None:
        """Thoughts or the answer begin."""
        self._is_thinking = to_thoughts
        self._has_thought |= to_thoughts
        self._is_fresh = self._is_trimming = True
        self._spaces = []

    # Words and thoughts, and the marks between them.

    @override
    def _read_all(self) -> Steps:
        source, marks = self._source, self._marks
        while True:
            if marks.bare is not None and self._is_fresh and not self._is_thinking:
                self._spaces.append((yield from source.spaces()))
                if (yield from source.peek(marks.bare)) is not None:
                    yield from self._read_calls()
                    continue
            match = yield from source.until(marks.in_thoughts if self._is_thinking else marks.in_words, self._say)
            if match is None:
                break
            kind = match.lastgroup
            if kind in ("section", "call", "begin"):
                if self._is_thinking:
                    self._hold()
                yield from self._read_calls()
                if self._is_thinking:
                    self._release()
                continue
            if kind == "line":  # a call without a mark may begin there
                self._say(source.take(1))
                yield from self._read_calls()
                continue
            if kind in ("opening", "closing") and self._held is not None:
                self._release(are_thoughts=kind == "closing" and any(isinstance(e, Content) for e in self._events))
            mark = source.take(len(match[0]))
            if not self._takes(kind, mark):
                self._say(mark)
        if not (self._is_thinking or self._num_calls or self._is_trimming):
            self._events.append(Content("".join(self._spaces)))

    def _takes(self, kind: str, mark: str) -> bool:
        """Act on a mark. Returns false if it has no meaning here, and is to be shown."""
        match kind:
            case "opening" if self._is_fresh or (self._may_reopen and not self._is_thinking):
                self._turn(to_thoughts=True)
            case "closing" if self._is_thinking or self._is_fresh:
                self._turn(to_thoughts=False)
            case "answer" if self._is_fresh and not self._is_thinking:
                self._turn(to_thoughts=False)
                self._in_answer = True
            case "answer_end" if self._in_answer:
                self._in_answer = False
                self._is_trimming = True
            case "end" if self._num_calls and self._is_fresh:
                self._spaces = []
            case "hidden":
                pass
            case _:
                return self._thoughts is not None and mark in self._thoughts.hidden
        return True

    # Calls that are written in thoughts: what follows them decides.

    def _hold(self) -> None:
        """Keep back what is read from here on."""
        self._release()
        self._held = _Held(self._events, self._num_calls, self._spaces)
        self._events, self._source.kept = [], []

    def _release(self, *, are_thoughts: bool = False) -> None:
        """Report what has been kept back, as what it was read as, or as thoughts."""
        if self._held is None:
            return
        held, kept = self._held, "".join(self._source.kept or ())
        self._held = self._source.kept = None
        self._events = [*held.events, *(() if are_thoughts else self._events)]
        self.was_thought = are_thoughts
        if are_thoughts:
            self._num_calls, self._spaces = held.num_calls, held.spaces
            self._is_thinking, self._is_trimming = True, self._is_fresh and not held.spaces
            self._say(kept)

    @override
    def _told(self) -> list[Event]:
        if self._source.is_last:
            self._release()
        if self._held is None:
            return super()._told()
        events = joined(self._held.events)
        self._held.events.clear()
        return events

    # Calls.

    def _read_calls(self) -> Steps:
        """Read from a mark that may begin calls to their end, or to where it is clear that there are none."""
        source, marks = self._source, self._marks
        source.taken = raw = []
        num_before = self._num_calls
        in_section = in_list = is_marked = has_words = is_empty = False
        while True:
            yield from source.spaces()
            num_taken = len(raw)
            if opening := (yield from source.accept(marks.opening)):
                in_section |= opening.lastgroup == "section"
                is_marked = True
            elif marks.section_end is not None and (yield from source.accept(marks.section_end)):
                return self._end_calls(raw if has_words and self._num_calls == num_before else [])
            elif ending := (yield from source.accept(marks.ending)):
                if ending.lastgroup == "end" and not in_section:
                    if is_marked and not has_words and self._num_calls == num_before:
                        while (yield from source.accept(marks.closing)) is not None:
                            pass
                        raw = []
                    return self._end_calls([] if self._num_calls > num_before else raw)
                is_empty = is_marked and in_list and ending[0] == "]"
                in_list = ending[0] == "[" or (in_list and ending[0] != "]")
            elif (yield from self._read_call(is_marked=is_marked, is_among=in_section or in_list)):
                has_words = True  # unless a tool that is offered is called
                if self._num_calls > num_before:
                    source.taken = raw = []
            elif not in_section or (source.is_last and not source.buffer):
                break
            else:
                has_words = True
                if len(raw) == num_taken:
                    source.take(1)
                found = yield from source.until(marks.leftover, drop)
                if found is None or found.lastgroup in ("section", "closing"):
                    break
        is_empty &= not has_words
        if (is_empty or self._num_calls > num_before) and source.is_last and source.buffer.strip() == "```":
            source.take(3)
        if self._num_calls > num_before:
            return self._end_calls([marks.spare.sub("", "".join(raw), count=1)])
        if is_empty:
            return self._end_calls([])
        if not raw:
            source.take(1)
        return self._end_calls(raw)

    def _end_calls(self, words: Sequence[str]) -> None:
        """Leave a block of calls. `words` were in it and belong to no call."""
        self._source.taken = None
        if words:
            self._say("".join(words))

    def _read_call(self, *, is_marked: bool, is_among: bool) -> Generator[None, None, bool]:
        """Read one call from its name on. Returns false if there is none.

        With `is_among`, other calls may follow: then a call of a tool that is not offered is read to its end, so that
        nothing in it is taken for a call, and the following ones are read.
        """
        source, marks = self._source, self._marks
        if (yield from source.peek(_OBJECT)) is not None:
            return (yield from self._read_wrapped(is_among=is_among))
        if isinstance(self._arguments, Wrapped):
            return False
        others: list[tuple[str, int]] = []
        for pattern in marks.names if is_marked else marks.names[:1]:
            match = yield from source.peek(pattern)
            if match is not None and match["name"] in self._tools:
                head = source.take(len(match[0]))
                return (yield from self._read_named(match["name"], head))
            if match is not None:
                others.append((match["name"], len(match[0])))
        if is_marked and marks.nameless is not None and (yield from source.accept(marks.nameless)) is not None:
            return (yield from self._read_nameless())
        if is_among and others and not isinstance(self._arguments, Tags):
            name, length = others[0]
            return (yield from self._read_named(name, source.take(length)))
        return False

    def _read_named(self, name: str, head: str) -> Generator[None, None, bool]:
        """Read what follows a name. Returns false if nothing there makes it a call."""
        source, marks = self._source, self._marks
        is_sure, call_id = head != name, None
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
        if name not in self._tools:
            is_python = isinstance(self._arguments, PythonCall)
            if (yield from source.peek(_CALL if is_python else _BRACKET)) is None:
                return False
            quote = self._arguments.quote if isinstance(self._arguments, Object) else '"'
            yield from ValueReader(source, drop, quote=quote, positions=() if is_python else None).read()
            return True
        is_sure &= not isinstance(self._arguments, Tags) and bool(source.buffer)
        if not is_sure and (yield from source.peek(marks.arguments)) is None:
            return False
        self._start_call(name, call_id)
        match self._arguments:
            case Tags() if (yield from source.peek(_OBJECT)) is None:
                is_offered = self._tools.__contains__
                yield from TaggedReader(source, self._argue, marks, self._schema, is_offered=is_offered).read()
            case PythonCall() if (yield from source.peek(_CALL)) is not None:
                yield from self._values(self._argue, property_names(self._schema)).read()
            case _:
                yield from self._read_arguments(self._argue, ends=self._marks.ends)
        return True

    def _read_nameless(self) -> Generator[None, None, bool]:
        """Read a call that has a number, but no name, which is known if only one tool has such arguments."""
        pieces: list[str] = []
        yield from self._values(pieces.append).read()
        arguments = "".join(pieces)
        keys = json.loads(arguments).keys() if arguments.startswith("{") else set()
        fitting = [name for name in self._tools if keys and keys <= {*property_names(self._tools[name])}]
        if len(fitting) == 1:
            self._start_call(fitting[0])
            self._argue(arguments)
        return True

    @override
    def _start_call(self, name: str, call_id: str | None = None) -> None:
        self._source.taken = None
        self._turn(to_thoughts=False)
        self._is_trimming = False
        self._schema = self._tools[name]
        super()._start_call(name, call_id)

    def _converter(self, key: str, is_quoted: bool) -> Callable[[str], str] | None:
        """Return the converter of a value of this key; None if it stays what it is written as."""
        kind = property_kind(self._schema, key)
        stays = not kind.types or (is_quoted and "string" in kind.types)
        return None if stays else lambda text: json_value(text, kind)

    def _read_wrapped(self, *, is_among: bool) -> Generator[None, None, bool]:
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
                    yield from source.accept(_COMMA)
                    yield from source.spaces()
                    following = None if found is None or not is_among else (yield from source.peek(KEY))
                    if following is None or following["key"] not in argument_keys:
                        return False
                    yield from ValueReader(source, drop).read_on("key")
                    return True
                name = found
                self._start_call(found, call_id)
                if held is not None:
                    self._argue("".join(held))
            if is_name_key or (key in argument_keys and not has_arguments):
                has_arguments = True
                if name is None:
                    held = []
                yield from self._read_arguments(self._argue if held is None else held.append)
            elif key in name_keys:
                continue
            elif name is None and key not in _OTHER_KEYS:
                if is_among and not own.name:
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

    def _read_arguments(self, sink: Sink, *, ends: Pattern | None = None) -> Steps:
        """Read the arguments of a call that are one value. `ends` is what follows them if they come after a name; the
        value may then be empty, or a text without quotes.
        """
        source = self._source
        yield from source.spaces()
        has_ended = ends is not None and (yield from source.peek(ends)) is not None
        quote = "" if has_ended else (yield from source.accept(_QUOTED_OBJECT))
        if not has_ended and (quote or (yield from source.peek(_OBJECT)) is not None):
            yield from self._values(sink).read()
            if quote:
                yield from source.accept(_QUOTE)
            return
        pieces: list[str] = []
        if not has_ended and (ends is None or (yield from source.peek(_LIST)) is not None):
            yield from self._values(pieces.append).read()
            value = "".join(pieces)
        else:
            if ends is not None:
                yield from source.until(ends, pieces.append)
            text = "".join(pieces).strip().removesuffix("```").strip()
            value = to_json(text) or (text and json.dumps(text, ensure_ascii=False))
        if not source.is_cut or source.buffer:
            sink(arguments_of(value, self._schema))

    def _values(self, sink: Sink, positions: Sequence[str] | None = None) -> ValueReader:
        """Return a reader of a value in a call, which ends where another call begins."""
        quote = self._arguments.quote if isinstance(self._arguments, Object) else '"'
        return ValueReader(
            self._source, sink, quote=quote, ends=self._ends, positions=positions, converters=self._converter
        )


def _text(value: str) -> str | None:
    """Return the text of a JSON string; None if it is not one, or one that cannot be sent."""
    try:
        text = json.loads(value)
        return text if isinstance(text, str) and text.encode() is not None else None
    except (ValueError, RecursionError):
        return None
