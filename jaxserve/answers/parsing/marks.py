"""The patterns that a reader looks for, made once a syntax. All of them are bounded, whatever a model writes."""

import functools
import re
from typing import Any

import regex

from jaxserve.answers.literals.text import ValueEnds
from jaxserve.answers.parsing.spelling import (
    GAP,
    NEVER,
    any_of,
    compiled,
    either,
    end_tag,
    flexible,
    group,
    hidden_text,
    no_beginning,
    section_mark,
    tag_to_value,
)
from jaxserve.answers.syntaxes.syntax import Calls, Elements, Object, PythonCall, Tags, Thoughts, Wrapped

_NAME = r"(?P<name>[\w.-]{1,128}+)(?=[^\w.-])"  # what follows must have arrived
_PIECES = re.compile(r"<[^<>]*>?|\[/?[A-Z_]+\]|[^<>\[]+|\[")
_MARK = re.compile(r"\]<\]\w+\[>\[</?\w+>|<[^<>]+>(?:\w+<[^<>]+>)*|\[/?[A-Z_]+\]|◁[^▷]+▷")
_FENCE = r"```[a-z]{0,8}+(?=[^a-z])"
_ESCAPED_LINE = r"\\n"  # a backslash and an n between tags, where a line break is meant
_JSON = r"\{\s{0,8}[\"'}]"
_NOISE = rf"[\[\])}},;]|{_FENCE}"

KEY = regex.compile(
    r"(?P<quote>[\"'])(?P<key>[^\"'\\]{1,200})(?P=quote)\s{0,8}:\s{0,8}|(?P<key>\w{1,64})\s{0,8}:\s{0,8}"
)
"""A key of an object that calls a tool."""

TEXT_NAME = regex.compile(r"(?P<quote>[\"'])(?P<name>[^\"'\\]{1,128})(?P=quote)")
"""A tool's name as a text of JSON."""


class Marks:
    """The patterns of one syntax, by their purpose, each with an example of what it matches.

    Named groups say which mark has been found. The private properties are parts of several patterns.
    """

    def __init__(self, calls: Calls | None, thoughts: Thoughts | None):
        """Initialize with a syntax; patterns are compiled when they are first used."""
        self._calls = calls or Calls(arguments=Wrapped())
        self._thoughts = thoughts or Thoughts(opening=(), closing=())
        arguments = self._calls.arguments
        self.tags = arguments if isinstance(arguments, Tags) else Tags(key=("", ""), value=("", ""))
        self._prefix = self._calls.tag_prefix
        self._sections = [self._calls.section, *self._calls.others]
        # Elements have a text before every tag.
        self._space = re.escape(arguments.mark) if isinstance(arguments, Elements) else ""
        self._is_wrapped, self._is_python = isinstance(arguments, Wrapped), isinstance(arguments, PythonCall)

    # Parts: how marks are spelled.

    def _spelled(self, mark: str) -> str:
        no_name = f"(?!{either(f'{name}[^\\w.-]' for name in self._calls.no_names)})"
        return flexible(mark, prefix=self._prefix, no_name=no_name)

    def _opening_of(self, mark: str) -> str:
        """Return a pattern of the opening mark of a call, which is not the beginning of a text that is hidden."""
        longer = [text for text in self._thoughts.hidden if mark and text.startswith(mark) and text != mark]
        return self._spelled(mark) + "".join(no_beginning(text.removeprefix(mark)) for text in longer)

    def _plain(self, mark: str) -> str:
        """Return a pattern of a mark of words, which is not the beginning of one of calls."""
        start, name, rest = self._calls.call[0].partition("{name}")
        after = mark.removeprefix(start + name)
        is_shared = name and rest.startswith(after)
        return flexible(mark) + (no_beginning(rest.removeprefix(after)) if is_shared else "")

    # Parts: marks around calls.

    @functools.cached_property
    def _call_openings(self) -> str:
        """Marks that begin a call, or a section without an end: `<tool_call>`, `[TOOL_CALLS]`."""
        endless = (opening for opening, end in self._sections if not _MARK.search(end))
        return any_of([self._calls.call[0], *endless], self._opening_of)

    @functools.cached_property
    def _openings(self) -> list[str]:
        """Marks that begin a section (`<tool_calls>`) or a call."""
        ended = (opening for opening, end in self._sections if _MARK.search(end))
        section = any_of(ended, functools.partial(section_mark, prefix=self._prefix))
        return [group("section", section), group("call", self._call_openings)]

    @functools.cached_property
    def _section_ends(self) -> list[str]:
        """Marks that end a section: `</tool_calls>`."""
        return [section_mark(mark, prefix=self._prefix) for _, end in self._sections for mark in _MARK.findall(end)]

    @functools.cached_property
    def _call_ends(self) -> list[str]:
        """Marks that end a call: `</tool_call>`."""
        return [end_tag(mark, prefix=self._prefix) for mark in _MARK.findall(self._calls.call[1])]

    @functools.cached_property
    def _closings(self) -> list[str]:
        return [*self._section_ends, *self._call_ends]

    @functools.cached_property
    def _noise(self) -> str:
        """What models leave around calls: brackets, commas, "```json". Where tags begin with a bracket, it is none."""
        return _NOISE.replace(r"\]", "") if self._space else _NOISE

    # Parts: the tag that holds a name, `<function=`, and what is before it.

    @functools.cached_property
    def _name_pieces(self) -> tuple[str, str]:
        """The text before a name, taken apart: marks, and an open tag, `<function=`; "" for what is not there."""
        pieces = _PIECES.findall(self._calls.name[0].strip())
        has_tag = pieces and pieces[-1].startswith("<") and not pieces[-1].endswith(">")
        return "".join(pieces[:-1]), pieces[-1] if has_tag else ""

    @functools.cached_property
    def _tag(self) -> str:
        return tag_to_value(self._name_pieces[1], prefix=self._prefix)

    @functools.cached_property
    def _after_tag(self) -> str:
        """The end of that tag, after the name: `">` or `>`, which a line break may stand for."""
        return r"[\"']?[^\S\n]{0,8}(?:>|(?=[\n<]))" if self._tag else ""

    @functools.cached_property
    def _begins(self) -> list[str]:
        """What calls begin with: a mark, or the tag of a name. A tag that opens calls only together with the name may
        be shown to the user by itself.
        """
        if "{name}" in self._calls.call[0]:
            return self._openings
        is_optional = self._tag and self._space
        return [*self._openings, group("begin", f"(?:{self._space})?{self._tag}" if is_optional else self._tag)]

    @functools.cached_property
    def _word(self) -> str:
        """The word before a name, which may be missing: `functions` of `functions.f`."""
        return "".join(re.findall(r"^\w+(?=[^\w\s])", self._calls.name[0]))

    @functools.cached_property
    def _heads(self) -> list[str]:
        """What may be before a name after the mark of a call."""
        before, name = self._name_pieces[0], self._calls.name[0]
        if self._tag:
            return [rf"(?:{self._spelled(before)}{GAP})?{self._tag}"]
        gap = GAP if name[-1:].isspace() else ""
        return [f"(?:{self._word})?{self._spelled(name.removeprefix(self._word))}{gap}", ""]

    @functools.cached_property
    def _head(self) -> str:
        """A call up to its name."""
        least = 0 if self._tag else 1
        marks = rf"(?:(?:{either(self._openings)}){GAP}){{{least},2}}"
        return f"{marks}{self._heads[0]}{_NAME}{self._after_tag}"

    # Parts: keys between tags.

    @functools.cached_property
    def _key_opening(self) -> str:
        """What begins a key: `<parameter=`, `<arg_key>`."""
        return tag_to_value(self.tags.key[0], prefix=self._prefix)

    @functools.cached_property
    def _key_end(self) -> str:
        """What is between a key and its value, `</arg_key>`; the group `flag` says whether the value is a text."""
        tags, prefix = self.tags, self._prefix
        if tags.text_flag:
            flag = rf"{flexible(tags.text_flag)}\"?(?P<flag>\w{{1,8}})\"?"
            quote = r"[\"']" if tags.key[1] == '"' else flexible(tags.key[1])
            return rf"{quote}(?:{GAP}{flag})?[^<>\n]{{0,64}}{flexible(tags.value[0].lstrip('"'), prefix=prefix)}"
        closing = tags.key[1].strip()
        if closing.startswith("</"):
            return rf"(?:{end_tag(closing, prefix=prefix)}|(?={flexible(tags.value[0], prefix=prefix) or NEVER}))"
        return r"[\"']?[^\S\n]{0,8}(?:>|(?=\n))" if closing else NEVER

    # Parts: what is before a call that has no mark, and between a name and its arguments.

    @functools.cached_property
    def _bare(self) -> str:
        r"""What a call without a mark begins with: `{`, `[` or `f\n{`; "" if there are none."""
        if not self._calls.is_bare:
            return ""
        if self._calls.arguments == Object():
            return r"[\w.-]{1,64}+\n\{"
        return r"\[" if self._is_python else rf"(?:```(?:json)?{GAP})?[\[{{]"

    @functools.cached_property
    def _after_name(self) -> list[str]:
        """What is between a name and its arguments: an index, marks, the head of a code block."""
        calls = self._calls
        marks = [group("mark", flexible(mark, prefix=self._prefix)) for mark in _MARK.findall("".join(calls.name))]
        if re.fullmatch(r"\s*\w[\w\s]*", calls.name[1]):  # words
            marks.append(group("mark", flexible(calls.name[1])))
        index = group("index", r":\d{1,9}+(?=\D)") if calls.name[1].startswith(":{index}") else ""
        if calls.name[1].startswith('" '):  # further attributes of the tag
            marks.append(group("mark", r"[\"'][^<>\n]{0,64}(?=<)"))
        line = _ESCAPED_LINE if isinstance(calls.arguments, Tags) else ""
        return [index, *marks, group("id", r"\[CALL_ID\][\w-]{1,64}+(?=[^\w-])"), _FENCE, line]

    # Parts: marks of thoughts and of words.

    @functools.cached_property
    def _thinks(self) -> list[str]:
        """The marks of thoughts: `<think>`, `</think>`."""
        thoughts = self._thoughts
        return [group("opening", any_of(thoughts.opening, self._plain)), group("closing", any_of(thoughts.closing))]

    @functools.cached_property
    def _dropped(self) -> str:
        """Marks of text that nobody is to read."""
        return group("dropped", any_of(self._thoughts.dropped))

    @functools.cached_property
    def _hidden(self) -> str:
        """Texts that are not shown, and end nothing; one that may yet become a mark of thoughts waits."""
        thoughts = self._thoughts

        def pattern(text: str) -> str:
            longer = [mark for mark in thoughts.closing if mark.startswith(text) and mark != text]
            return hidden_text(text, self._plain) + "".join(
                no_beginning(mark.removeprefix(text).lstrip()) for mark in longer
            )

        return group("hidden", "|".join(map(pattern, thoughts.hidden)))

    # Patterns: words and thoughts.

    @functools.cached_property
    def in_words(self) -> Any:
        """What ends words: `<tool_call>` in "Let me look.<tool_call>", `</think>` in "Sure.</think>"."""
        calls, thoughts = self._calls, self._thoughts
        after_thoughts = "" if any("</think>" in closing for closing in thoughts.closing) else "|</think>"
        line = rf"(?:\n{after_thoughts})(?={GAP}{self._bare})" if self._bare else ""
        answer = group("answer", any_of([thoughts.answer[0], *thoughts.channels], self._plain))
        answer_end = group("answer_end", flexible(thoughts.answer[1]))
        separator = [flexible(calls.separator)] if "<" in calls.separator else []
        end = group("end", "|".join([*self._closings, *separator]))
        words = [self._dropped, answer, answer_end, end, self._hidden]
        return compiled([*self._begins, group("line", line), *self._thinks, *words])

    @functools.cached_property
    def in_thoughts(self) -> Any:
        """What ends thoughts: `</think>` in "Hm.</think>"."""
        begins = self._begins if self._thoughts.calls_end else ()
        answer = group("answer", any_of(self._thoughts.channels, self._plain))
        return compiled([*begins, *self._thinks, self._dropped, answer, self._hidden])

    @functools.cached_property
    def lead(self) -> Any:
        r"""What words at the beginning of an answer have before them: "all\n"."""
        lead = self._thoughts.lead
        return regex.compile(rf"{GAP}{regex.escape(lead)}" if lead else NEVER)

    # Patterns: blocks of calls.

    @functools.cached_property
    def bare(self) -> Any:
        r"""A call without a mark, at the beginning of an answer: `{"name"`, `[f(` or `f\n{`; None: there are none."""
        return regex.compile(self._bare) if self._bare else None

    @functools.cached_property
    def opening(self) -> Any:
        """The mark of a section that has an end, `<tool_calls>`, or of a call, `<tool_call>`, `[TOOL_CALLS]`."""
        return compiled(self._openings)

    @functools.cached_property
    def preface(self) -> Any:
        """Words between such a mark and a list of objects: "Let me see. " in `[TOOL_CALLS]Let me see. [{"name"`."""
        has_objects = self._is_wrapped or self._calls.arguments == Object()
        return regex.compile(rf"[^\[\]{{}}<>\n]{{1,200}}+(?=\[{GAP}\{{)" if has_objects else NEVER)

    @functools.cached_property
    def ending(self) -> Any:
        """The end of a section, `</tool_calls>`, or of a call, `</tool_call>`, or noise: `]`, `,`, "```json"."""
        ends = [group("section_end", "|".join(self._section_ends)), group("end", "|".join(self._call_ends))]
        return compiled([*ends, self._noise])

    @functools.cached_property
    def closing(self) -> Any:
        r"""Any closing mark, with white space before it: "\n</tool_call>"."""
        fence = "|```" if "```" in self._calls.section[1] + self._calls.call[1] else ""
        return regex.compile(rf"{GAP}(?:(?:```{GAP})?(?:{either(self._closings)}){fence})")

    @functools.cached_property
    def leftover(self) -> Any:
        """What ends words in a section and in no call: `<tool_call>` in "<tool_calls>First: <tool_call>"."""
        brace = r"\{" if self.tags.key[0] == "" else ""
        return compiled([*self._begins, self._thinks[1], *self._closings, brace])

    @functools.cached_property
    def spare(self) -> Any:
        """What a block of calls begins with that is not shown after its last call: `</tool_call>`, `]`, "```"."""
        spare = either([*self._closings, self._noise, r"```[a-z]{0,8}+"])
        return regex.compile(rf"^(?:\s*+(?!{either(self._openings)})(?:{spare}))+")

    @functools.cached_property
    def nothing(self) -> Any:
        r"""A block with nothing in it: "<tool_call>\n</tool_call>", `[TOOL_CALLS][]`."""
        opened, closed = (f"(?:\\s*+(?:{either(marks)}))" for marks in (self._openings, self._closings))
        empty = rf"(?:\s*+\[\s*+\]{closed}*|{closed}+)"
        return regex.compile(rf"{opened}+(?:\s*+```[a-z]{{0,8}}+)?{empty}(?:\s*+```)?\s*+")

    @functools.cached_property
    def section_marks(self) -> Any:
        """The marks of a section that holds words only: `<tool_calls>` and `</tool_calls>`."""
        return compiled([*self._openings[:1], *self._section_ends])

    @functools.cached_property
    def call_like(self) -> Any:
        """What a section with words only has not: `<tool_call>`, `{`, `f(`."""
        return compiled([self._call_openings, self._tag, r"\w\(" if self._is_python else r"\{"])

    # Patterns: one call.

    @functools.cached_property
    def names(self) -> tuple[Any, ...]:
        """The name with the text before it, `functions.f`, and the name alone, `f`."""
        return tuple(regex.compile(f"{head}{_NAME}{self._after_tag}") for head in self._heads)

    @functools.cached_property
    def after_name(self) -> Any:
        """What is between the name and the arguments: `[ARGS]`, `:0<|tool_call_argument_begin|>`, "```json"."""
        return compiled(self._after_name)

    @functools.cached_property
    def nameless(self) -> Any:
        """A call that has a number and no name: `functions:0<|tool_call_argument_begin|>`; None: there are none."""
        number, _, mark = self._calls.name[1].partition("{index}")
        pattern = rf"(?:{self._word})?\W?\d{{1,9}}+{GAP}{self._spelled(mark)}"
        return regex.compile(pattern) if number == ":" and "{index}" in self._calls.name[1] else None

    @functools.cached_property
    def arguments(self) -> Any:
        """What arguments begin with, `{`, `<parameter=`, or what ends missing ones: it confirms an uncertain name."""
        begins = {
            Wrapped: r"\{",
            PythonCall: r"\(",
            Tags: rf"{self._key_opening}|{_JSON}",
            Elements: rf"{self._space}<|{_JSON}",
        }
        begin = begins.get(type(self._calls.arguments), r"[\{\[]")
        return compiled([begin, *self._closings, *self._openings])

    @functools.cached_property
    def ends(self) -> Any:
        """What ends missing arguments: `</tool_call>`, `<tool_call>`."""
        return compiled([*self._closings, *self._openings])

    @functools.cached_property
    def value_ends(self) -> ValueEnds:
        """What ends an incomplete JSON value: `"}}</tool_call>` at the end of an answer, a call that follows.

        Within a text such a call is one that is written as an object, whose quotes would have to be escaped there, or
        in the form of the syntax, with the text after the name.
        """
        calls, openings = self._calls, self._openings
        is_key = isinstance(calls.arguments, Wrapped) and not calls.arguments.name
        key = "" if is_key else rf'(?:tool_)?name"{GAP}:{GAP}"'
        whole = rf'(?:(?:{either(openings)}){GAP}){{1,2}}\[?{GAP}\{{{GAP}"{key}(?P<name>[^"\\]{{1,128}})"'
        after = either([*self._after_name, r"\(" if self._is_python else r"\{", "<"])
        calls_begin = whole if self._is_wrapped else rf"{whole}|{self._head}(?={GAP}(?:{after}))"
        last = rf"(?:(?:```{GAP})?(?:{either(self._closings)}){GAP})"
        texts = [calls.name[0], *calls.call, *(text for pair in self._sections for text in pair)]
        quote = calls.arguments.quote if isinstance(calls.arguments, Object) else '"'
        first = {text.strip()[0] for text in (*texts, quote) if text.strip()}
        return ValueEnds(
            stop=compiled(openings) if "[" in first else None,
            plain=regex.compile(rf"[^`{re.escape(''.join(sorted(first)))}\"'\\\x00-\x1f]*"),
            marks=regex.compile(rf"(?P<head>{last}{{0,2}}(?:{calls_begin}))|(?P<tail>{last}{{1,3}}\Z)"),
        )

    # Patterns: arguments as elements, or between tags.

    @functools.cached_property
    def element_tag(self) -> Any:
        """The tags of elements: `<city>`, `</city>`."""
        return regex.compile(rf"{self._space}<(?P<slash>/?)(?P<name>[^<>/\n]{{1,200}})>")

    @functools.cached_property
    def elements_end(self) -> Any:
        """What ends all elements: `</invoke>`."""
        return compiled([*self._closings, *self._begins])

    @functools.cached_property
    def _end(self) -> str:
        return group("end", "|".join(self._closings))

    @functools.cached_property
    def key(self) -> Any:
        """The opening of a key, `<arg_key>`, `<parameter=`, or the end of the call."""
        return compiled([group("key", self._key_opening), self._end, *self._begins])

    @functools.cached_property
    def key_end(self) -> Any:
        """The key with what comes before its value: `city</arg_key>`."""
        quotes = "\"'" if self.tags.key[0].endswith('"') else '"'
        key = rf"{GAP}(?P<key>[^<>{quotes}\n]{{0,199}}[^<>\"'\s])"
        return regex.compile(rf"{key}{GAP}{self._key_end}")

    @functools.cached_property
    def value(self) -> Any:
        """The opening of a value, `<arg_value>`, with what models put before it: the kind of the value."""
        kind = r"<[\w|]{0,24}type>[^<>]{0,64}</[\w|]{0,24}type>"  # which the schema knows
        opening = self._spelled(self.tags.value[0]) or NEVER
        return regex.compile(rf"(?:{_ESCAPED_LINE}{GAP}){{0,2}}(?:{kind}{GAP})?{opening}")

    @functools.cached_property
    def value_end(self) -> Any:
        """What ends a value: `</arg_value>`, the next key, the end of the call."""
        key = self.tags.key[0]
        whole_key = self._key_opening + ("" if key.strip().endswith(">") else r"[^<>\n]{1,200}>")
        end = group("value", end_tag(self.tags.value[1].strip(), prefix=self._prefix))
        return compiled([end, group("next", whole_key if key else ""), self._end, group("head", self._head)])


marks_of = functools.lru_cache(maxsize=256)(Marks)


def is_markup(mark: str) -> bool:
    """Return true if a mark is one by its brackets; others are words that an answer may contain."""
    return _MARK.search(mark) is not None
