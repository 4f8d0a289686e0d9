"""N-gram proposer, or prompt lookup (Saxena 2023): what followed the last tokens when they last occurred, will follow
again.

It costs a comparison of each sequence with itself, and pays where outputs repeat their input: edits of code, summaries
with quotations, extraction.
"""

import dataclasses
from typing import override

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.speculation import Speculation
from jaxserve.speculative.proposer import NewTokens, Proposer


@dataclasses.dataclass(frozen=True)
class NGram(Proposer):
    """Looks up the last `max_n` tokens, then fewer, down to `min_n`. Its state are all tokens of each slot, [N, M]."""

    num_drafts: int
    min_n: int
    max_n: int

    @classmethod
    def of(cls, speculation: Speculation) -> "NGram":
        """Make the proposer of these options."""
        return cls(speculation.num_drafts, speculation.prompt_lookup_min, speculation.prompt_lookup_max)

    @override
    def init_state(self, *, num_slots: int, max_length: int) -> Int[Array, "N M"]:
        return jnp.zeros((num_slots, max_length), jnp.int32)

    @override
    def admit(
        self, state: Int[Array, "N M"], slots: Int[Array, " R"], starts: Int[Array, " R"], token_ids: Int[Array, "R K"]
    ) -> Int[Array, "N M"]:
        return append(state, NewTokens(slots, token_ids, jnp.full_like(starts, token_ids.shape[1]), starts))

    @override
    def propose(
        self, state: Int[Array, "N M"], new: NewTokens
    ) -> tuple[Int[Array, "N M"], Int[Array, "R k"], Int[Array, " R"]]:
        state = append(state, new)
        with jax.named_scope("lookup"):
            history = state.at[new.slots].get(mode="clip")
            drafts, is_found = lookup(
                history, new.lengths + new.counts, k=self.num_drafts, min_n=self.min_n, max_n=self.max_n
            )
        return state, drafts, jnp.where(is_found, self.num_drafts, 0)


def append(history: Int[Array, "N M"], new: NewTokens) -> Int[Array, "N M"]:
    """Append the new tokens of a step to the sequences of their slots."""
    column = jnp.arange(new.token_ids.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(column < new.counts[:, None], new.lengths[:, None] + column, history.shape[1])
    return history.at[new.slots[:, None], place].set(new.token_ids, mode="drop")


def lookup(
    history: Int[Array, "R M"], lengths: Int[Array, " R"], *, k: int, min_n: int, max_n: int
) -> tuple[Int[Array, "R k"], Bool[Array, " R"]]:
    """Return the k tokens that followed the latest earlier occurrence of the last n tokens of each sequence, for the
    largest n from `max_n` to `min_n` that has one, and whether there is one.

    A text that has begun to repeat itself goes on doing so: where fewer than k tokens have followed, the guess repeats
    them.
    """
    size = history.shape[1]
    end = jnp.arange(size, dtype=jnp.int32)[None]
    is_equal = jnp.ones(history.shape, bool)
    num_equal = jnp.zeros(history.shape, jnp.int32)  # how many tokens up to here equal the last ones
    for back in range(max_n):
        last = jnp.take_along_axis(history, (lengths - 1 - back)[:, None], axis=1, mode="clip")
        shifted = jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, :size]
        is_equal &= (shifted == last) & (end >= back)
        num_equal += is_equal.astype(jnp.int32)
    is_match = (num_equal >= min_n) & (end < (lengths - 1)[:, None])
    # The longest, and of these the latest.
    score = jnp.where(is_match, num_equal * size + end, -1)
    best = jnp.argmax(score, axis=1).astype(jnp.int32)
    is_found = jnp.max(score, axis=1) >= 0
    period = jnp.maximum(lengths - 1 - best, 1)[:, None]
    index = best[:, None] + 1 + jnp.arange(k, dtype=jnp.int32)[None] % period
    return jnp.take_along_axis(history, index, axis=1, mode="clip"), is_found
