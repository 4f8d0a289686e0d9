"""How the served model writes thoughts and tool calls: chosen by the operator, or read off its chat template."""

import re
import secrets
import string
from collections.abc import Sequence

from jaxserve.request import StructuredOutputs
from jaxserve.server.parsing import harmony
from jaxserve.server.parsing.answer import AnswerReader
from jaxserve.server.parsing.events import CallStart
from jaxserve.server.parsing.harmony import HarmonyReader
from jaxserve.server.parsing.reader import Reader
from jaxserve.server.parsing.syntax import Calls, Channels, Ids, Object, Syntax, Tags, Thoughts
from jaxserve.server.parsing.table import REASONING_PARSERS, TOOL_PARSERS
from jaxserve.server.parsing.thoughts import ReasoningCounter
from jaxserve.server.parsing.tools import Tool
from jaxserve.server.parsing.writer import call_rules, literal, message_rules, thought_rules
from jaxserve.structured.grammar import compose, lark_grammar, make_grammar
from jaxserve.tokenizer import Tokenizer

_ANY_OBJECT = {"type": "object"}


class ModelSyntax:
    """One model's syntax: makes the reader of an answer, and the grammar that it must follow if there is one.

    Attributes:
        knows_tools: whether it is known how the model calls tools.
        thoughts: how it writes thoughts; None: it has none, or they are messages of harmony.
        calls: how it writes calls; where that is not known, how it is made to.
    """

    def __init__(self, tokenizer: Tokenizer, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"):
        """The names are keys of TOOL_PARSERS and REASONING_PARSERS, "auto" or "none"."""
        template = tokenizer.chat_template or ""
        self._tokenizer = tokenizer
        calls = _infer_calls(template) if tool_call_parser == "auto" else tool_call_parser
        thoughts = _infer_thoughts(template) if reasoning_parser == "auto" else reasoning_parser
        if "gpt_oss" in (calls, thoughts):  # its channels carry both
            calls = thoughts = "gpt_oss"
        self.names = (calls, thoughts)
        self.knows_tools = calls != "none"
        self.has_channels = calls == "gpt_oss"
        self.thoughts = None if self.has_channels else REASONING_PARSERS.get(thoughts)
        # Where nothing is known, forced calls are written in the most common syntax.
        rows = TOOL_PARSERS.get(calls, TOOL_PARSERS["hermes"])
        self.calls = next((row for row in rows if _shows(row, template)), rows[0])

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
        if self.has_channels:
            return HarmonyReader(schemas, max_calls=max_calls)
        return Reader(Syntax(self.calls, self.thoughts), schemas, is_open=is_open, max_calls=max_calls)

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
        match self.calls.ids:
            case Ids.NINE:
                return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
            case Ids.NUMBERED:
                return start.id or f"functions.{start.name}:{number}"
            case _:
                return f"call_{secrets.token_hex(12)}"

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
        wish: StructuredOutputs | None,
    ) -> str:
        """Return what an answer must be: calls of these tools, or the `wish`, or one of them; "" is anything.

        Without either, words are free, and so are calls, but those of strict tools (`follows_strict`). Thoughts are
        free in any case. Raises InvalidRequest, naming the field, for a wish that is not supported.
        """
        has_answer = wish is not None and not must_call
        is_free = wish is None and not must_call
        if is_free:
            if not self.follows_strict(tools):
                return ""
            tools = [tool if tool.is_strict else tool._replace(parameters=_ANY_OBJECT) for tool in tools]
        if wish is not None and not tools and not self.has_thoughts:
            return make_grammar(wish)
        rules, bodies = [], []
        if tools:
            rules.append(call_rules(self.calls, tools, spell=self._spell, is_parallel=is_parallel))
            bodies.append("calls")
        if has_answer:
            bodies.append("final" if self.has_channels else "@answer")
        before = ""
        if self.has_channels:
            rules.append(message_rules(self._spell, "@answer" if has_answer else "HARMONY_TEXT"))
            before = "(analysis | preamble)* " if is_free else "analysis* "
            bodies += ["final"] if is_free else []
        elif self.thoughts is not None:
            rules.append(thought_rules(self.thoughts, spell=self._spell))
            before = "rest SPACES " if is_open else "(thoughts SPACES)? "
        if is_free and not self.has_channels:
            rules.append(f"WORDS: /(.|\\n)*/ & ~/(.|\\n)*{re.escape((self._trigger or '').strip())}(.|\\n)*/")
            bodies = ["WORDS calls?"]
        lark = "\n".join([f"start: {before}({' | '.join(bodies)})", *rules])
        return compose(wish, lark) if wish is not None and has_answer else lark_grammar(lark, param="tools")

    def _spell(self, text: str) -> str:
        """Write a text in a grammar: added tokens as tokens, all else as text."""
        parts = self._tokenizer.split_at_added_tokens(text)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else literal(part) for part in parts)


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


def _shows(row: Calls | Thoughts, template: str) -> bool:
    """Return whether a template shows a syntax by which it is unmistakable."""
    is_shown = bool(row.signs) and all(sign in template for sign in row.signs)
    return is_shown and not any(sign in template for sign in row.not_signs)


def _infer_calls(template: str) -> str:
    """Return the name of the one syntax that a template shows; "none" if there is none, or more than one."""
    found = [name for name, rows in TOOL_PARSERS.items() if any(_shows(row, template) for row in rows)]
    return found[0] if len(found) == 1 else "none"


def _infer_thoughts(template: str) -> str:
    found = [name for name, row in REASONING_PARSERS.items() if _shows(row, template)]
    return found[0] if len(found) == 1 else "none"
