"""How the served model writes thoughts and tool calls: readers of its answers, and grammars that constrain them."""

from collections.abc import Sequence

from jaxserve.answers.forcing.forcing import Forcing
from jaxserve.answers.parsing.answer import AnswerReader
from jaxserve.answers.parsing.events import CallStart
from jaxserve.answers.parsing.readers import reader_of
from jaxserve.answers.parsing.thought_counter import ReasoningCounter
from jaxserve.answers.syntaxes.syntax import Channels, Syntax
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.tools.tool import Tool
from jaxserve.tokenizer import Tokenizer


class ModelSyntax:
    """One model's syntax: makes the readers of its answers.

    Attributes:
        knows_tools: true if it is known how the model calls tools.
        thoughts: how it writes thoughts, and marks of words; None if it has none, or if they are harmony messages.
        calls: how it writes calls; if that is not known, the syntax that it is constrained to.
        forcing: makes the grammars of its answers.
    """

    def __init__(self, tokenizer: Tokenizer, syntax: Syntax, *, vocab_size: int):
        """Initialize with the syntax that `choosing` chose for the model; only tokens below `vocab_size` are
        sampled.
        """
        self._tokenizer = tokenizer
        self.knows_tools = syntax.calls is not None
        # If nothing is known, forced calls are written in the most common syntax.
        self.calls = syntax.calls or TOOL_PARSERS["hermes"][0]
        self.has_channels = isinstance(self.calls.arguments, Channels)
        self.thoughts = None if self.has_channels else syntax.thoughts
        written = self.thoughts if self.has_thoughts else None
        self.forcing = Forcing(tokenizer, self.calls, written, knows_tools=self.knows_tools, vocab_size=vocab_size)

    @property
    def has_thoughts(self) -> bool:
        """True if it is known how the model writes thoughts."""
        return self.has_channels or (self.thoughts is not None and bool(self.thoughts.closing))

    def visible_special_tokens(self, tools: Sequence[Tool]) -> frozenset[int]:
        """Return the special tokens that the reader of an answer must see in its text."""
        texts = [] if self.thoughts is None else self.thoughts.texts
        if tools or self.has_channels:
            texts = [*texts, *self.calls.texts]
        parts = (part for text in texts for part in self._tokenizer.split_at_added_tokens(text))
        return frozenset(part for part in parts if part in self._tokenizer.special_token_ids)

    def reader(
        self, tools: Sequence[Tool], *, is_open: bool, is_begun: bool = False, max_calls: int | None = None
    ) -> AnswerReader | None:
        """Return the reader of one answer; None if the text is the answer. `is_open` and `is_begun` are as of
        `reader_of`.
        """
        if not (tools or self.has_channels or self.thoughts is not None):
            return None
        schemas = {tool.name: tool.parameters for tool in tools}
        syntax = Syntax(self.calls, self.thoughts)
        return reader_of(syntax, schemas, is_open=is_open, is_begun=is_begun, max_calls=max_calls)

    def reasoning_counter(self, tools: Sequence[Tool], *, is_open: bool) -> ReasoningCounter | None:
        """Return a counter of the thoughts' tokens in an answer; None if the model writes no thoughts."""
        if not self.has_thoughts:
            return None
        reader = self.reader(tools, is_open=is_open)
        assert reader is not None
        tokenizer = self._tokenizer
        return ReasoningCounter(reader, token_text=tokenizer.token_text, special_token_ids=tokenizer.special_token_ids)

    def call_id(self, start: CallStart, number: int) -> str:
        """Return an id for the call `number` of an answer, as this model's template takes it back."""
        return self.calls.ids.make(start.name, number, own=start.id)
