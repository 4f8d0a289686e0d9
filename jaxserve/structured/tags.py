"""Write a structural tag, vLLM's and xgrammar's description of a text with tagged parts, as a Lark grammar.

A format is written together with what ends it, as free text goes on until the first of the texts that may follow it.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llguidance import regex_to_lark

from jaxserve.structured.equivalents import Unfollowable

_MAX_DEPTH = 32
_MAX_REPEATED = 1000
_MAX_RULES = 500
_FREE = ("any_text", "triggered_tags", "regex")
"""Formats that have no end of their own before other text."""


class End(NamedTuple):
    """A text that ends a format, and the part of a rule for what comes after it."""

    text: str
    after: str


Schema = Callable[[Any, str], str]
"""Writes a JSON schema, which is at a path of the tag, as part of a Lark rule."""


def tag_lark(tag: Any, schema: Schema) -> str:
    """Return the Lark grammar of a structural tag: a tree of formats, or vLLM's earlier `structures` and `triggers`.

    Raises Unfollowable, which names what is not supported, and where it is.
    """
    writer = _Writer(schema)
    _must(isinstance(tag, dict), "must be an object", "#")
    if "structures" in tag or "triggers" in tag:
        body = writer.write(_of_structures(tag), "#", [])
    else:
        _must("format" in tag, "needs format, or structures and triggers", "#")
        body = writer.write(tag["format"], "#/format", [])
    return "\n".join([f"start: {body or '""'}", *writer.rules])


def _of_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the format of vLLM's earlier form."""
    structures = tag.get("structures")
    _must(isinstance(structures, list) and structures, "must be a list of tags", "#/structures")
    assert isinstance(structures, list)
    for index, each in enumerate(structures):
        _must(isinstance(each, dict), "must be an object", f"#/structures/{index}")
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin"),
            "content": {
                "type": "json_schema",
                "json_schema": each.get("schema", each.get("structural_tag_schema", {})),
            },
            "end": each.get("end"),
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Writes formats as parts of rules; `rules` are those to which these refer."""

    def __init__(self, schema: Schema):
        self.rules: list[str] = []
        self._schema = schema
        self._depth = 0

    def write(self, given: Any, path: str, ends: Sequence[End]) -> str:
        """Return a part of a rule for a format and one of its ends; without any, the text ends with it."""
        _must(isinstance(given, dict) and isinstance(given.get("type"), str), "must be an object with a type", path)
        self._depth += 1
        _must(self._depth <= _MAX_DEPTH, "is nested too deeply", path)
        kind = given["type"]
        match kind:
            case "any_text":
                written = self._free_text(_texts(given, "excludes", path, default=[]), ends)
            case "triggered_tags":
                written = self._triggered(given, path, ends)
            case "regex":
                _must("excludes" not in given or not given["excludes"], "is not supported", f"{path}/excludes")
                pattern = f"/{regex_to_lark(_text(given, 'pattern', path), use_ascii='d')}/"
                written = self._until(pattern, ends)
            case "sequence":
                written = self._sequence(_formats(given, "elements", path), path, ends)
            case "tag":
                written = self._tag(given, path, ends, skipped="")
            case "or":
                elements = _formats(given, "elements", path)
                written = _either(self.write(each, f"{path}/elements/{i}", ends) for i, each in enumerate(elements))
            case _:
                written = _then(self._bounded(given, kind, path), self._end(ends))
        self._depth -= 1
        return written

    def _bounded(self, given: dict[str, Any], kind: str, path: str) -> str:
        """Return a part of a rule for a format that has an end of its own."""
        match kind:
            case "const_string":
                return _literal(_text(given, "value", path))
            case "json_schema":
                style = given.get("style", "json")
                _must(style == "json", f"{style!r:.40} is not supported", f"{path}/style")
                return self._schema(given.get("json_schema"), f"{path}/json_schema")
            case "tags_with_separator":
                return self._separated(given, path)
            case "optional" | "star" | "plus":
                sign = {"optional": "?", "star": "*", "plus": "+"}[kind]
                return f"({self._closed(given, path)}){sign}"
            case "repeat":
                least, most = given.get("min", 0), given.get("max", -1)
                for name, value in (("min", least), ("max", most)):
                    is_right = isinstance(value, int) and -1 <= value <= _MAX_REPEATED
                    _must(is_right, f"must be a number of at most {_MAX_REPEATED}", f"{path}/{name}")
                limit = "" if most == -1 else str(most)
                return f"({self._closed(given, path)}){{{least},{limit}}}"
        _must(False, f"a format of type {kind[:40]!r} is not supported", path)
        raise AssertionError

    def _closed(self, given: dict[str, Any], path: str) -> str:
        """Return the content of a format that repeats it."""
        content = given.get("content")
        kind = content.get("type") if isinstance(content, dict) else None
        _must(kind not in _FREE or kind == "regex", f"{kind!r} has no end here", f"{path}/content")
        return self.write(content, f"{path}/content", [])

    def _free_text(self, excludes: Sequence[str], ends: Sequence[End]) -> str:
        return self._until(_any_text(excludes), ends) if ends else self._rule(_any_text(excludes), is_terminal=True)

    def _until(self, terminal: str, ends: Sequence[End]) -> str:
        """Return a part of a rule for the shortest text of a terminal with one of the ends, or any if there is none."""
        if not ends:
            return self._rule(terminal, is_terminal=True)
        closed = [each for each in ends if each.text]
        _must(len(closed) == len(ends), "a text that ends nowhere is followed by others", "#")
        text = self._rule(terminal, is_terminal=True)
        return _either(_then(self._rule(f"{text} {_literal(end.text)}", is_lazy=True), end.after) for end in ends)

    def _sequence(self, elements: Sequence[Any], path: str, ends: Sequence[End], *, start: int = 0) -> str:
        """Return a part of a rule for the elements from `start` on and one of the ends."""
        if start == len(elements):
            return self._end(ends)
        element, here = elements[start], f"{path}/elements/{start}"
        if start == len(elements) - 1:
            return self.write(element, here, ends)
        if isinstance(element, dict) and element.get("type") in _FREE:
            following = elements[start + 1]
            firsts = _firsts(following)
            _must(firsts, f"{element['type']!r} must be followed by a text that is known", here)
            next_ends = [
                End(first, self._sequence_after(elements, path, ends, start=start + 1, first=first)) for first in firsts
            ]
            return self.write(element, here, next_ends)
        rest = self._sequence(elements, path, ends, start=start + 1)
        return _then(self.write(element, here, []), rest)

    def _sequence_after(
        self, elements: Sequence[Any], path: str, ends: Sequence[End], *, start: int, first: str
    ) -> str:
        """Return a part of a rule for elements whose first text, `first`, has been written."""
        element, here = elements[start], f"{path}/elements/{start}"
        rest = self._sequence(elements, path, ends, start=start + 1)
        options = element["elements"] if element["type"] == "or" else [element]
        written = []
        for option in options:
            if first in _firsts(option):
                inner = "" if option["type"] == "const_string" else self._tag(option, here, [], skipped=first)
                written.append(_then(inner, rest))
        return _either(written)

    def _tag(self, given: Any, path: str, ends: Sequence[End], *, skipped: str) -> str:
        """Return a part of a rule for a tag without the beginning that has been `skipped`."""
        _must(isinstance(given, dict), "must be an object", path)
        begin = _text(given, "begin", path)
        closings = _texts(given, "end", path)
        after = self._end(ends)
        inner_ends = [] if closings == [""] and not ends else [End(text, after) for text in closings]
        if closings == [""] and ends:
            inner_ends = list(ends)
        content = self.write(given.get("content"), f"{path}/content", inner_ends)
        return _then(_literal(begin.removeprefix(skipped)), content)

    def _triggered(self, given: dict[str, Any], path: str, ends: Sequence[End]) -> str:
        """Return a part of a rule for free text in which a tag must follow each trigger."""
        triggers = _texts(given, "triggers", path)
        tags = _formats(given, "tags", path)
        excludes = _texts(given, "excludes", path, default=[])
        _must(triggers and all(triggers), "must be texts", f"{path}/triggers")
        options: dict[str, list[str]] = {}
        stops = given.get("stop_after_first") is True
        for index, tag in enumerate(tags):
            here = f"{path}/tags/{index}"
            begin = _text(tag, "begin", here) if isinstance(tag, dict) else ""
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            _must(trigger is not None, "must begin with a trigger", f"{here}/begin")
            assert trigger is not None
            options.setdefault(trigger, []).append(self._tag(tag, here, ends if stops else [], skipped=trigger))
        ended = [End(trigger, _either(written)) for trigger, written in options.items()]
        text = _any_text(excludes)
        one = self._until(text, ended)
        if stops:
            return one if given.get("at_least_one") is True else _either([one, self._free_text(excludes, ends)])
        repeated = f"({one}){'+' if given.get('at_least_one') is True else '*'}"
        return _then(repeated, self._free_text(excludes, ends))

    def _separated(self, given: dict[str, Any], path: str) -> str:
        tags = _formats(given, "tags", path)
        separator = _text(given, "separator", path)
        one = _either(self._tag(tag, f"{path}/tags/{index}", [], skipped="") for index, tag in enumerate(tags))
        more = "" if given.get("stop_after_first") is True else f"({_then(_literal(separator), one)})*"
        whole = _then(one, more)
        return whole if given.get("at_least_one") is True else f"({whole})?"

    def _end(self, ends: Sequence[End]) -> str:
        return _either(_then(_literal(end.text), end.after) for end in ends) if ends else ""

    def _rule(self, body: str, *, is_lazy: bool = False, is_terminal: bool = False) -> str:
        """Add a rule, or a terminal, and return its name."""
        _must(len(self.rules) < _MAX_RULES, "is too large", "#")
        name = f"{'PART' if is_terminal else 'part'}{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
        return name


def _firsts(given: Any) -> list[str]:
    """Return the texts with one of which a format begins, [] if they are not known."""
    if not isinstance(given, dict):
        return []
    match given.get("type"):
        case "const_string" if isinstance(given.get("value"), str):
            return [given["value"]] if given["value"] else []
        case "tag" if isinstance(given.get("begin"), str):
            return [given["begin"]] if given["begin"] else []
        case "or" if isinstance(given.get("elements"), list):
            firsts = [_firsts(each) for each in given["elements"]]
            return list(dict.fromkeys(text for each in firsts for text in each)) if all(firsts) else []
    return []


def _any_text(excludes: Sequence[str]) -> str:
    without = "|".join(_escaped(text) for text in excludes)
    return r"/(.|\n)*/" + (rf" & ~/(.|\n)*({without})(.|\n)*/" if without else "")


def _escaped(text: str) -> str:
    """Return an expression for a text in a Lark grammar."""
    return "".join(each if each.isalnum() else f"\\u{{{ord(each):x}}}" for each in text)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _then(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _either(parts: Any) -> str:
    parts = list(dict.fromkeys(parts))
    if parts == [""]:
        return ""
    some = [part for part in parts if part]
    return f"({' | '.join(some)}){'?' if '' in parts else ''}"


def _text(given: dict[str, Any], name: str, path: str) -> str:
    value = given.get(name)
    _must(isinstance(value, str), "must be a text", f"{path}/{name}")
    assert isinstance(value, str)
    return value


def _texts(given: dict[str, Any], name: str, path: str, *, default: list[str] | None = None) -> list[str]:
    value = given.get(name)
    if value is None and default is not None:
        return default
    texts = [value] if isinstance(value, str) else value
    _must(isinstance(texts, list) and texts != [], "must be a text, or texts", f"{path}/{name}")
    assert isinstance(texts, list)
    _must(all(isinstance(text, str) for text in texts), "must be a text, or texts", f"{path}/{name}")
    return texts


def _formats(given: dict[str, Any], name: str, path: str) -> list[Any]:
    value = given.get(name)
    _must(isinstance(value, list) and value != [], "must be a list of formats", f"{path}/{name}")
    assert isinstance(value, list)
    return value


def _must(is_right: object, problem: str, path: str) -> None:
    if not is_right:
        raise Unfollowable(f"{path}: {problem}")
