"""How the served model writes thoughts and tool calls: readers of its answers, and grammars that they follow."""

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.parsing import harmony
from jaxserve.server.parsing.answer import AnswerReader
from jaxserve.server.parsing.events import CallStart
from jaxserve.server.parsing.harmony import HarmonyReader
from jaxserve.server.parsing.reader import Reader
from jaxserve.server.parsing.syntax import Calls, Channels, Ids, Object, Syntax, Tags
from jaxserve.server.parsing.table import TOOL_PARSERS
from jaxserve.server.parsing.thoughts import ReasoningCounter
from jaxserve.server.parsing.tools import Tool
from jaxserve.server.parsing.writer import call_rules, literal, message_rules, thought_rules
from jaxserve.structured.grammar import compose, lark_grammar
from jaxserve.tokenizer import Tokenizer

_ANY_OBJECT = {"type": "object"}


class ModelSyntax:
    """One model's syntax: makes the reader of an answer, and the grammar that it must follow if there is one.

    Attributes:
        knows_tools: whether it is known how the model calls tools.
        thoughts: how it writes thoughts; None: it has none, or they are messages of harmony.
        calls: how it writes calls; where that is not known, how it is made to.
    """

    def __init__(self, tokenizer: Tokenizer, syntax: Syntax):
        """`syntax` is what has been chosen for the model (`choosing`)."""
        self._tokenizer = tokenizer
        self.knows_tools = syntax.calls is not None
        # Where nothing is known, forced calls are written in the most common syntax.
        self.calls = syntax.calls or TOOL_PARSERS["hermes"][0]
        self.has_channels = isinstance(self.calls.arguments, Channels)
        self.thoughts = None if self.has_channels else syntax.thoughts

    @property
    def has_thoughts(self) -> bool:
        """Whether it is known how the model writes thoughts."""
        return self.thoughts is not None or self.has_channels

    def visible_special_tokens(self, tools: Sequence[Tool]) -> frozenset[int]:
        """Return the special tokens that the reader of an answer must see in its text."""
        texts = [] if self.thoughts is None else [*self.thoughts.opening, *self.thoughts.closing, *self.thoughts.answer]
        if tools or self.has_channels:
            texts += call_texts(self.calls)
        parts = (part for text in texts for part in self._tokenizer.split_at_added_tokens(text))
        return frozenset(part for part in parts if part in self._tokenizer.special_token_ids)

    def reader(self, tools: Sequence[Tool], *, is_open: bool, max_calls: int | None) -> AnswerReader | None:
        """Return the reader of one answer; None if the text is the answer. `is_open`: its prompt ends in thoughts."""
        if not (tools or self.has_thoughts):
            return None
        schemas = {tool.name: tool.parameters for tool in tools}
        return reader_of(Syntax(self.calls, self.thoughts), schemas, is_open=is_open, max_calls=max_calls)

    def reasoning_counter(self, tools: Sequence[Tool], *, is_open: bool) -> ReasoningCounter | None:
        """Return what counts the tokens of the thoughts in an answer; None if there are none."""
        if not self.has_thoughts:
            return None
        reader = self.reader(tools, is_open=is_open, max_calls=None)
        assert reader is not None
        tokenizer = self._tokenizer
        return ReasoningCounter(reader, token_text=tokenizer.token_text, special_token_ids=tokenizer.special_token_ids)

    def call_id(self, start: CallStart, number: int) -> str:
        """Return an id for the call `number` of an answer, as this model's template takes it back."""
        return call_id(self.calls.ids, start, number)

    def follows_strict(self, tools: Sequence[Tool]) -> bool:
        """Return whether one of the tools is strict, and a call of it that nothing forces can be held to its schema:
        where a single token begins every call, and no other text.
        """
        return self.knows_tools and self._trigger is not None and any(tool.is_strict for tool in tools)

    @property
    def _trigger(self) -> str | None:
        """The mark that begins every call, where that is one token, and calls are written in no other way."""
        opening = "<|channel|>" if self.has_channels else self.calls.section[0] or self.calls.call[0]
        if self.calls.is_bare or isinstance(self.calls.arguments, Tags):
            return None
        first = self._tokenizer.split_at_added_tokens(opening)[0]
        return opening if isinstance(first, int) else None

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        is_open: bool,
        must_call: bool,
        is_parallel: bool,
        answer: str | None,
    ) -> str:
        """Return what an answer must be: calls of these tools, or what the grammar text `answer` says, or one of them;
        "" is anything. The parameters of tools that are followed come from `arguments_schema`.

        Without either, words are free, and so are calls, but those of strict tools (`follows_strict`). Thoughts are
        free in any case. Raises InvalidRequest, naming the field, for tools that are too long together.
        """
        is_free = answer is None and not must_call
        if is_free:
            if not self.follows_strict(tools):
                return ""
            tools = [tool if tool.is_strict else tool._replace(parameters=_ANY_OBJECT) for tool in tools]
        if answer is not None and not tools and not self.has_thoughts:
            return answer
        rules, bodies = [], []
        if tools:
            rules.append(call_rules(self.calls, tools, spell=self._spell, is_parallel=is_parallel))
            bodies.append("calls")
        if answer is not None:
            bodies.append("final" if self.has_channels else "@answer")
        before = ""
        if self.has_channels:
            rules.append(message_rules(self._spell, "HARMONY_TEXT" if answer is None else "@answer"))
            before = "(analysis | preamble)* " if is_free else "analysis* "
            bodies += ["final"] if is_free else []
        elif self.thoughts is not None:
            rules.append(thought_rules(self.thoughts, spell=self._spell))
            before = "rest SPACES " if is_open else "(thoughts SPACES)? "
        if is_free and not self.has_channels:
            rules.append(f"WORDS: /(.|\\n)*/ & ~/(.|\\n)*{re.escape((self._trigger or '').strip())}(.|\\n)*/")
            bodies = ["WORDS calls?"]
        lark = "\n".join([f"start: {before}({' | '.join(bodies)})", *rules])
        return lark_grammar(lark, param="tools") if answer is None else compose(answer, lark)

    def _spell(self, text: str) -> str:
        """Write a text in a grammar: added tokens as tokens, all else as text."""
        parts = self._tokenizer.split_at_added_tokens(text)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else literal(part) for part in parts)


def reader_of(
    syntax: Syntax, schemas: Mapping[str, Mapping[str, Any]], *, is_open: bool, max_calls: int | None = None
) -> AnswerReader:
    """Return the reader of one answer in a syntax. `schemas` are those of the parameters of tools that are offered, by
    name; `is_open`: the prompt ends in thoughts; calls beyond `max_calls` are dropped.
    """
    if syntax.calls is not None and isinstance(syntax.calls.arguments, Channels):
        return HarmonyReader(schemas, max_calls=max_calls)
    return Reader(syntax, schemas, is_open=is_open, max_calls=max_calls)


def call_id(ids: Ids, start: CallStart, number: int) -> str:
    """Return an id for the call `number` of an answer, of a kind that a chat template takes back."""
    match ids:
        case Ids.NINE:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        case Ids.NUMBERED:
            return start.id or f"functions.{start.name}:{number}"
        case _:
            return f"call_{secrets.token_hex(12)}"


def call_texts(calls: Calls) -> list[str]:
    """Return all texts that the marks of calls are in."""
    if isinstance(calls.arguments, Channels):
        return [*harmony.MARKS]
    texts = [*calls.section, *calls.call, *calls.name]
    match calls.arguments:
        case Object(quote=quote):
            texts.append(quote)
        case Tags(key=key, value=value):
            texts += [*key, *value]
    return texts
