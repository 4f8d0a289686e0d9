"""Write the rules of a Lark grammar for calls in a given syntax.

Where the reader needs no pattern, the grammar needs none either: a text that a mark ends is any text without that mark.
If arguments that are written one by one cannot be held to their schema, the call has an object instead, which the
reader accepts in any syntax.
"""

import json
import logging
import re
from collections.abc import Sequence

from jaxserve.answers.forcing.arguments import PythonArguments, Spell, TaggedArguments, Unsayable, literal, sequence
from jaxserve.answers.syntaxes.syntax import Calls, Channels, Elements, Object, PythonCall, Tags, Thoughts, Wrapped
from jaxserve.answers.tools.tool import Tool
from jaxserve.structured.grammar import json_rule

_SPACE = r"[ \t\r\n]"
_ANY_OBJECT = {"type": "object"}
_logger = logging.getLogger(__name__)


def call_rules(calls: Calls, tools: Sequence[Tool], *, spell: Spell, is_parallel: bool, is_free: bool = False) -> str:
    """Return rules of which `calls` is one call of these tools, or several. `is_free`: those of tools that are not
    strict may have any arguments.
    """
    frees = [is_free and not tool.is_strict for tool in tools]
    tools = [tool._replace(parameters=_ANY_OBJECT) if free else tool for tool, free in zip(tools, frees, strict=True)]
    if isinstance(calls.arguments, Channels):
        return "calls: " + "\n    | ".join(_channel_call(tool, spell) for tool in tools)
    opening, closing = (f"{calls.section[0]}[", f"]{calls.section[1]}") if calls.is_list else calls.section
    if calls.is_bare and not calls.is_list:
        opening = ""
    more = f"({sequence(spell(calls.separator), 'call')})*" if is_parallel and calls.is_parallel else ""
    whole = sequence(spell(opening), "call", more, spell(closing))
    rules = [f"calls: {whole}", *_native_rules(calls, spell)]
    written = []
    for index, (tool, free) in enumerate(zip(tools, frees, strict=True)):
        native = _native_call(calls, tool, spell=spell, is_free=free, prefix=f"call{index}_")
        written.append(_object_call(calls, tool, spell) if native is None else native[0])
        rules += [] if native is None else native[1]
    return "\n".join([*rules, "call: " + "\n    | ".join(written)])


def message_rules(spell: Spell, answer: str) -> str:
    """Return rules for harmony's messages: `analysis`, thoughts, and `preamble`, words before a call, both with the
    beginning of the next message; and `final`, to the reader, whose text is the rule `answer`. HARMONY_TEXT is left to
    the caller: any text.
    """
    end = spell("<|end|><|start|>assistant")
    return "\n".join(
        (
            f"analysis: {spell('<|channel|>analysis<|message|>')} HARMONY_TEXT {end}",
            f"preamble: {spell('<|channel|>commentary<|message|>')} HARMONY_TEXT {end}",
            f"final: {spell('<|channel|>final<|message|>')} {answer}",
        )
    )


def thought_rules(thoughts: Thoughts, *, spell: Spell, endings: Sequence[str]) -> str:
    """Return rules for `thoughts`, for the `rest` of open thoughts, and for the white space after them.

    Thoughts end with the first text that reads like their end, or with a token, which is not text. `endings` are
    further texts that would end them for the reader; thoughts do not contain them.
    """
    openings = [spell(opening.strip()) for opening in thoughts.opening]
    tokens = [closing for closing in (spell(text.strip()) for text in thoughts.closing) if closing.startswith("<[")]
    return "\n".join(
        (
            f"thoughts: ({' | '.join(openings)}) rest",
            " | ".join(["rest: ended", *(f"THOUGHTS {closing}" for closing in tokens)]),
            "ended[lazy]: THOUGHTS CLOSING",
            f"CLOSING: /{_any(thoughts.closing)}/",
            f"THOUGHTS: {any_text(without=endings)}",
            "SPACES: /[ \\n]{0,4}/",
        )
    )


def any_text(*, without: Sequence[str] = (), beginning: Sequence[str] = ()) -> str:
    """Return a terminal for any text that has none of the texts `without`, and does not begin with one of `beginning`,
    whatever white space is in or before these.
    """
    terminal = "/(.|\\n)*/"
    if without:
        terminal += f" & ~/(.|\\n)*({_any(without)})(.|\\n)*/"
    if beginning:
        terminal += f" & ~/{_SPACE}*({_any(beginning)})(.|\\n)*/"
    return terminal


def _any(texts: Sequence[str]) -> str:
    """Return an expression for one of these texts."""
    patterns = (rf"{_SPACE}{{0,8}}".join(re.escape(part) for part in text.split()) for text in texts)
    return "|".join(patterns).replace("/", r"\/")


def _channel_call(tool: Tool, spell: Spell) -> str:
    head = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
    return sequence(spell(head), json_rule(tool.parameters))


def _native_rules(calls: Calls, spell: Spell) -> list[str]:
    return [TaggedArguments(calls, calls.arguments, spell).rules()] if isinstance(calls.arguments, Tags) else []


def _native_call(calls: Calls, tool: Tool, *, spell: Spell, is_free: bool, prefix: str) -> tuple[str, list[str]] | None:
    """Return a call whose arguments are written one by one, and its rules, whose names begin with `prefix`; None if the
    syntax has no such calls, or if they cannot be held to the tool's schema.
    """
    opening, closing = calls.call[0].replace("{name}", tool.name), calls.call[1]
    rules = []
    try:
        match calls.arguments:
            case Tags() as tags:
                writer = TaggedArguments(calls, tags, spell)
                arguments = writer.write_free() if is_free else writer.write(tool.parameters)
                head = _head(calls, opening, tool, spell)
            case PythonCall():
                writer = PythonArguments(prefix)
                arguments = writer.write_free() if is_free else writer.write(tool.parameters)
                rules = writer.rules
                head, closing = spell(f"{opening}{tool.name}("), f"){closing}"
            case _:
                return None
    except Unsayable as error:
        _logger.debug("calls of %s are written as objects: %s", tool.name, error)
        return None
    return sequence(head, arguments, spell(closing)), rules


def _head(calls: Calls, opening: str, tool: Tool, spell: Spell) -> str:
    """Return a part of a rule for what comes before the arguments."""
    before, number, after = calls.name[1].partition("{index}")
    first = calls.name[0].replace("{server}", "tools")
    return sequence(spell(f"{opening}{first}{tool.name}{before}"), "/[0-9]/" if number else "", spell(after))


def _object_call(calls: Calls, tool: Tool, spell: Spell) -> str:
    opening, closing = calls.call[0].replace("{name}", tool.name), calls.call[1]
    if isinstance(calls.arguments, Object | Tags | Elements):
        return sequence(_head(calls, opening, tool, spell), json_rule(tool.parameters), spell(closing))
    wrapped = calls.arguments if isinstance(calls.arguments, Wrapped) else Wrapped()
    return sequence(spell(opening), _object(wrapped, tool), spell(closing))


def _object(wrapped: Wrapped, tool: Tool) -> str:
    name = json.dumps(tool.name)
    if not wrapped.name:
        return sequence(literal(f"{{{name}: "), json_rule(tool.parameters), literal("}"))
    number = [literal(f'{{"{wrapped.id}": "'), "/[0-9]/", literal('", ')] if wrapped.id else [literal("{")]
    keys = literal(f'"{wrapped.name}": {name}, "{wrapped.arguments}": ')
    return sequence(*number, keys, json_rule(tool.parameters), literal("}"))
