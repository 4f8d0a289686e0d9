"""Answers and the events that are read from them, for the tests of the readers."""

import itertools

from jaxserve.answers.parsing.events import CallArguments, CallStart, joined
from jaxserve.answers.parsing.harmony import HarmonyReader
from jaxserve.answers.parsing.reader import Reader
from jaxserve.answers.syntaxes.syntax import Channels, Syntax
from jaxserve.answers.syntaxes.table import TOOL_PARSERS

NAMES = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"place": {"type": "array", "items": {"type": "number"}}},
    },
    "now": {"type": "object"},
    "f": {},
}


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tagged(name, **arguments):
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def call(name, arguments="{}"):
    return [CallStart(name), CallArguments(arguments)]


def reader(name, tools=NAMES, *, thoughts=None, **options):
    (first, *_) = TOOL_PARSERS[name]
    if isinstance(first.arguments, Channels):
        options.pop("is_open", None)
        return HarmonyReader(tools, **options)
    return Reader(Syntax(first, thoughts), tools, **options)


def read(parser, pieces, *, is_cut=False):
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish(is_cut=is_cut)])


def cut(text, places):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(bounds)]
