"""Writes the rules of a Lark grammar by which calls are written as a syntax says.

What the reader needs no pattern for, the grammar need not know either: a text that a mark ends is any text without it.
Where arguments between tags could not be held to their schema, the call is written as an object, which readers read in
any syntax.
"""

import json
import re
from collections.abc import Callable, Sequence

from jaxserve.server.parsing.syntax import Calls, Channels, Ids, Object, Thoughts, Wrapped
from jaxserve.server.parsing.tools import Tool
from jaxserve.structured.grammar import json_rule

_SPACE = r"[ \t\r\n]"

Spell = Callable[[str], str]
"""How a grammar writes a text: marks that are one token of the tokenizer as that, all else as text."""


def literal(text: str) -> str:
    """Return a text in a Lark rule."""
    return json.dumps(text, ensure_ascii=False)


def call_rules(calls: Calls, tools: Sequence[Tool], *, spell: Spell, is_parallel: bool) -> str:
    """Return rules of which `calls` is one call of these tools, or several."""
    if isinstance(calls.arguments, Channels):
        return "calls: " + "\n    | ".join(_channel_call(tool, spell) for tool in tools)
    opening, closing = (f"{calls.section[0]}[", f"]{calls.section[1]}") if calls.is_list else calls.section
    if calls.is_bare and not calls.is_list:
        opening = ""
    more = f"({_sequence(spell(calls.separator), 'call')})*" if is_parallel and calls.is_parallel else ""
    whole = _sequence(spell(opening), "call", more, spell(closing))
    return f"calls: {whole}\ncall: " + "\n    | ".join(_call(calls, tool, spell) for tool in tools)


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
    """Return rules for `thoughts`, for the `rest` of thoughts that are open, and for white space behind them.

    Thoughts end with the first text that reads like their end, or with a token: that is no text. `endings` are texts
    that would end them to the reader too, and that they have none of.
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
    return _sequence(spell(head), json_rule(tool.parameters))


def _call(calls: Calls, tool: Tool, spell: Spell) -> str:
    opening, closing = calls.call
    if isinstance(calls.arguments, Object):
        before, _, after = calls.name[1].partition("{index}")
        index = "/[0-9]/" if calls.ids is Ids.NUMBERED else ""
        head = [spell(f"{opening}{calls.name[0]}{tool.name}{before}"), index, spell(after)]
        return _sequence(*head, json_rule(tool.parameters), spell(closing))
    wrapped = calls.arguments if isinstance(calls.arguments, Wrapped) else Wrapped()
    return _sequence(spell(opening), _object(wrapped, tool), spell(_object_end(calls)))


def _object(wrapped: Wrapped, tool: Tool) -> str:
    name = json.dumps(tool.name)
    if not wrapped.name:
        return _sequence(literal(f"{{{name}: "), json_rule(tool.parameters), literal("}"))
    number = [literal(f'{{"{wrapped.id}": "'), "/[0-9]/", literal('", ')] if wrapped.id else [literal("{")]
    keys = literal(f'"{wrapped.name}": {name}, "{wrapped.arguments}": ')
    return _sequence(*number, keys, json_rule(tool.parameters), literal("}"))


def _sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part and part != '""')


def _object_end(calls: Calls) -> str:
    """Return what closes a call that is written as an object: where arguments are tags, not their own end."""
    if isinstance(calls.arguments, Wrapped):
        return calls.call[1]
    return calls.call[1].splitlines()[-1] if calls.call[0] else ""
