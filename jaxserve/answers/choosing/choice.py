"""Choose the syntax in which a model's answers are read, and record what the choice was based on."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxserve.answers.choosing.derive import derive
from jaxserve.answers.choosing.response_template import UnsupportedTemplate, from_response_template
from jaxserve.answers.syntaxes.syntax import Calls, Channels, Syntax, Thoughts
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.tokenizer import Tokenizer

HARMONY = "gpt_oss"
_HARMONY_THOUGHTS = (REASONING_PARSERS[HARMONY], replace(REASONING_PARSERS[HARMONY], signs=()))
FROM_CHECKPOINT = ("hf", "response_template")
"""Options that demand what "auto" looks at first: the checkpoint's own response_template."""


class Origin(NamedTuple):
    """The name of a syntax ("" if it is in no table), and what it was chosen by."""

    name: str
    by: str

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.name, self.by]))


_BY_OPTION = "by the option"
_BY_CHECKPOINT = "as the checkpoint's response_template says"
_BY_MARKS = "by marks of the chat template"
_BY_TURNS = "as the chat template writes turns"
_NONE = Origin("not parsed", "no known syntax in the chat template")


class Choice(NamedTuple):
    """A model's syntax, where its two parts come from, and what the checkpoint specifies that is not supported."""

    syntax: Syntax
    calls: Origin
    thoughts: Origin
    refused: str = ""

    def rows(self) -> list[list[str]]:
        """Return rows of title and text that describe the choice, for the overview."""
        refused = [["not followed", self.refused]] if self.refused else []
        return [["tool calls", str(self.calls)], ["reasoning", str(self.thoughts)], *refused]


def choose(tokenizer: Tokenizer | None, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> Choice:
    """Choose the syntax of a model: by the option, else the checkpoint's own, else the one of the table whose marks its
    chat template shows, else one that is read off the turns which that template writes.

    The options are names of the tables, "none", "auto" or one of FROM_CHECKPOINT; without a tokenizer "auto" is "none".
    Raises ConfigError for another name, and if the checkpoint has no response_template that can be followed.
    """
    finder = _Finder(tokenizer)
    calls, call_origin = finder.calls(tool_call_parser)
    thoughts, thought_origin = finder.thoughts(reasoning_parser)
    if _has_channels(calls) or thoughts in _HARMONY_THOUGHTS:  # these carry both
        origin = call_origin if _has_channels(calls) else thought_origin
        calls, thoughts = TOOL_PARSERS[HARMONY][0], REASONING_PARSERS[HARMONY]
        call_origin = thought_origin = origin._replace(name=HARMONY)
    return Choice(Syntax(calls, thoughts), call_origin, thought_origin, finder.refused)


def rows_of(path: str) -> list[list[str]]:
    """Return rows that describe the syntax of a model directory or GGUF file; none if the model is not for chats."""
    try:
        tokenizer = Tokenizer.load(path)
    except CheckpointError:  # the weights may have no tokenizer
        return []
    return choose(tokenizer).rows() if tokenizer.has_chat_template else []


class _Finder:
    """Finds the syntax of one model; what takes time is computed only when it is needed."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._template = "" if tokenizer is None else tokenizer.chat_template or ""
        self.refused = ""

    def calls(self, name: str) -> tuple[Calls | None, Origin]:
        """Return how calls are written."""
        calls, origin = self._part(name, "tool_call_parser", TOOL_PARSERS, lambda syntax: syntax.calls)
        if name == "auto" and origin.by == _BY_CHECKPOINT and calls is not None:
            calls = _spaced_like(calls, self._derived.calls)
        return calls, origin

    def thoughts(self, name: str) -> tuple[Thoughts | None, Origin]:
        """Return how thoughts are written."""
        rows = {found: (row,) for found, row in REASONING_PARSERS.items()}
        return self._part(name, "reasoning_parser", rows, lambda syntax: syntax.thoughts)

    def _part[Part: Calls | Thoughts](
        self, name: str, param: str, table: Mapping[str, Sequence[Part]], of: Callable[[Syntax], Part | None]
    ) -> tuple[Part | None, Origin]:
        if name == "none":
            return None, Origin(name, _BY_OPTION)
        if name in FROM_CHECKPOINT:
            if (own := of(self._own)) is None:
                why = self.refused or "the checkpoint's tokenizer_config.json has none that describes this"
                raise ConfigError(f"{param} {name!r} reads the answer by response_template: {why}")
            return own, Origin(name, _BY_CHECKPOINT)
        if name != "auto":
            if name not in table:
                names = ", ".join((*FROM_CHECKPOINT, *table))
                raise ConfigError(f"{param} must be auto, none or one of {names}, not {name!r}")
            return next((row for row in table[name] if self._shows(row)), table[name][0]), Origin(name, _BY_OPTION)
        if (own := of(self._own)) is not None:
            return own, Origin("", _BY_CHECKPOINT)
        for found, rows in table.items():
            for row in filter(self._shows, rows):
                return row, Origin(found, _BY_MARKS)
        derived = of(self._derived)
        return derived, _NONE if derived is None else Origin("", _BY_TURNS)

    def _shows(self, row: Calls | Thoughts) -> bool:
        """Return whether the chat template has the marks of a row, if this can be known by marks."""
        return bool(row.signs) and all(sign in self._template for sign in row.signs)

    @functools.cached_property
    def _own(self) -> Syntax:
        """The syntax that the checkpoint itself specifies."""
        spec = None if self._tokenizer is None else self._tokenizer.response_template
        if spec is None:
            return Syntax()
        try:
            return from_response_template(spec)
        except UnsupportedTemplate as error:
            self.refused = str(error)
            return Syntax()

    @functools.cached_property
    def _derived(self) -> Syntax:
        return derive(self._tokenizer) if self._tokenizer is not None and self._template else Syntax()


def _spaced_like(own: Calls, derived: Calls | None) -> Calls:
    """Return the checkpoint's own calls with white space as its chat template has it: patterns allow for any."""

    def marks(calls: Calls) -> list[str]:
        texts = [*calls.section, *calls.call, *calls.name, repr(calls.arguments).replace(r"\n", ""), str(calls.is_list)]
        return ["".join(text.split()) for text in texts]

    return derived if derived is not None and marks(derived) == marks(own) else own


def _has_channels(calls: Calls | None) -> bool:
    return calls is not None and isinstance(calls.arguments, Channels)
