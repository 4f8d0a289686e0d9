"""The reader of an answer in a given syntax."""

from collections.abc import Mapping
from typing import Any

from jaxserve.answers.parsing.answer import AnswerReader
from jaxserve.answers.parsing.harmony import HarmonyReader
from jaxserve.answers.parsing.reader import Reader
from jaxserve.answers.syntaxes.syntax import Channels, Syntax


def reader_of(
    syntax: Syntax,
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    is_open: bool,
    is_begun: bool = False,
    max_calls: int | None = None,
) -> AnswerReader:
    """Return the reader of one answer in a syntax. `schemas` are those of the parameters of tools that are offered, by
    name; `is_open`: the prompt ends in thoughts, which have text already if they are `is_begun`; calls beyond
    `max_calls` are dropped.
    """
    if syntax.calls is not None and isinstance(syntax.calls.arguments, Channels):
        return HarmonyReader(schemas, max_calls=max_calls)
    return Reader(syntax, schemas, is_open=is_open, is_begun=is_begun, max_calls=max_calls)
