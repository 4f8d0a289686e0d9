"""How the served model writes thoughts and tool calls: readers of its answers, and the grammars that constrain them."""

import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.server.parsing import harmony
from jaxserve.server.parsing.answer import AnswerReader
from jaxserve.server.parsing.events import CallStart
from jaxserve.server.parsing.harmony import HarmonyReader
from jaxserve.server.parsing.reader import Reader
from jaxserve.server.parsing.syntax import Calls, Channels, Ids, Object, Syntax, Tags
from jaxserve.server.parsing.table import TOOL_PARSERS
from jaxserve.server.parsing.thoughts import ReasoningCounter
from jaxserve.server.parsing.tools import Tool
from jaxserve.server.parsing.writer import any_text, call_rules, literal, message_rules, thought_rules
from jaxserve.structured.grammar import Limit, compose, lark_grammar, limited
from jaxserve.tokenizer import Tokenizer


class _Start(NamedTuple):
    """The beginning of an answer in a grammar; each part is put before what follows it.

    Attributes:
        rules: the rules that the other parts refer to.
        free: thoughts, if there are any.
        none: the beginning without thoughts.
        opening: what opens thoughts; "" if they are already open.
        thoughts: thoughts to their end, without what opens them.
        closing: the end of thoughts, and what follows it.
    """

    rules: str = ""
    free: str = ""
    none: str = ""
    opening: str = ""
    thoughts: str = ""
    closing: str = ""


class ModelSyntax:
    """One model's syntax: makes the reader of an answer, and the grammar that the answer must follow, if any.

    Attributes:
        knows_tools: true if it is known how the model calls tools.
        thoughts: how it writes thoughts; None if it has none, or if they are harmony messages.
        calls: how it writes calls; if that is not known, the syntax that it is constrained to.
    """

    def __init__(self, tokenizer: Tokenizer, syntax: Syntax, *, vocab_size: int):
        """Initialize with the syntax that `choosing` chose for the model; only tokens below `vocab_size` are
        sampled.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.knows_tools = syntax.calls is not None
        # If nothing is known, forced calls are written in the most common syntax.
        self.calls = syntax.calls or TOOL_PARSERS["hermes"][0]
        self.has_channels = isinstance(self.calls.arguments, Channels)
        self.thoughts = None if self.has_channels else syntax.thoughts

    @property
    def has_thoughts(self) -> bool:
        """True if it is known how the model writes thoughts."""
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
        """Return a counter of the thoughts' tokens in an answer; None if the model writes no thoughts."""
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
        if self.calls.is_bare:
            return None
        parts = self._tokenizer.split_at_added_tokens(opening)
        return opening if parts and isinstance(parts[0], int) else None

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        is_open: bool,
        must_call: bool,
        is_parallel: bool,
        answer: str | None,
        budget: int | None = None,
        continues_message: bool = False,
    ) -> str:
        """Return the grammar of an answer: calls of these tools, or what the grammar text `answer` describes, or one of
        the two; "" if anything is allowed. The parameters of constrained tools come from `arguments_schema`.

        Without either, words are free, and so are calls except those of strict tools (`follows_strict`). Thoughts are
        free, or end after `budget` tokens. If the answer `continues_message`, it begins inside the message of its
        words, without the header of a new one. Raises InvalidRequest, naming the field, if the tools together are too
        long.
        """
        is_free = answer is None and not must_call
        is_strict = is_free and self.follows_strict(tools)
        if is_free and budget is None and not is_strict:
            return ""
        if answer is not None and not must_call and self.has_channels and continues_message:
            return answer
        if answer is not None and not tools and not self.has_thoughts:
            return answer
        rules, bodies = [], []
        if tools and (is_strict or self.has_channels or not is_free):
            rules.append(call_rules(self.calls, tools, spell=self._spell, is_parallel=is_parallel, is_free=is_free))
            bodies.append("calls")
        if answer is not None:
            bodies.append("final" if self.has_channels else "@answer")
        if self.has_channels:
            rules.append(message_rules(self._spell, "HARMONY_TEXT" if answer is None else "@answer"))
            bodies += ["final"] if is_free else []
        elif is_free:
            rules.append(self._word_rules(tools, is_strict=is_strict, is_limited=budget is not None))
            bodies = ["words calls?" if is_strict else "words"]
        if self.has_channels:
            start = self._channel_start(is_free=is_free, is_limited=budget is not None)
        else:
            start = self._start(tools, is_open=is_open)
        rules.append(start.rules)

        def text(before: str) -> str:
            lark = "\n".join([f"start: {before}({' | '.join(bodies)})", *rules])
            return lark_grammar(lark, param="tools") if answer is None else compose(answer, lark)

        if budget is None:
            return text(start.free)
        if budget == 0:
            return text(start.closing if is_open else start.none)
        # A token may hold the end of the opening and what follows.
        opening = f"start: ({start.opening}) ANY\nANY: {any_text()}"
        limit = Limit(
            budget,
            opening=lark_grammar(opening, param="tools") if start.opening else "",
            during=lark_grammar(f"start: {start.thoughts}\n{start.rules}", param="tools"),
            after=text(start.closing),
        )
        return limited(text(start.free), limit)

    def _start(self, tools: Sequence[Tool], *, is_open: bool) -> "_Start":
        """Return the beginning of an answer if thoughts are between marks."""
        thoughts = self.thoughts
        if thoughts is None:
            return _Start()
        return _Start(
            rules=thought_rules(
                thoughts, spell=self._spell, endings=call_marks(self.calls) if tools and thoughts.calls_end else ()
            ),
            free="rest SPACES " if is_open else "(thoughts SPACES)? ",
            opening="" if is_open else " | ".join(self._spell(opening.strip()) for opening in thoughts.opening),
            thoughts="rest",
            closing=f"{self._spell(thoughts.closing[0].strip())} SPACES ",
        )

    def _channel_start(self, *, is_free: bool, is_limited: bool) -> "_Start":
        """Return the beginning of an answer if thoughts are messages. If they are limited, there is at most one."""
        before = "preamble* " if is_free else ""
        free = "(analysis | preamble)* " if is_free else "analysis* "
        return _Start(
            rules="HARMONY_TEXT: /(.|\\n)*/",
            free=f"analysis? {before}" if is_limited else free,
            none=before,
            opening=self._spell("<|channel|>analysis<|message|>"),
            thoughts=f"HARMONY_TEXT {self._spell(harmony.END)}",
            closing=f"{self._spell(f'{harmony.END}{harmony.START}assistant')} {before}",
        )

    def _word_rules(self, tools: Sequence[Tool], *, is_strict: bool, is_limited: bool) -> str:
        """Return rules whose `words` are the text that an answer may contain. If thoughts are limited, no more may
        begin in it.
        """
        trigger = call_marks(self.calls) if is_strict else []
        thoughts = self.thoughts
        if not is_limited or thoughts is None:
            return f"words: TEXT\nTEXT: {any_text(without=trigger)}"
        if tools or thoughts.reopens or any(thoughts.answer):
            text = any_text(without=[*trigger, *thoughts.opening])
        else:
            text = any_text(without=trigger, beginning=thoughts.opening)
        hidden = self._special_token_ids(but=[*thoughts.opening, *trigger])
        tokens = f" (<[{','.join(map(str, hidden))}]> TEXT)*" if hidden else ""
        return f"words: TEXT{tokens}\nTEXT: {text}"

    def _special_token_ids(self, *, but: Sequence[str]) -> list[int]:
        """Return the special tokens that the model may draw, without those in the texts `but`."""
        left_out = {part for text in but for part in self._tokenizer.split_at_added_tokens(text)}
        return [i for i in sorted(self._tokenizer.special_token_ids) if i < self._vocab_size and i not in left_out]

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


def call_marks(calls: Calls) -> list[str]:
    """Return the texts that begin calls, by which they are known in the midst of other text."""
    tag = calls.name[0][calls.name[0].rfind("<") :].strip()
    marks = [calls.section[0].strip(), calls.call[0].strip(), tag if tag.startswith("<") and ">" not in tag else ""]
    return [mark for mark in marks if mark]
