"""Log probabilities of tokens, from the engine's candidates to the two formats that clients expect."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.request import Logprob
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from jaxserve.server.protocol.completions import CompletionLogprobs
from jaxserve.server.wire.body import EncodedList, in_turns
from jaxserve.tokenizer import IncrementalDetokenizer, Tokenizer

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have

Candidates = Mapping[int, Logprob]


class Shown(NamedTuple):
    """The candidates shown at each position: the `num_top` most likely tokens, or the token itself and those that were
    `asked` for; with `as_ids` their ids, which also identify those that are not text by themselves.
    """

    num_top: int
    asked: Sequence[int]
    as_ids: bool

    def show(self, token_id: int, logprob: Logprob) -> str:
        """Return a token as it is written."""
        return f"token_id:{token_id}" if self.as_ids else logprob.decoded_token

    def among(self, entry: Candidates, token_id: int) -> list[tuple[int, Logprob]]:
        """Return the candidates that are shown, in order. The token itself, `token_id`, may be an additional one, which
        is not shown beside the most likely ones.
        """
        if self.asked:
            return [(each, entry[each]) for each in dict.fromkeys((token_id, *self.asked)) if each in entry]
        ranked = sorted(entry.items(), key=lambda candidate: candidate[1].rank)
        return [candidate for candidate in ranked if candidate[1].rank <= self.num_top][: self.num_top]


def shown(params: SamplingParams, *, as_ids: bool | None) -> Shown | None:
    """Return what is shown to a request, with `return_tokens_as_token_ids` or without; None if nothing is."""
    if params.logprobs is None:
        return None
    return Shown(params.logprobs, params.logprob_token_ids or (), bool(as_ids))


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Iterable[int], candidates: Iterable[Candidates], shown: Shown
) -> ChatLogprobs:
    """Return `logprobs` of a chat choice: each token with those that are `shown` at its position."""
    content = []
    for token_id, entry in zip(token_ids, candidates, strict=True):
        top = [
            TopLogprob(shown.show(top_id, logprob), _finite(logprob.logprob), list(tokenizer.token_bytes(top_id)))
            for top_id, logprob in shown.among(entry, token_id)
        ]
        token = entry[token_id]
        token_bytes = list(tokenizer.token_bytes(token_id))
        content.append(TokenLogprob(shown.show(token_id, token), _finite(token.logprob), token_bytes, top))
    return ChatLogprobs(content)


async def chat_logprobs_in_turns(
    tokenizer: Tokenizer, token_ids: Sequence[int], candidates: list[dict[int, Logprob]], shown: Shown
) -> ChatLogprobs:
    """Return `chat_logprobs` of a whole choice, encoded in turns with others. `candidates` are used up."""
    content: Any = EncodedList()
    ids = iter(token_ids)
    async for some in in_turns(candidates):
        taken = itertools.islice(ids, len(some))
        content.extend(chat_logprobs(tokenizer, taken, some, shown).content)
    return ChatLogprobs(content)


class CompletionLogprobsBuilder:
    """Builds `logprobs` of one completion choice, piece by piece, with the offset of each token in the choice's text.

    `prompt_token_ids` precede the text: they are [] if the prompt is echoed and so part of it. `keeps_first_space` is
    set for a text that begins with a form field. The first `num_echoed` tokens are the prompt's, with candidates as
    `of_echo` says; special ones among them are in the text at the positions `verbatim` only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        keeps_first_space: bool,
        shown: Shown,
        verbatim: range = range(0),
        num_echoed: int = 0,
        of_echo: Shown | None = None,
    ):
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids=prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            keeps_first_space=keeps_first_space,
        )
        self._tokenizer = tokenizer
        self._shown = shown
        self._verbatim = verbatim
        self._num_echoed = num_echoed
        self._of_echo = shown if of_echo is None else of_echo
        self._offset = self._position = 0

    def add(self, token_ids: Iterable[int], candidates: Iterable[Candidates | None]) -> CompletionLogprobs:
        """Return the logprobs of the choice's next tokens. A token without candidates (a prompt's first) has no log
        probability.
        """
        built = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, entry in zip(token_ids, candidates, strict=True):
            built.text_offset.append(self._offset)
            self._offset += self._length(token_id)
            if entry is None:
                built.tokens.append(self._shown.show(token_id, Logprob(0.0, 0, self._tokenizer.token_text(token_id))))
                built.token_logprobs.append(None)
                built.top_logprobs.append(None)
            else:
                built.tokens.append(self._shown.show(token_id, entry[token_id]))
                built.token_logprobs.append(_finite(entry[token_id].logprob))
                built.top_logprobs.append(self._top(token_id, entry))
            self._position += 1
        return built

    async def add_in_turns(self, token_ids: Sequence[int], candidates: list[Candidates | None]) -> CompletionLogprobs:
        """Return the logprobs of a whole choice, encoded in turns with other tasks. `candidates` is emptied."""
        lists: dict[str, Any] = {name: EncodedList() for name in CompletionLogprobs.__struct_fields__}
        ids = iter(token_ids)
        async for some in in_turns(candidates):
            built = self.add(itertools.islice(ids, len(some)), some)
            for name, encoded in lists.items():
                encoded.extend(getattr(built, name))
        return CompletionLogprobs(**lists)

    def _length(self, token_id: int) -> int:
        """Return how many characters the next token adds to the text."""
        if self._position < self._num_echoed and token_id in self._tokenizer.special_token_ids:
            return len(self._tokenizer.token_text(token_id)) if self._position in self._verbatim else 0
        return len(self._detokenizer.push(token_id))

    def _top(self, token_id: int, entry: Candidates) -> dict[str, float]:
        """Return the token itself and the shown candidates, by text; of two with the same text the more likely one."""
        top: dict[str, float] = {}
        shown = self._of_echo if self._position < self._num_echoed else self._shown
        for top_id, logprob in [(token_id, entry[token_id]), *shown.among(entry, token_id)]:
            value, text = _finite(logprob.logprob), self._shown.show(top_id, logprob)
            top[text] = max(value, top.get(text, value))
        return top


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
