"""Answers as models write them: a chat template's rendering of an assistant's message, for each syntax."""

import json
from dataclasses import replace
from typing import NamedTuple

from jaxserve.answers.parsing.events import CallArguments, CallStart, Content, Reasoning
from jaxserve.answers.parsing.harmony import HarmonyReader
from jaxserve.answers.parsing.reader import Reader
from jaxserve.answers.syntaxes.syntax import Channels, Elements, Object, PythonCall, Syntax, Tags, Wrapped
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS


class Message(NamedTuple):
    content: str = ""
    calls: tuple = ()  # pairs of a name and arguments
    reasoning: str = ""


def rows():
    """Every form of every syntax of calls, by name; further names of one are left out."""
    found = {}
    for name, forms in TOOL_PARSERS.items():
        for index, row in enumerate(forms):
            if row.signs or row not in found.values():
                found[name if index == 0 else f"{name}-{index}"] = row
    aliases = {replace(row, signs=()) for row in found.values() if row.signs}
    return {name: row for name, row in found.items() if row not in aliases}


def thoughts_of(name):
    """Return the thoughts that a model with these calls writes."""
    name = name.partition("-")[0]
    found = REASONING_PARSERS.get(name, REASONING_PARSERS["glm45" if name == "glm47" else "deepseek_r1"])
    return found if found.closing or name == "gpt_oss" else REASONING_PARSERS["deepseek_r1"]


def reader(calls, tools, *, thoughts=None, **options):
    if isinstance(calls.arguments, Channels):
        return HarmonyReader(tools, **{name: value for name, value in options.items() if name != "is_open"})
    return Reader(Syntax(calls, thoughts), tools, **options)


def read(parser, pieces, *, is_cut=False):
    """Parse a text in pieces, and return what is reported as a message; arguments stay text."""
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(is_cut=is_cut)
    texts = {Content: "", Reasoning: ""}
    calls = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        else:
            texts[type(event)] += event.text
    return Message(texts[Content], tuple(calls), texts[Reasoning])


def read_alike(calls, tools, text, *, is_cut=False, **options):
    """Parse a text in one piece, in single characters and in pieces of 5, which all report the same, and return it."""
    whole = read(reader(calls, tools, **options), [text], is_cut=is_cut)
    for size in (1, 5):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(reader(calls, tools, **options), pieces, is_cut=is_cut) == whole
    return whole


def loaded(message):
    """Return the message with arguments parsed."""
    return message._replace(calls=tuple((name, json.loads(arguments)) for name, arguments in message.calls))


def message_of(syntax, text, tools, *, size=4096, **options):
    """Return the words, the thoughts and the calls in an answer, whose text is pushed in pieces of `size`
    characters.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    message = loaded(read(Reader(syntax, schemas, **options), pieces))
    return message.content, message.reasoning, list(message.calls)


def write(calls, thoughts, message):
    if isinstance(calls.arguments, Channels):
        return _write_channels(message)
    text = thoughts.opening[0] + message.reasoning + thoughts.closing[0] if message.reasoning else ""
    opening, closing = thoughts.answer if thoughts and message.reasoning and message.content else ("", "")
    text += opening + message.content + closing
    if not message.calls:
        return text
    written = [_write_call(calls, name, arguments, index) for index, (name, arguments) in enumerate(message.calls)]
    body = calls.separator.join(written)
    body = f"[{body}]" if calls.is_list else body
    opening = "" if calls.is_bare else calls.section[0]
    return f"{text}\n{opening}{body}{calls.section[1] if opening else ''}"


def _write_call(calls, name, arguments, index):
    opening = calls.call[0].replace("{name}", name)
    head = calls.name[0].replace("{server}", "tools") + name + calls.name[1].replace("{index}", str(index))
    match calls.arguments:
        case Wrapped(name=""):
            body = dumps({name: arguments})
        case Wrapped(name=key, arguments=arguments_key, id=id_key):
            body = dumps(({id_key: str(index)} if id_key else {}) | {key: name, arguments_key: arguments})
        case Object(quote='"'):
            body = head + dumps(arguments)
        case Object(quote=quote):
            body = head + own(arguments, quote)
        case PythonCall():
            body = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        case Elements(mark=mark):
            body = head + (_write_elements(mark, arguments) if arguments else "")
        case Tags() as tags:
            body = head + "".join(_write_tag(tags, key, value) for key, value in arguments.items())
    return opening + body + calls.call[1]


def _write_tag(tags, key, value):
    text = value if isinstance(value, str) else dumps(value)
    flag = tags.text_flag + _flag(tags, value) if tags.text_flag else ""
    return tags.key[0] + key + tags.key[1] + flag + tags.value[0] + text + tags.value[1]


def _write_elements(mark, value):
    if not value or not isinstance(value, dict | list):
        return value if isinstance(value, str) else dumps(value)
    items = value.items() if isinstance(value, dict) else (("item", each) for each in value)
    return "".join(f"{mark}<{name}>{_write_elements(mark, each)}{mark}</{name}>" for name, each in items)


def _flag(tags, value):
    if len(tags.flags) == 2:
        return tags.flags[not isinstance(value, str)]
    kinds = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    return kinds.get(type(value), "number")


def _write_channels(message):
    parts = []
    if message.reasoning:
        parts.append(f"<|channel|>analysis<|message|>{message.reasoning}<|end|>")
    if message.content:
        channel = "commentary" if message.calls else "final"
        parts.append(f"<|channel|>{channel}<|message|>{message.content}<|end|>")
    for name, arguments in message.calls:
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        parts.append(f"{head}{dumps(arguments)}<|call|>")
    return "<|start|>assistant".join(parts)


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def own(value, quote):
    """Write a value in a syntax with its own quotes and unquoted keys."""
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{key}:{own(each, quote)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(own(each, quote) for each in value) + "]"
        case _:
            return json.dumps(value)
