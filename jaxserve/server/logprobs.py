"""Log probabilities of tokens, from the engine's candidates to the two shapes that clients know."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxserve.request import Logprob
from jaxserve.server.body import EncodedList, in_turns
from jaxserve.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from jaxserve.server.protocol.completions import CompletionLogprobs
from jaxserve.tokenizer import IncrementalDetokenizer, Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have

Candidates = Mapping[int, Logprob]

Show = Callable[[int, Logprob], str]
"""How a token is written: see `text_of_token` and `id_of_token`."""


def text_of_token(_token_id: int, logprob: Logprob) -> str:
    """Return the token's text."""
    return logprob.decoded_token


def id_of_token(token_id: int, _logprob: Logprob) -> str:
    """Return a text that has the token's id: of a token that is no text by itself, a client learns nothing else."""
    return f"token_id:{token_id}"


def show(*, as_ids: bool | None) -> Show:
    """How tokens are written for a request with `return_tokens_as_token_ids`, or without."""
    return id_of_token if as_ids else text_of_token


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Iterable[int], candidates: Iterable[Candidates], *, num_top: int, show: Show
) -> ChatLogprobs:
    """`logprobs` of a chat choice: each token with the `num_top` most likely ones at its position."""
    content = []
    for token_id, entry in zip(token_ids, candidates, strict=True):
        top = [
            TopLogprob(show(top_id, logprob), _finite(logprob.logprob), list(tokenizer.token_bytes(top_id)))
            for top_id, logprob in _most_likely(entry, num_top)
        ]
        token = entry[token_id]
        token_bytes = list(tokenizer.token_bytes(token_id))
        content.append(TokenLogprob(show(token_id, token), _finite(token.logprob), token_bytes, top))
    return ChatLogprobs(content)


async def chat_logprobs_in_turns(
    tokenizer: Tokenizer, token_ids: Sequence[int], candidates: list[dict[int, Logprob]], *, num_top: int, show: Show
) -> ChatLogprobs:
    """The same of a whole choice, encoded. `candidates` are used up."""
    content: Any = EncodedList()
    ids = iter(token_ids)
    async for some in in_turns(candidates):
        taken = itertools.islice(ids, len(some))
        content.extend(chat_logprobs(tokenizer, taken, some, num_top=num_top, show=show).content)
    return ChatLogprobs(content)


class CompletionLogprobsBuilder:
    """Builds `logprobs` of one completion choice, piece by piece, with the place of each token in the choice's text.

    `prompt_token_ids` precede the text: they are [] where the prompt is echoed and so a part of it. A text that begins
    with a form `keeps_first_space`. The first `num_shown` tokens are in the text even if they are special.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        keeps_first_space: bool,
        num_shown: int,
        num_top: int,
        show: Show,
    ):
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids=prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            keeps_first_space=keeps_first_space,
        )
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._num_shown = num_shown if skip_special_tokens else 0
        self._show = show
        self._offset = 0

    def add(self, token_ids: Iterable[int], candidates: Iterable[Candidates | None]) -> CompletionLogprobs:
        """The next tokens of the choice. A token without candidates (the first of a prompt) has no log probability."""
        built = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, entry in zip(token_ids, candidates, strict=True):
            built.text_offset.append(self._offset)
            self._offset += len(self._detokenizer.push(token_id))
            if self._num_shown > 0:
                self._num_shown -= 1
                if token_id in self._tokenizer.special_token_ids:
                    self._offset += len(self._tokenizer.token_text(token_id))
            if entry is None:
                built.tokens.append(self._show(token_id, Logprob(0.0, 0, self._tokenizer.token_text(token_id))))
                built.token_logprobs.append(None)
                built.top_logprobs.append(None)
            else:
                built.tokens.append(self._show(token_id, entry[token_id]))
                built.token_logprobs.append(_finite(entry[token_id].logprob))
                built.top_logprobs.append(self._top(token_id, entry))
        return built

    async def add_in_turns(self, token_ids: Sequence[int], candidates: list[Candidates | None]) -> CompletionLogprobs:
        """The same of a whole choice, encoded. `candidates` are used up."""
        lists: dict[str, Any] = {name: EncodedList() for name in CompletionLogprobs.__struct_fields__}
        ids = iter(token_ids)
        async for some in in_turns(candidates):
            built = self.add(itertools.islice(ids, len(some)), some)
            for name, encoded in lists.items():
                encoded.extend(getattr(built, name))
        return CompletionLogprobs(**lists)

    def _top(self, token_id: int, entry: Candidates) -> dict[str, float]:
        """The most likely tokens, and the token itself, by text; of two with the same text the likelier."""
        top: dict[str, float] = {}
        for top_id, logprob in [*_most_likely(entry, self._num_top), (token_id, entry[token_id])]:
            value, text = _finite(logprob.logprob), self._show(top_id, logprob)
            top[text] = max(value, top.get(text, value))
        return top


def _most_likely(entry: Candidates, num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` most likely candidates in order. A candidate of a lower rank is there as the chosen token only."""
    ranked = sorted(entry.items(), key=lambda candidate: candidate[1].rank)
    return [candidate for candidate in ranked if candidate[1].rank <= num_top][:num_top]


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
