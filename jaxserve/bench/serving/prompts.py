"""Prompts out of their descriptions: seeded random token ids, or text that has about as many tokens."""

import numpy as np

from jaxserve.bench.serving.workloads import Call, Segment
from jaxserve.tokenizer import Tokenizer

_NUM_ADJUSTMENTS = 8


class PromptMaker:
    """Turns a call into what is sent. Equal seeds make equal prompts."""

    def __init__(self, *, seed: int, as_ids: bool, tokenizer: Tokenizer | None, vocab_size: int | None = None):
        """Token ids are drawn from those of the tokenizer that are text by themselves, or from `vocab_size`."""
        self._seed = seed
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        if tokenizer is not None:
            ids = range(min(vocab_size or tokenizer.vocab_size, tokenizer.max_token_id + 1))
            self._ids = np.array([i for i in ids if i not in tokenizer.special_token_ids and _is_text(tokenizer, i)])
        else:
            assert as_ids
            assert vocab_size is not None
            self._ids = np.arange(vocab_size)

    def prompt(self, call: Call) -> str | list[int]:
        """The prompt of a call."""
        if isinstance(call.prompt, str):
            if not self._as_ids:
                return call.prompt
            assert self._tokenizer is not None
            return self._tokenizer.encode(call.prompt)
        ids = np.concatenate([self._random(segment) for segment in call.prompt])
        return ids.tolist() if self._as_ids else self._text(ids.tolist())

    def _random(self, segment: Segment) -> np.ndarray:
        rng = np.random.default_rng([self._seed, *segment.key])
        return self._ids[rng.integers(len(self._ids), size=segment.num_tokens)]

    def _text(self, ids: list[int]) -> str:
        """A text with as many tokens as `ids`, or nearly: decoding and encoding again is not the identity."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        wanted = max(1, len(ids) - len(tokenizer.encode("")))
        ids = ids[:wanted]
        text = tokenizer.decode(ids)
        for _ in range(_NUM_ADJUSTMENTS):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == wanted:
                break
            ids += self._ids[: max(0, wanted - len(ids))].tolist()
            text = tokenizer.decode(ids[:wanted])
        return text


def _is_text(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether a token is neither empty nor a part of a character: those do not survive decoding."""
    try:
        return bool(tokenizer.token_bytes(token_id).decode())
    except UnicodeDecodeError:
        return False
