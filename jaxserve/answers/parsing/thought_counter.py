"""Counts the tokens of an answer that are thoughts."""

from collections.abc import Callable, Container, Sequence

from jaxserve.answers.parsing.answer import AnswerReader


class ReasoningCounter:
    """Counts the tokens of one answer's thoughts, with a reader of its own that is given one token at a time.

    Special tokens are not counted, and neither are those that begin or end the thoughts.
    """

    def __init__(
        self, reader: AnswerReader, *, token_text: Callable[[int], str], special_token_ids: Container[int] = ()
    ):
        """`token_text` spells a token."""
        self._reader = reader
        self._token_text = token_text
        self._special_token_ids = special_token_ids
        self._num_undecided = 0  # thoughts, unless they become a call

    def count(self, token_ids: Sequence[int]) -> int:
        """Return how many of the next tokens are thoughts."""
        if not self._reader.may_think:
            return 0
        num_thoughts = 0
        for token_id in token_ids:
            was_thinking = self._reader.is_thinking
            self._reader.push(self._token_text(token_id))
            if was_thinking and self._reader.is_thinking:
                self._num_undecided += token_id not in self._special_token_ids
            elif not self._reader.is_thinking and not self._reader.was_thought:
                self._num_undecided = 0  # they have become a call
            if not self._reader.is_undecided:
                num_thoughts += self._num_undecided
                self._num_undecided = 0
        return num_thoughts
