"""The model's tokens as the grammar engine sees them: bytes of text, and special tokens that are no text."""

from collections.abc import Iterable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from jaxserve.errors import InvalidRequest
from jaxserve.tokenizer import Tokenizer


def grammar_tokenizer(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> LLTokenizer:
    """Make llguidance's tokenizer from the first `vocab_size` tokens; `eos_token_ids` and the tokenizer's own may end a
    text.

    Takes seconds for a large vocabulary. Raises InvalidRequest if no token ends a text.
    """
    all_eos = dict.fromkeys((*tokenizer.eos_token_ids, *eos_token_ids))
    eos = [token_id for token_id in all_eos if token_id < vocab_size]
    if not eos:
        raise InvalidRequest(
            "structured outputs need a tokenizer with an end-of-text token", param="structured_outputs"
        )
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos)), n_vocab=vocab_size, eos_token=eos)


class _Vocabulary:
    """The object that `TokenizerWrapper` wraps. Calling it encodes a text into the tokens the model would use.

    llguidance relies on this where only one text can follow. Its own reader of tokenizer.json gets it wrong: it treats
    added tokens as special ones, and encodes a text such as "<think>" as a token that it does not allow.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]):
        self.eos_token_id = eos[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted({*tokenizer.special_token_ids, *eos} & set(range(vocab_size)))
        self._tokenizer = tokenizer
        special = frozenset(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._max_length = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        token_ids = self._tokenizer.encode_plain(text.decode(errors="replace"))
        if all(i < len(self.tokens) for i in token_ids) and b"".join(self.tokens[i] for i in token_ids) == text:
            return token_ids
        return self._greedy(text)  # e.g. sentencepiece, which puts a space before a text

    def _greedy(self, text: bytes) -> list[int]:
        """Encode greedily, the longest token first; bytes that no token has are dropped."""
        token_ids, position = [], 0
        while position < len(text):
            for length in range(min(self._max_length, len(text) - position), 0, -1):
                token_id = self._ids.get(text[position : position + length])
                if token_id is not None:
                    token_ids.append(token_id)
                    break
            else:
                length = 1
            position += length
        return token_ids
