"""A proposer that knows the texts: its drafts are right as often as a test wants, in a pattern that depends on where
they are.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.speculative.ngram import append
from jaxserve.speculative.proposer import Proposer


@dataclasses.dataclass(frozen=True)
class Knowing(Proposer):
    """Proposes what follows in the one of `texts` that a sequence begins, with errors in `errors` of 8 places, and up
    to k tokens: fewer at some lengths.
    """

    k: int
    texts: tuple[tuple[int, ...], ...]
    errors: int

    @property
    def num_drafts(self):
        return self.k

    def init_state(self, *, num_slots, max_length):
        return jnp.zeros((num_slots, max_length), jnp.int32)

    def admit(self, state: Any, slot: Any, token_ids: Any) -> Any:
        return state.at[slot].set(token_ids, mode="drop")

    def propose(self, state: Any, new: Any) -> Any:
        state = append(state, new)
        history, lengths = state.at[new.slots].get(mode="clip"), new.lengths + new.counts
        size = history.shape[1]
        texts = jnp.array([(*text, *[0] * size)[:size] for text in self.texts], jnp.int32)
        is_known = jnp.arange(size)[None, None] >= lengths[:, None, None]
        is_same = jnp.all((history[:, None] == texts[None]) | is_known, axis=2)
        text = texts[jnp.argmax(is_same, axis=1)]
        place = lengths[:, None] + jnp.arange(self.k, dtype=jnp.int32)[None]
        drafts = jnp.take_along_axis(text, place, axis=1, mode="clip")
        hashed = place * 7919 % 8191
        drafts = jnp.where(hashed % 8 < self.errors, (drafts + 1) % 7, drafts)
        return state, drafts, jnp.where(lengths % 5 == 4, lengths % (self.k + 1), self.k).astype(jnp.int32)
