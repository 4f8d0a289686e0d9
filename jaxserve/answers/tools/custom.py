"""Custom tools, which take a text: their definitions, their calls, and a call's arguments read back as that text.

To the model such a tool is a function of one argument, `input`. A regular expression for the text is enforced as the
argument's pattern, and so is a Lark grammar without recursion, rewritten as one (`lark_regex`).
"""

import functools
import json
import re
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.answers.tools.cut_json import as_object, paired
from jaxserve.answers.tools.lark_regex import lark_regex

INPUT = "input"
_BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_PIECE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]))|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
)
"""Complete characters of a JSON text."""


class Grammar(msgspec.Struct, kw_only=True):
    """The texts that a tool takes: a Lark grammar, or a regular expression."""

    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(msgspec.Struct, kw_only=True):
    """What a tool takes: any text, or that of a grammar."""

    type: Literal["text", "grammar"]
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if self.type == "grammar" and self.grammar is None:
            raise ValueError("Object missing required field `grammar`")


class Custom(msgspec.Struct, kw_only=True):
    """A tool that takes a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of its texts, if there is one."""
        return None if self.format is None else self.format.grammar

    @property
    def told(self) -> str:
        """The description for the model, with the grammar."""
        grammar = self.grammar
        parts = [self.description or ""]
        if grammar is not None:
            kind = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
            parts.append(f"The text `{INPUT}` follows this {kind}:\n{grammar.definition}")
        return "\n\n".join(part for part in parts if part)


def input_schema(custom: Custom) -> tuple[dict[str, Any], bool]:
    """Return the parameters of the function that stands for a custom tool, and whether they hold the text to its
    grammar.
    """
    grammar, pattern = custom.grammar, None
    if grammar is not None:
        pattern = _lark_pattern(grammar.definition)
        if grammar.syntax == "regex":  # of the whole text, with or without anchors
            pattern = re.sub(r"^\^|(?<!\\)\$$", "", grammar.definition)
    text: dict[str, Any] = {"type": "string", "description": "The text that the tool takes, unchanged."}
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return schema, pattern is not None


_lark_pattern = functools.lru_cache(maxsize=64)(lark_regex)


class CustomCall(msgspec.Struct, kw_only=True):
    """The tool's name, and the text that it is given."""

    name: str
    input: str

    @property
    def arguments(self) -> str:
        """The arguments of the function that stands for the tool, as JSON."""
        return msgspec.json.encode({INPUT: self.input}).decode()


class CustomCallDelta(msgspec.Struct, kw_only=True):
    """The new part of a call: first the name, then pieces of the text."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


def text_of(arguments: str) -> str:
    """Return the text in the arguments of a call."""
    reader = InputReader()
    return reader.push(arguments) + reader.finish()


class InputReader:
    """Reads the text of one call from the pieces of its arguments."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._buffer = ""
        self._is_inside = False

    def push(self, piece: str) -> str:
        """Return what is new of the text."""
        self._arguments.append(piece)
        self._buffer += piece
        if not self._is_inside:
            beginning = _BEGINNING.match(self._buffer)
            if beginning is None:
                return ""
            self._is_inside, self._buffer = True, self._buffer[beginning.end() :]
        characters = _PIECE.match(self._buffer)
        length = 0 if characters is None else characters.end()
        text = json.loads(f'"{paired(self._buffer[:length])}"', strict=False)  # models write control characters
        self._buffer = self._buffer[length:]
        return text

    def finish(self) -> str:
        """Return the rest of the text.

        A model that has not heeded the schema may have written any other argument, or no object: that is the text,
        then.
        """
        if self._is_inside:  # what is left is the end of the arguments, or half a character
            return ""
        arguments = "".join(self._arguments)
        values = list(as_object(arguments).values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
