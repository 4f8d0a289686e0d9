"""Thoughts between `<think>` and `</think>`, as DeepSeek-R1, Qwen 3 and their kin write them before the answer."""

from collections.abc import Callable, Container, Sequence
from typing import override

from jaxserve.server.parsing.events import Content, Reasoning
from jaxserve.server.parsing.stream import StreamParser

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(StreamParser):
    """Takes thoughts and answer apart. White space around either is dropped: templates put it there."""

    def __init__(self, *, is_open: bool):
        """`is_open`: the prompt has ended with `<think>`, so that the text begins with thoughts."""
        super().__init__()
        self._is_open = is_open

    @property
    @override
    def is_thinking(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._state in (self._before_thoughts, self._thoughts) or (self._is_open and self._state == self._start)

    @property
    @override
    def has_thought(self) -> bool:
        """Whether no more thoughts can come."""
        return self._state == self._answer

    @override
    def _start(self) -> bool:
        text = self._buffer.lstrip()
        if not self._is_last and OPEN.startswith(text) and text != OPEN:
            return False
        if text.startswith(OPEN):
            self._buffer = text.removeprefix(OPEN)
            self._is_open = True
        self._state = self._before_thoughts if self._is_open else self._answer
        return True

    def _before_thoughts(self) -> bool:
        self._skip_spaces()
        if not self._buffer:
            return False
        self._state = self._thoughts
        return True

    def _thoughts(self) -> bool:
        before, marker = self._take_until([CLOSE])
        shown = before.rstrip()
        if shown:
            self._emit(Reasoning(shown))
        if marker is not None:
            self._state = self._before_answer
            return True
        if not self._is_last:
            self._buffer = before[len(shown) :] + self._buffer
        return False

    def _before_answer(self) -> bool:
        self._skip_spaces()
        if not self._buffer:
            return False
        self._state = self._answer
        return True

    def _answer(self) -> bool:
        text = self._take(len(self._buffer))
        if text:
            self._emit(Content(text))
        return False


class ReasoningCounter:
    """Counts the tokens of one answer's thoughts, with a parser of its own, which gets one token after the other.

    Special tokens are not counted, and neither are those that begin or end the thoughts.
    """

    def __init__(
        self, parser: StreamParser, *, token_text: Callable[[int], str], special_token_ids: Container[int] = ()
    ):
        """`token_text` spells a token."""
        self._parser = parser
        self._token_text = token_text
        self._special_token_ids = special_token_ids

    def count(self, token_ids: Sequence[int]) -> int:
        """How many of the next tokens are thoughts."""
        if self._parser.has_thought:
            return 0
        num_thoughts = 0
        for token_id in token_ids:
            was_thinking = self._parser.is_thinking
            self._parser.push(self._token_text(token_id))
            is_thought = was_thinking and self._parser.is_thinking
            num_thoughts += is_thought and token_id not in self._special_token_ids
        return num_thoughts


def is_open(prompt: str) -> bool:
    """Whether a prompt ends inside of thoughts."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)
