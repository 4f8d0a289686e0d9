"""Make prompts from their descriptions: seeded random token ids, or text with about as many tokens."""

import numpy as np

from jaxserve.bench.serving.workloads import Call, Segment
from jaxserve.tokenizer import Tokenizer

_NUM_ADJUSTMENTS = 8


class PromptMaker:
    """Makes the prompt that is sent for a call. Equal seeds make equal prompts."""

    def __init__(self, *, seed: int, as_ids: bool, tokenizer: Tokenizer | None, vocab_size: int | None = None):
        """Draw token ids from those of the tokenizer that decode to text by themselves, or from range(vocab_size)."""
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
        """Return the prompt of a call, as token ids or as text."""
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
        """Return a text of len(ids) tokens, or nearly: encoding decoded text does not always give the same ids back."""
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
    """Return true if a token is neither empty nor part of a character; others do not survive decoding."""
    try:
        return bool(tokenizer.token_bytes(token_id).decode())
    except UnicodeDecodeError:
        return False
