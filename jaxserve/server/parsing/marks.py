"""The patterns that a reader looks for, made once a syntax. All of them are bounded, whatever a model writes."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import regex

from jaxserve.server.literals.text import ValueEnds
from jaxserve.server.syntaxes.syntax import Calls, Elements, Object, PythonCall, Tags, Thoughts, Wrapped

_NAME = r"(?P<name>[\w.-]{1,128}+)(?=[^\w.-])"  # what follows must have arrived
_GAP = r"\s{0,8}"
_PIECES = re.compile(r"<[^<>]*>?|\[/?[A-Z_]+\]|[^<>\[]+|\[")
_MARK = re.compile(r"\]<\]\w+\[>\[</?\w+>|<[^<>]+>(?:\w+<[^<>]+>)*|\[/?[A-Z_]+\]|◁[^▷]+▷")
_NEVER = r"(?!)"
_DSML = "｜DSML｜"  # noqa: RUF001
_FENCE = r"```[a-z]{0,8}+(?=[^a-z])"
_JSON = r"\{\s{0,8}[\"'}]"
_NOISE = rf"[\[\])}},;]|{_FENCE}"

KEY = regex.compile(
    r"(?P<quote>[\"'])(?P<key>[^\"'\\]{1,200})(?P=quote)\s{0,8}:\s{0,8}|(?P<key>\w{1,64})\s{0,8}:\s{0,8}"
)
"""A key of an object that calls a tool."""

TEXT_NAME = regex.compile(r"(?P<quote>[\"'])(?P<name>[^\"'\\]{1,128})(?P=quote)")
"""A tool's name as a text of JSON."""


class Marks:
    """Patterns by their purpose; the names of groups say which mark it is."""

    def __init__(self, calls: Calls | None, thoughts: Thoughts | None):
        """Compile the patterns of a syntax."""
        calls = calls or Calls(arguments=Wrapped())
        thoughts = thoughts or Thoughts(opening=(), closing=())
        tags = calls.arguments if isinstance(calls.arguments, Tags) else Tags(key=("", ""), value=("", ""))
        sections = [calls.section, *calls.others]
        openings = [
            _group("section", _any((opening for opening, end in sections if _MARK.search(end)), _section)),
            _group("call", _any([calls.call[0], *(first for first, closing in sections if not _MARK.search(closing))])),
        ]
        section_ends = [_section(mark) for _, closing in sections for mark in _MARK.findall(closing)]
        ends = [_drifting(mark) for mark in _MARK.findall(calls.call[1])]
        closings = [*section_ends, *ends]
        pieces = _PIECES.findall(calls.name[0].strip())
        tag = pieces[-1] if pieces and pieces[-1].startswith("<") and not pieces[-1].endswith(">") else ""
        prefix, tag = _flexible("".join(pieces[:-1])), _attribute(tag)
        space = re.escape(calls.arguments.mark) if isinstance(calls.arguments, Elements) else ""
        begins = [*openings, _group("begin", f"(?:{space})?{tag}" if tag and space else tag)]
        if "{name}" in calls.call[0]:  # only there: the same tag may be shown to the user
            begins = openings
        thinks, unthinks = _group("opening", _any(thoughts.opening)), _group("closing", _any(thoughts.closing))
        answers = [_group("answer", _flexible(thoughts.answer[0])), _group("answer_end", _flexible(thoughts.answer[1]))]
        hidden = _group("hidden", "|".join(map(_hidden, thoughts.hidden)))
        line = _group("line", rf"\n{_bare(calls)}" if calls.is_bare else "")

        # What ends words, and what ends thoughts.
        after = _group("end", "|".join(closings + ([_flexible(calls.separator)] if "<" in calls.separator else [])))
        self.in_words = _compile([*begins, line, thinks, unthinks, *answers, after, hidden])
        self.in_thoughts = _compile([thinks, unthinks, *(begins if thoughts.calls_end else ()), hidden])

        # What may begin a call without a mark; the opening mark of a section that has an end, or of a call.
        self.bare = regex.compile(_bare(calls)) if calls.is_bare else None
        self.opening = _compile(openings)

        # The closing mark of a section; any closing mark, with white space before it; that of a call, or remains that
        # models leave around it; what ends text inside a section that belongs to no call; what is not shown after one.
        self.section_end = _compile(section_ends) if section_ends else None
        self.closing = regex.compile(rf"{_GAP}(?:{_either(closings)})")
        noise = _NOISE.replace(r"\]", "") if space else _NOISE  # tags begin with a bracket there
        self.ending = _compile([_group("end", "|".join(ends)), noise])
        self.leftover = _compile([*begins, unthinks, *section_ends, *ends, r"\{" if tags.key[0] == "" else ""])
        self.spare = regex.compile(
            rf"^(?:\s*+(?!{_either(openings)})(?:{_either([*section_ends, *ends, noise, '```'])}))+"
        )

        # The name with the text before it, and the name alone; the text between the name and the arguments; what these
        # begin or end with, which confirms an uncertain name; what ends missing arguments.
        gap = _GAP if calls.name[0][-1:].isspace() else ""
        word = "".join(re.findall(r"^\w+(?=[^\w\s])", calls.name[0]))  # it may be missing: functions.f, .f
        before = f"(?:{word})?" + _flexible(calls.name[0].removeprefix(word))
        names = [rf"(?:{prefix}{_GAP})?{tag}{_NAME}"] if tag else [rf"{before}{gap}{_NAME}", _NAME]
        after_tag = r"[\"']?[^\S\n]{0,8}(?:>|(?=[\n<]))" if tag else ""
        self.names = tuple(regex.compile(name + after_tag) for name in names)
        self.after_name = _compile(_after_name(calls))
        is_numbered = calls.name[1].startswith(":{index}")
        argument_mark = _flexible(calls.name[1].partition("{index}")[2])
        self.nameless = regex.compile(rf"(?:{word})?\W?\d{{1,9}}+{_GAP}{argument_mark}") if is_numbered else None
        key_opening = _attribute(tags.key[0])
        starts = {Wrapped: r"\{", PythonCall: r"\(", Tags: rf"{key_opening}|{_JSON}", Elements: rf"{space}<|{_JSON}"}
        self.arguments = _compile([starts.get(type(calls.arguments), r"[\{\[]"), *section_ends, *ends, *openings])
        self.ends = _compile([*section_ends, *ends, *openings])

        # What ends an incomplete JSON value.
        head = rf"(?:(?:{_either(openings)}){_GAP}){{{0 if tag else 1},2}}{names[0]}"
        is_wrapped = isinstance(calls.arguments, Wrapped)
        self.value_ends = _value_ends(calls, openings, [] if is_wrapped else [head], closings)

        # The tags of elements, and what ends them all.
        self.element_tag = regex.compile(rf"{space}<(?P<slash>/?)(?P<name>[^<>/\n]{{1,200}})>")
        self.elements_end = _compile([*closings, *begins])

        # Parts of an argument between tags.
        quotes = "\"'" if tags.key[0].endswith('"') else '"'
        whole_key = key_opening + ("" if tags.key[0].strip().endswith(">") else r"[^<>\n]{1,200}>")
        end = _group("end", "|".join(closings))
        self.tags = tags
        self.key = _compile([_group("key", key_opening), end, *begins])
        self.key_end = regex.compile(rf"{_GAP}(?P<key>[^<>{quotes}\n]{{0,199}}[^<>\"'\s]){_GAP}{_key_end(tags)}")
        kind = r"<[\w|]{0,24}type>[^<>]{0,64}</[\w|]{0,24}type>"  # of the value, which the schema knows
        self.value = regex.compile(rf"(?:{kind}{_GAP})?{_flexible(tags.value[0]) or _NEVER}")
        value_end = _group("value", _drifting(tags.value[1].strip()))
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
    return r"\[" if isinstance(calls.arguments, PythonCall) else rf"(?:```(?:json)?{_GAP})?[\[{{]"


def _after_name(calls: Calls) -> list[str]:
    """Return the text between a name and its arguments: an index, marks, the head of a code block."""
    marks = [_group("mark", _flexible(mark)) for mark in _MARK.findall("".join(calls.name))]
    if re.fullmatch(r"\s*\w[\w\s]*", calls.name[1]):  # words
        marks.append(_group("mark", _flexible(calls.name[1])))
    index = _group("index", r":\d{1,9}+(?=\D)") if calls.name[1].startswith(":{index}") else ""
    if calls.name[1].startswith('" '):  # further attributes of the tag
        marks.append(_group("mark", r"[\"'][^<>\n]{0,64}(?=<)"))
    return [index, *marks, _group("id", r"\[CALL_ID\][\w-]{1,64}+(?=[^\w-])"), _FENCE]


def _key_end(tags: Tags) -> str:
    """Return the text between a key and its value; the group `flag` says whether the value is a text."""
    if tags.text_flag:
        flag = rf"{_flexible(tags.text_flag)}\"?(?P<flag>\w{{1,8}})\"?"
        quote = r"[\"']" if tags.key[1] == '"' else _flexible(tags.key[1])
        return rf"{quote}(?:{_GAP}{flag})?[^<>\n]{{0,64}}{_flexible(tags.value[0].lstrip('"'))}"
    closing = tags.key[1].strip()
    if closing.startswith("</"):
        return rf"(?:{_drifting(closing)}|(?={_flexible(tags.value[0]) or _NEVER}))"
    return r"[\"']?[^\S\n]{0,8}(?:>|(?=\n))" if closing else _NEVER


def _flexible(text: str) -> str:
    """Return a pattern of a mark, with any white space where it has some, and between two tags; a word of DSML may have
    a blank before it.
    """
    parts = re.sub(r">(?=<)", "> ", text.strip()).split()
    pattern = _GAP.join(regex.escape(part) for part in parts)
    return pattern.replace(r"\{name\}", r"[\w.-]{1,128}+").replace(_DSML, f"{_DSML} ?")


def _section(mark: str) -> str:
    """Return a pattern of a mark of a section; in DSML, models misspell its word."""
    match = re.fullmatch(rf"(</?){_DSML}\w+>\s*", mark)
    return rf"{match[1]}{_DSML} ?(?!invoke|parameter)\w{{1,24}}>" if match else _drifting(mark)


def _attribute(text: str) -> str:
    """Return a pattern of a tag up to the value of its attribute, whose quote may be missing or another one."""
    mark = text.strip()
    return _flexible(mark.removesuffix('"')) + (r"[\"']?+(?=[^\"'])" if mark[-1:] in ('"', "=") else "")


def _drifting(mark: str) -> str:
    """Return a pattern of an end tag as models misspell it."""
    if match := re.fullmatch(r"</([^<>｜]+)>", mark):  # noqa: RUF001
        return rf"<\s{{0,4}}/\s{{0,4}}{regex.escape(match[1])}[\w=.: -]{{0,64}}>"
    return _flexible(mark)


def _hidden(text: str) -> str:
    """Return a pattern of a text that is not shown; if it is a tag, also of its end, and with attributes after `:`."""
    name = re.fullmatch(r"<(\w+)>", text)
    return rf"</?{name[1]}(?::[\s\d,:\[\]]{{0,64}})?>" if name else regex.escape(text)


def _any(texts: Iterable[str], pattern_of: Callable[[str], str] = _flexible) -> str:
    return "|".join(pattern_of(text) for text in sorted(texts, key=len, reverse=True) if text.strip())


def _group(name: str, pattern: str) -> str:
    return f"(?P<{name}>{pattern})" if pattern else ""


def _either(patterns: Iterable[str]) -> str:
    return "|".join(re.sub(r"\(\?P<\w+>", "(?:", pattern) for pattern in patterns if pattern) or _NEVER


def _compile(patterns: Iterable[str]) -> Any:
    return regex.compile("|".join(pattern for pattern in patterns if pattern) or _NEVER)
