"""Reads an answer in any syntax (a `syntax.Syntax`) as a stream, by the same rules for all of them.

- Only tools that are offered are called. Text that only looked like a call is shown unchanged.
- White space around thoughts and calls belongs to the marks and is dropped; before text that is not a mark it stays.
- The marks of a section may be missing or doubled; inside one, text outside calls is dropped once there is a call.
- A call that begins ends the one before it. Missing parts of its arguments are completed; missing arguments are `{}`.
- A call ends thoughts that are open, unless more thoughts follow it up to their end: then it was only thought of.
- An answer that was cut (`finish(is_cut=True)`) shows no beginning of a mark or a call.
"""

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, override

from jaxserve.answers.literals.source import Steps, drop
from jaxserve.answers.parsing.answer import AnswerReader
from jaxserve.answers.parsing.calls import Block, CallReader
from jaxserve.answers.parsing.events import Content, Event, Reasoning, joined
from jaxserve.answers.parsing.marks import is_markup, marks_of
from jaxserve.answers.syntaxes.syntax import Syntax, Wrapped


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
        is_begun: bool = False,
        max_calls: int | None = None,
    ):
        """`is_open`: the prompt has ended inside of thoughts; `is_begun`: which have text already, so that white space
        may follow. Calls beyond `max_calls` are dropped.
        """
        super().__init__(tools, max_calls=max_calls)
        calls = syntax.calls if tools else None
        stays = syntax.thoughts is not None and syntax.thoughts.stay
        self._thoughts = None if stays else syntax.thoughts
        self._marks = marks_of(calls, self._thoughts)
        self._call = CallReader(
            self._source,
            self._marks,
            tools,
            Wrapped() if calls is None else calls.arguments,
            start=self._start_call,
            argue=self._argue,
        )
        self._is_thinking = is_open and not stays
        self._has_thought = is_open
        self._in_answer = False  # between the marks of the answer
        self._is_quoting = False  # after the opening mark of thoughts, as words
        self._is_dropping = False  # after a mark of text for nobody
        self._is_fresh = True  # nothing has been said since the beginning, the last thoughts, or the last call
        self._is_trimming = is_open and not is_begun  # leading white space is dropped
        self._spaces: list[str] = []  # white space that has arrived and may belong to a mark
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
        if self._is_dropping:
            return
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
        yield from source.accept(marks.lead)
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
            self._is_dropping = False
            if kind in ("section", "call", "begin"):
                if self._is_thinking:
                    self._hold()
                yield from self._read_calls()
                if self._is_thinking:
                    self._release()
                continue
            if kind == "line":  # a call without a mark may begin after it
                self._say(source.take(len(match[0])))
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
            case "closing" if self._is_thinking or self._is_fresh or self._in_answer:
                self._turn(to_thoughts=False)
                self._in_answer = False
            case "closing" if self._has_thought and not self._is_quoting and is_markup(mark):
                pass
            case "opening" | "closing":  # thoughts that are only talked about
                self._is_quoting = kind == "opening"
                return self._thoughts is not None and mark in self._thoughts.hidden
            case "answer" if self._is_fresh or self._is_thinking:
                self._turn(to_thoughts=False)
                self._in_answer = True
            case "answer_end" if self._in_answer:
                self._in_answer = False
                self._is_trimming = True
            case "dropped":
                self._turn(to_thoughts=False)
                self._is_dropping = True
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
        source, marks, block = self._source, self._marks, Block()
        source.taken = []
        while not block.is_closed and (yield from self._read_part(block)):
            pass
        # In thoughts, a mark that ends calls and thoughts (Inkling's) decides whether the call was only thought of.
        is_empty = not block.has_calls and marks.nothing.match("".join(source.taken or ())) is not None
        if block.is_closed and self._held is None and (block.has_calls or is_empty):
            while (yield from source.accept(marks.closing)) is not None:
                pass
            if source.is_rest_of(marks.closing):
                source.take(len(source.buffer))
        self._end_calls(block)

    def _read_part(self, block: Block) -> Generator[None, None, bool]:
        """Read a mark, a call, or something that belongs to none. Returns false if the block ends before."""
        source, marks = self._source, self._marks
        yield from source.spaces()
        num_taken, num_calls = len(source.taken or ()), self._num_calls
        if opening := (yield from source.accept(marks.opening)):
            block.is_marked = True
            block.in_section |= opening.lastgroup == "section"
            return True
        if ending := (yield from source.accept(marks.ending)):
            block.in_list = ending[0] == "[" or (block.in_list and ending[0] != "]")
            block.is_closed = ending.lastgroup == "section_end" or (ending.lastgroup == "end" and not block.in_section)
            return True
        is_call = yield from self._call.read(block)
        if is_call:
            if self._num_calls > num_calls:
                block.has_calls, source.taken = True, []
            return True
        if block.has_calls and source.is_rest_of(marks.closing):
            source.take(len(source.buffer))
            block.is_closed = True
            return True
        if block.is_marked and not block.has_calls and (yield from source.accept(marks.preface)):
            return True
        has_moved = len(source.taken or ()) > num_taken
        if block.in_section:
            return bool(source.buffer or has_moved) and (yield from self._skip_words(is_fresh=not has_moved))
        return block.is_inside and (has_moved or (yield from self._call.skip_item()))

    def _skip_words(self, *, is_fresh: bool) -> Generator[None, None, bool]:
        """Take words in a section that belong to no call; return whether the section goes on after them. If they are
        `is_fresh`, none of them has been taken, and a mark that they begin with is one of them.
        """
        source, marks = self._source, self._marks
        if is_fresh and (yield from source.peek(marks.leftover)) is not None:
            source.take(1)
        found = yield from source.until(marks.leftover, drop)
        return found is not None and found.lastgroup not in ("section", "closing")

    def _end_calls(self, block: Block) -> None:
        """Leave a block of calls, and show what is in it and belongs to none."""
        source, marks = self._source, self._marks
        text, source.taken = "".join(source.taken or ()), None
        if block.has_calls:
            text = "" if block.is_closed else marks.spare.sub("", text, count=1)
        elif marks.nothing.fullmatch(text):
            text = ""
            if self._is_fresh:
                self._spaces = []
        elif block.is_closed and block.in_section and not marks.call_like.search(text):
            text = marks.section_marks.sub("", text).strip()
        elif not text:
            text = source.take(1)
        self._say(text)

    @override
    def _start_call(self, name: str, call_id: str | None = None) -> None:
        self._source.taken = None
        self._turn(to_thoughts=False)
        self._is_trimming = False
        super()._start_call(name, call_id)
