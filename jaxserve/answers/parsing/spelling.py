"""Marks of a syntax as patterns: with the white space and the misspellings of models, never longer than a bound."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import regex

GAP = r"\s{0,8}"
NEVER = r"(?!)"


def flexible(text: str, *, prefix: str = "", no_name: str = "") -> str:
    """Return a pattern of a mark, with any white space where it has some, and between two tags; after the `prefix` of
    tags there may be a blank. The pattern `no_name` is in front of a name in the mark.
    """
    parts = re.sub(r">(?=<)", "> ", text.strip()).split()
    pattern = GAP.join(regex.escape(part) for part in parts)
    pattern = pattern.replace(r"\{name\}", rf"{no_name}[\w.-]{{1,128}}+").replace(r"\{server\}", r"[^<>\n]{0,64}")
    return pattern.replace(prefix, f"{prefix} ?") if prefix else pattern


def section_mark(mark: str, *, prefix: str) -> str:
    """Return a pattern of a mark of a section; if its tags have a `prefix`, models misspell the word after it."""
    match = re.fullmatch(rf"(</?){re.escape(prefix)} ?\w+>\s*", mark) if prefix else None
    word = r"(?!invoke|parameter)\w{1,24}"  # the tags inside a section
    return rf"{match[1]}{prefix} ?{word}>" if match else end_tag(mark, prefix=prefix)


def tag_to_value(text: str, *, prefix: str) -> str:
    """Return a pattern of a tag up to the value of its attribute, whose quote may be missing or another one."""
    mark = text.strip()
    quote = r"[\"']?+(?=[^\"'])" if mark[-1:] in ('"', "=") else ""
    return flexible(mark.removesuffix('"'), prefix=prefix) + quote


def end_tag(mark: str, *, prefix: str) -> str:
    """Return a pattern of an end tag as models misspell it."""
    match = re.fullmatch(r"</([^<>｜]+)>", mark)  # noqa: RUF001
    if match and not prefix:
        return rf"<\s{{0,4}}/\s{{0,4}}{regex.escape(match[1])}[\w=.: -]{{0,64}}>"
    return flexible(mark, prefix=prefix)


def no_beginning(text: str) -> str:
    """Return a pattern that looks ahead: what follows begins unlike `text`, white space aside."""
    others = (
        f"{regex.escape(text[:index])}[^{regex.escape(text[index])}{'' if index else r'\s'}]"
        for index in range(min(len(text), 8))
    )
    return rf"(?=\s{{0,8}}+(?:{'|'.join(others)})|\s{{9}})"


def hidden_text(text: str, pattern_of: Callable[[str], str]) -> str:
    """Return a pattern of a text that is not shown, with the blanks after it if it ends in one; if it is a tag, also
    of its end, and with attributes after `:`.
    """
    if name := re.fullmatch(r"<(\w+)>", text):
        return rf"</?{name[1]}(?::[\s\d,:\[\]]{{0,64}})?>"
    return pattern_of(text) + (r"\s{0,8}?(?=\S|\s{9})" if text[-1:].isspace() else "")


def any_of(texts: Iterable[str], pattern_of: Callable[[str], str] = flexible) -> str:
    """Return a pattern of one of these marks, the longest first; "" if there are none."""
    return "|".join(pattern_of(text) for text in sorted(texts, key=len, reverse=True) if text.strip())


def group(name: str, pattern: str) -> str:
    """Return a pattern in a named group; "" if it is empty."""
    return f"(?P<{name}>{pattern})" if pattern else ""


def either(patterns: Iterable[str]) -> str:
    """Return a pattern of one of these without their named groups, NEVER if there are none."""
    return "|".join(re.sub(r"\(\?P<\w+>", "(?:", pattern) for pattern in patterns if pattern) or NEVER


def compiled(patterns: Iterable[str]) -> Any:
    """Compile a pattern of one of these, NEVER if there are none."""
    return regex.compile("|".join(pattern for pattern in patterns if pattern) or NEVER)
