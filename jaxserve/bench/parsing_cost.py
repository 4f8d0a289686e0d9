"""`jaxserve bench parsing`: how many characters a second are parsed in each syntax, and the cost of the worst input.

Text arrives in pieces of four characters, about one token, as in a stream. The worst inputs are pushed one character at
a time: blank lines, marks that lead to no call, brackets and quotes that never close.
"""

import json
import time
from collections.abc import Sequence

from jaxserve.answers.parsing.answer import AnswerReader
from jaxserve.answers.parsing.harmony import HarmonyReader
from jaxserve.answers.parsing.reader import Reader
from jaxserve.answers.syntaxes.syntax import Calls, Channels, Syntax, Thoughts
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.bench.report import table
from jaxserve.errors import InvalidRequest

_TOOLS = {"look_up": {"type": "object", "properties": {"word": {"type": "string"}}}}
_PIECE = 4
_WORDS = "The quokka, a small marsupial, lives on Rottnest Island {really}. "


def run(*, names: Sequence[str], num_characters: int) -> str:
    """Parse `num_characters` of words, of one call and of each worst input, in the syntaxes `names` (all if empty).

    Returns the report. Raises InvalidRequest for an unknown name.
    """
    if unknown := [name for name in names if name not in TOOL_PARSERS]:
        raise InvalidRequest(f"no syntax {unknown[0]!r}; there are: {', '.join(TOOL_PARSERS)}", param="syntax")
    rows = []
    for name in names or TOOL_PARSERS:
        calls = TOOL_PARSERS[name][0]
        speeds = [
            num_characters / _seconds(calls, text[:num_characters], piece=_PIECE) / 1e6
            for text in (_WORDS * (num_characters // len(_WORDS) + 1), _call(calls, num_characters))
        ]
        worst = {
            title: _seconds(calls, (text * num_characters)[:num_characters], piece=1)
            for title, text in _worst_inputs(calls).items()
        }
        title = max(worst, key=worst.__getitem__)
        rows.append([name, *(f"{speed:.2f}" for speed in speeds), f"{worst[title] * 1e6 / num_characters:.1f}", title])
    header = ["syntax", "words, M/s", "a call, M/s", "worst, us a character", "of"]
    return table(header, rows)


def _reader(calls: Calls) -> AnswerReader:
    if isinstance(calls.arguments, Channels):
        return HarmonyReader(_TOOLS)
    return Reader(Syntax(calls, Thoughts()), _TOOLS)


def _seconds(calls: Calls, text: str, *, piece: int) -> float:
    """Return the CPU time in which a text is read piece by piece."""
    reader = _reader(calls)
    start = time.process_time()
    for position in range(0, len(text), piece):
        reader.push(text[position : position + piece])
    reader.finish()
    return max(time.process_time() - start, 1e-9)


def _opening(calls: Calls) -> str:
    if isinstance(calls.arguments, Channels):
        return "<|channel|>commentary to=functions.look_up<|message|>"
    return calls.section[0] + calls.call[0]


def _call(calls: Calls, length: int) -> str:
    """Return a call with one long argument, as an object, which readers read in any syntax."""
    arguments = json.dumps({"word": "quokka " * (length // 7 + 1)})
    if isinstance(calls.arguments, Channels):
        return _opening(calls) + arguments
    return f'{_opening(calls)}{{"name": "look_up", "arguments": {arguments}}}'


def _worst_inputs(calls: Calls) -> dict[str, str]:
    return {
        "blank lines": "\n",
        "marks": _opening(calls) or "{",
        "brackets": "<",
        "thoughts": "<think>",
        "quotes": "'\\\"",
    }
