"""The patterns that a reader looks for, made once a syntax. All of them are bounded, whatever a model writes."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import regex

from jaxserve.answers.literals.text import ValueEnds
from jaxserve.answers.syntaxes.syntax import Calls, Elements, Object, PythonCall, Tags, Thoughts, Wrapped

_NAME = r"(?P<name>[\w.-]{1,128}+)(?=[^\w.-])"  # what follows must have arrived
_GAP = r"\s{0,8}"
_PIECES = re.compile(r"<[^<>]*>?|\[/?[A-Z_]+\]|[^<>\[]+|\[")
_MARK = re.compile(r"\]<\]\w+\[>\[</?\w+>|<[^<>]+>(?:\w+<[^<>]+>)*|\[/?[A-Z_]+\]|◁[^▷]+▷")
_NEVER = r"(?!)"
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
    """Patterns by their purpose, each with an example of what it matches; the names of groups say which mark it is."""

    def __init__(self, calls: Calls | None, thoughts: Thoughts | None):
        """Compile the patterns of a syntax."""
        calls = calls or Calls(arguments=Wrapped())
        thoughts = thoughts or Thoughts(opening=(), closing=())
        tags = calls.arguments if isinstance(calls.arguments, Tags) else Tags(key=("", ""), value=("", ""))
        attribute = functools.partial(_attribute, prefix=calls.tag_prefix)
        section = functools.partial(_section, prefix=calls.tag_prefix)
        sections = [calls.section, *calls.others]
        no_name = f"(?!{_either(f'{name}[^\\w.-]' for name in calls.no_names)})"
        spelled = functools.partial(_flexible, prefix=calls.tag_prefix, no_name=no_name)

        def opening_of(mark: str) -> str:
            """Return a pattern of the opening mark of a call, which is not the beginning of a text that is hidden."""
            longer = [text for text in thoughts.hidden if mark and text.startswith(mark) and text != mark]
            return spelled(mark) + "".join(_no_beginning(text.removeprefix(mark)) for text in longer)

        call_openings = _any([calls.call[0], *(first for first, end in sections if not _MARK.search(end))], opening_of)
        openings = [
            _group("section", _any((opening for opening, end in sections if _MARK.search(end)), section)),
            _group("call", call_openings),
        ]
        section_ends = [section(mark) for _, closing in sections for mark in _MARK.findall(closing)]
        ends = [_drifting(mark, prefix=calls.tag_prefix) for mark in _MARK.findall(calls.call[1])]
        closings = [*section_ends, *ends]
        pieces = _PIECES.findall(calls.name[0].strip())
        tag = pieces[-1] if pieces and pieces[-1].startswith("<") and not pieces[-1].endswith(">") else ""
        prefix, tag = spelled("".join(pieces[:-1])), attribute(tag)
        space = re.escape(calls.arguments.mark) if isinstance(calls.arguments, Elements) else ""
        begins = [*openings, _group("begin", f"(?:{space})?{tag}" if tag and space else tag)]
        if "{name}" in calls.call[0]:  # only there: the same tag may be shown to the user
            begins = openings
        is_python, is_wrapped = (isinstance(calls.arguments, kind) for kind in (PythonCall, Wrapped))

        # What ends words ("Let me look.<tool_call>", "Sure.</think>"), and what ends thoughts ("Hm.</think>").
        after_thoughts = "" if any("</think>" in closing for closing in thoughts.closing) else "|</think>"
        line = rf"(?:\n{after_thoughts})(?={_GAP}{_bare(calls)})" if calls.is_bare else ""

        def plain(mark: str) -> str:
            """Return a pattern of a mark of words, which is not the beginning of one of calls."""
            start, name, rest = calls.call[0].partition("{name}")
            after = mark.removeprefix(start + name)
            is_shared = name and rest.startswith(after)
            return _flexible(mark) + (_no_beginning(rest.removeprefix(after)) if is_shared else "")

        thinks, unthinks = _group("opening", _any(thoughts.opening, plain)), _group("closing", _any(thoughts.closing))
        answers = [
            dropped := _group("dropped", _any(thoughts.dropped)),
            _group("answer", _any([thoughts.answer[0], *thoughts.channels], plain)),
            _group("answer_end", _flexible(thoughts.answer[1])),
        ]
        hidden = _group("hidden", "|".join(_hidden(text, plain) for text in thoughts.hidden))
        after = _group("end", "|".join(closings + ([_flexible(calls.separator)] if "<" in calls.separator else [])))
        self.in_words = _compile([*begins, _group("line", line), thinks, unthinks, *answers, after, hidden])
        others = [dropped, _group("answer", _any(thoughts.channels, plain))]
        self.in_thoughts = _compile([*(begins if thoughts.calls_end else ()), thinks, unthinks, *others, hidden])

        # A call without a mark, at the beginning of an answer: `{"name"`, `[f(` or `f\n{`; None: there are none.
        self.bare = regex.compile(_bare(calls)) if calls.is_bare else None
        # What words at the beginning of an answer have before them: "all\n".
        self.lead = regex.compile(rf"{_GAP}{regex.escape(thoughts.lead)}" if thoughts.lead else _NEVER)
        # The mark of a section that has an end, "<tool_calls>", or of a call, "<tool_call>", "[TOOL_CALLS]".
        self.opening = _compile(openings)
        # Words between such a mark and a list of objects: "Let me see. " in `[TOOL_CALLS]Let me see. [{"name"`.
        self.preface = regex.compile(
            rf"[^\[\]{{}}<>\n]{{1,200}}+(?=\[{_GAP}\{{)" if is_wrapped or calls.arguments == Object() else _NEVER
        )
        # "</tool_calls>", "</tool_call>", or what models leave around calls: brackets, commas, "```json".
        noise = _NOISE.replace(r"\]", "") if space else _NOISE  # tags begin with a bracket there
        self.ending = _compile([_group("section_end", "|".join(section_ends)), _group("end", "|".join(ends)), noise])
        # Any closing mark, with white space before it: "\n</tool_call>".
        fence = "```" if "```" in calls.section[1] + calls.call[1] else ""
        self.closing = regex.compile(rf"{_GAP}(?:(?:```{_GAP})?(?:{_either(closings)}){fence and '|' + fence})")
        # What ends words that are in a section, and in no call: "<tool_call>" in "<tool_calls>First: <tool_call>".
        self.leftover = _compile([*begins, unthinks, *closings, r"\{" if tags.key[0] == "" else ""])
        # What a block of calls begins with that is not shown after its last call: "</tool_call>", "]", "```".
        self.spare = regex.compile(
            rf"^(?:\s*+(?!{_either(openings)})(?:{_either([*closings, noise, r'```[a-z]{0,8}+'])}))+"
        )
        # A block with nothing in it: "<tool_call>\n</tool_call>", "[TOOL_CALLS][]".
        opened, closed = (f"(?:\\s*+(?:{_either(marks)}))" for marks in (openings, closings))
        self.nothing = regex.compile(
            rf"{opened}+(?:\s*+```[a-z]{{0,8}}+)?(?:\s*+\[\s*+\]{closed}*|{closed}+)(?:\s*+```)?\s*+"
        )
        # The marks of a section that holds words only, "<tool_calls>" and "</tool_calls>", and what is not only words.
        self.section_marks = _compile([*openings[:1], *section_ends])
        self.call_like = _compile([call_openings, tag, r"\w\(" if is_python else r"\{"])

        # The name with the text before it, "functions.f", and the name alone, "f".
        gap = _GAP if calls.name[0][-1:].isspace() else ""
        word = "".join(re.findall(r"^\w+(?=[^\w\s])", calls.name[0]))  # it may be missing: functions.f, .f
        before = f"(?:{word})?" + spelled(calls.name[0].removeprefix(word))
        heads = [rf"(?:{prefix}{_GAP})?{tag}"] if tag else [f"{before}{gap}", ""]
        after_tag = r"[\"']?[^\S\n]{0,8}(?:>|(?=[\n<]))" if tag else ""
        self.names = tuple(regex.compile(f"{head}{_NAME}{after_tag}") for head in heads)
        # Between the name and the arguments: "[ARGS]", ":0<|tool_call_argument_begin|>", "```json".
        self.after_name = _compile(_after_name(calls))
        # A call that has a number and no name: "functions.:0<|tool_call_argument_begin|>"; None: there are none.
        is_numbered = calls.name[1].startswith(":{index}")
        argument_mark = spelled(calls.name[1].partition("{index}")[2])
        self.nameless = regex.compile(rf"(?:{word})?\W?\d{{1,9}}+{_GAP}{argument_mark}") if is_numbered else None
        # What arguments begin with, "{", "<parameter=", or what ends missing ones: it confirms an uncertain name.
        key_opening = attribute(tags.key[0])
        starts = {Wrapped: r"\{", PythonCall: r"\(", Tags: rf"{key_opening}|{_JSON}", Elements: rf"{space}<|{_JSON}"}
        self.arguments = _compile([starts.get(type(calls.arguments), r"[\{\[]"), *closings, *openings])
        # What ends missing arguments: "</tool_call>", "<tool_call>".
        self.ends = _compile([*closings, *openings])

        # What ends an incomplete JSON value.
        head = rf"(?:(?:{_either(openings)}){_GAP}){{{0 if tag else 1},2}}{heads[0]}{_NAME}{after_tag}"
        self.value_ends = _value_ends(calls, openings, [] if is_wrapped else [head], closings)

        # The tags of elements, "<city>", "</city>", and what ends them all, "</invoke>".
        self.element_tag = regex.compile(rf"{space}<(?P<slash>/?)(?P<name>[^<>/\n]{{1,200}})>")
        self.elements_end = _compile([*closings, *begins])

        # The opening of a key, "<arg_key>", "<parameter="; the key with what comes before its value, "city</arg_key>".
        quotes = "\"'" if tags.key[0].endswith('"') else '"'
        end = _group("end", "|".join(closings))
        self.tags = tags
        self.key = _compile([_group("key", key_opening), end, *begins])
        self.key_end = regex.compile(
            rf"{_GAP}(?P<key>[^<>{quotes}\n]{{0,199}}[^<>\"'\s]){_GAP}{_key_end(tags, prefix=calls.tag_prefix)}"
        )
        # The opening of a value, "<arg_value>", and what ends one: "</arg_value>", the next key, the end of the call.
        kind = r"<[\w|]{0,24}type>[^<>]{0,64}</[\w|]{0,24}type>"  # of the value, which the schema knows
        self.value = regex.compile(
            rf"(?:{_ESCAPED_LINE}{_GAP}){{0,2}}(?:{kind}{_GAP})?{spelled(tags.value[0]) or _NEVER}"
        )
        value_end = _group("value", _drifting(tags.value[1].strip(), prefix=calls.tag_prefix))
        whole_key = key_opening + ("" if tags.key[0].strip().endswith(">") else r"[^<>\n]{1,200}>")
        self.value_end = _compile(
            [value_end, _group("next", whole_key if tags.key[0] else ""), end, _group("head", head)]
        )


marks_of = functools.lru_cache(maxsize=256)(Marks)


def _value_ends(calls: Calls, openings: Sequence[str], heads: Sequence[str], closings: Sequence[str]) -> ValueEnds:
    """Return what ends an incomplete value: a call after it, or marks at the end of the answer.

    Within a text such a call is one that is written as an object, whose quotes would have to be escaped there, or in
    the form of the syntax (`heads`), with the text after the name.
    """
    is_key = isinstance(calls.arguments, Wrapped) and not calls.arguments.name
    key = "" if is_key else rf'(?:tool_)?name"{_GAP}:{_GAP}"'
    whole = rf'(?:(?:{_either(openings)}){_GAP}){{1,2}}\[?{_GAP}\{{{_GAP}"{key}(?P<name>[^"\\]{{1,128}})"'
    after = _either([*_after_name(calls), r"\(" if isinstance(calls.arguments, PythonCall) else r"\{", "<"])
    calls_begin = "|".join([whole, *(rf"{head}(?={_GAP}(?:{after}))" for head in heads)])
    last = rf"(?:(?:```{_GAP})?(?:{_either(closings)}){_GAP})"
    texts = [calls.name[0], *calls.call, *(text for pair in (calls.section, *calls.others) for text in pair)]
    quote = calls.arguments.quote if isinstance(calls.arguments, Object) else '"'
    first = {text.strip()[0] for text in (*texts, quote) if text.strip()}
    return ValueEnds(
        stop=_compile(openings) if "[" in first else None,
        plain=regex.compile(rf"[^`{re.escape(''.join(sorted(first)))}\"'\\\x00-\x1f]*"),
        marks=regex.compile(rf"(?P<head>{last}{{0,2}}(?:{calls_begin}))|(?P<tail>{last}{{1,3}}\Z)"),
    )


def _bare(calls: Calls) -> str:
    if not calls.is_bare:
        return ""
    if calls.arguments == Object():
        return r"[\w.-]{1,64}+\n\{"
    return r"\[" if isinstance(calls.arguments, PythonCall) else rf"(?:```(?:json)?{_GAP})?[\[{{]"


def _after_name(calls: Calls) -> list[str]:
    """Return the text between a name and its arguments: an index, marks, the head of a code block."""
    marks = [_group("mark", _flexible(mark, prefix=calls.tag_prefix)) for mark in _MARK.findall("".join(calls.name))]
    if re.fullmatch(r"\s*\w[\w\s]*", calls.name[1]):  # words
        marks.append(_group("mark", _flexible(calls.name[1])))
    index = _group("index", r":\d{1,9}+(?=\D)") if calls.name[1].startswith(":{index}") else ""
    if calls.name[1].startswith('" '):  # further attributes of the tag
        marks.append(_group("mark", r"[\"'][^<>\n]{0,64}(?=<)"))
    line = _ESCAPED_LINE if isinstance(calls.arguments, Tags) else ""
    return [index, *marks, _group("id", r"\[CALL_ID\][\w-]{1,64}+(?=[^\w-])"), _FENCE, line]


def _key_end(tags: Tags, *, prefix: str) -> str:
    """Return the text between a key and its value; the group `flag` says whether the value is a text."""
    if tags.text_flag:
        flag = rf"{_flexible(tags.text_flag)}\"?(?P<flag>\w{{1,8}})\"?"
        quote = r"[\"']" if tags.key[1] == '"' else _flexible(tags.key[1])
        return rf"{quote}(?:{_GAP}{flag})?[^<>\n]{{0,64}}{_flexible(tags.value[0].lstrip('"'), prefix=prefix)}"
    closing = tags.key[1].strip()
    if closing.startswith("</"):
        return rf"(?:{_drifting(closing, prefix=prefix)}|(?={_flexible(tags.value[0], prefix=prefix) or _NEVER}))"
    return r"[\"']?[^\S\n]{0,8}(?:>|(?=\n))" if closing else _NEVER


def _flexible(text: str, *, prefix: str = "", no_name: str = "") -> str:
    """Return a pattern of a mark, with any white space where it has some, and between two tags; after the `prefix` of
    tags there may be a blank. The pattern `no_name` is in front of a name in the mark.
    """
    parts = re.sub(r">(?=<)", "> ", text.strip()).split()
    pattern = _GAP.join(regex.escape(part) for part in parts)
    pattern = pattern.replace(r"\{name\}", rf"{no_name}[\w.-]{{1,128}}+").replace(r"\{server\}", r"[^<>\n]{0,64}")
    return pattern.replace(prefix, f"{prefix} ?") if prefix else pattern


def _section(mark: str, *, prefix: str) -> str:
    """Return a pattern of a mark of a section; if its tags have a `prefix`, models misspell the word after it."""
    match = re.fullmatch(rf"(</?){re.escape(prefix)} ?\w+>\s*", mark) if prefix else None
    word = r"(?!invoke|parameter)\w{1,24}"  # the tags inside a section
    return rf"{match[1]}{prefix} ?{word}>" if match else _drifting(mark, prefix=prefix)


def _attribute(text: str, *, prefix: str) -> str:
    """Return a pattern of a tag up to the value of its attribute, whose quote may be missing or another one."""
    mark = text.strip()
    quote = r"[\"']?+(?=[^\"'])" if mark[-1:] in ('"', "=") else ""
    return _flexible(mark.removesuffix('"'), prefix=prefix) + quote


def _drifting(mark: str, *, prefix: str) -> str:
    """Return a pattern of an end tag as models misspell it."""
    match = re.fullmatch(r"</([^<>｜]+)>", mark)  # noqa: RUF001
    if match and not prefix:
        return rf"<\s{{0,4}}/\s{{0,4}}{regex.escape(match[1])}[\w=.: -]{{0,64}}>"
    return _flexible(mark, prefix=prefix)


def _no_beginning(text: str) -> str:
    """Return a pattern that looks ahead: what follows begins unlike `text`, white space aside."""
    others = (
        f"{regex.escape(text[:index])}[^{regex.escape(text[index])}{'' if index else r'\s'}]"
        for index in range(min(len(text), 8))
    )
    return rf"(?=\s{{0,8}}+(?:{'|'.join(others)})|\s{{9}})"


def _hidden(text: str, pattern_of: Callable[[str], str]) -> str:
    """Return a pattern of a text that is not shown, with the blanks after it if it ends in one; if it is a tag, also
    of its end, and with attributes after `:`.
    """
    if name := re.fullmatch(r"<(\w+)>", text):
        return rf"</?{name[1]}(?::[\s\d,:\[\]]{{0,64}})?>"
    return pattern_of(text) + (r"\s{0,8}?(?=\S|\s{9})" if text[-1:].isspace() else "")


def is_markup(mark: str) -> bool:
    """Return true if a mark is one by its brackets; others are words that an answer may contain."""
    return _MARK.search(mark) is not None


def _any(texts: Iterable[str], pattern_of: Callable[[str], str] = _flexible) -> str:
    return "|".join(pattern_of(text) for text in sorted(texts, key=len, reverse=True) if text.strip())


def _group(name: str, pattern: str) -> str:
    return f"(?P<{name}>{pattern})" if pattern else ""


def _either(patterns: Iterable[str]) -> str:
    return "|".join(re.sub(r"\(\?P<\w+>", "(?:", pattern) for pattern in patterns if pattern) or _NEVER


def _compile(patterns: Iterable[str]) -> Any:
    return regex.compile("|".join(pattern for pattern in patterns if pattern) or _NEVER)
