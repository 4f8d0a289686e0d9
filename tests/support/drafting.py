"""A proposer that is told the texts: its drafts are right as often as a test wants."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.speculative.ngram import append
from jaxserve.speculative.proposer import NewTokens, Proposer


@dataclasses.dataclass(frozen=True)
class Told(Proposer):
    """Proposes what follows in the one of some texts with which a sequence begins, with errors in some of 8 places, and
    fewer than `num_drafts` tokens at some lengths. What it is told is a part of its state: nothing is compiled again.
    """

    num_drafts: int
    num_texts: int

    def init_state(self, *, num_slots, max_length):
        return {
            "history": jnp.zeros((num_slots, max_length), jnp.int32),
            "texts": jnp.zeros((self.num_texts, max_length), jnp.int32),
            "errors": jnp.zeros((), jnp.int32),
        }

    def admit(self, state: Any, slots: Any, starts: Any, token_ids: Any) -> Any:
        new = NewTokens(slots, token_ids, jnp.full_like(starts, token_ids.shape[1]), starts)
        return state | {"history": append(state["history"], new)}

    def propose(self, state: Any, new: Any) -> Any:
        state = state | {"history": append(state["history"], new)}
        history, texts = state["history"].at[new.slots].get(mode="clip"), state["texts"]
        lengths = new.lengths + new.counts
        is_behind = jnp.arange(history.shape[1])[None, None] >= lengths[:, None, None]
        is_same = jnp.all((history[:, None] == texts[None]) | is_behind, axis=2)
        place = lengths[:, None] + jnp.arange(self.num_drafts, dtype=jnp.int32)[None]
        drafts = jnp.take_along_axis(texts[jnp.argmax(is_same, axis=1)], place, axis=1, mode="clip")
        drafts = jnp.where(place * 37 % 71 % 8 < state["errors"], (drafts + 1) % 7, drafts)
        return (
            state,
            drafts,
            jnp.where(lengths % 5 == 4, lengths % (self.num_drafts + 1), self.num_drafts).astype(jnp.int32),
        )


def tell(runner: Any, texts: list[list[int]], *, errors: int) -> None:
    """Tell the proposer of a runner the texts, and how many of 8 drafts are to be wrong."""
    slots = runner.state["slots"]
    state = slots.drafts.proposer
    table = np.zeros(state["texts"].shape, np.int32)
    for row, text in zip(table, texts, strict=False):
        row[: len(text)] = text
    told = state | {"texts": jnp.asarray(table), "errors": jnp.int32(errors)}
    runner.state["slots"] = dataclasses.replace(slots, drafts=dataclasses.replace(slots.drafts, proposer=told))
