"""Verification by coupling: each position is drawn as it would be without drafts, with the random numbers that belong
to its request and position; a draft is accepted while it equals what was drawn before it.

For drafts that are single guesses this accepts with the probability of rejection sampling (Leviathan et al. 2023), and
the text is that of decoding without speculation, token for token, at any temperature.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.sampling.sampler import uniforms

SYNTHETIC = 0x5EED
"""Added to the words of seeds, so that what is accepted by chance does not depend on what is drawn."""


def num_accepted(
    drawn: Int[Array, "R Q"], drafts: Int[Array, "R Q-1"], num_drafts: Int[Array, " R"]
) -> Int[Array, " R"]:
    """Return how many of each row's first `num_drafts` drafts are accepted: those before the first that was not
    drawn.
    """
    is_draft = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < num_drafts[:, None]
    is_accepted = is_draft & (drawn[:, :-1] == drafts)
    return jnp.sum(jax.lax.cumprod(is_accepted.astype(jnp.int32), axis=1), axis=1)


def synthetic_num_accepted(
    seed: UInt32[Array, "R 2"], counters: Int[Array, " R"], num_drafts: Int[Array, " R"], rates: Float[Array, " k"]
) -> Int[Array, " R"]:
    """Return how many drafts of each row are accepted by chance: at least i + 1 in a fraction `rates[i]` of steps. For
    measurements without a good proposer; the text is then not the model's.
    """
    chance = uniforms(seed + jnp.uint32(SYNTHETIC), counters)[:, :1]
    count = jnp.sum(chance < rates[None], axis=1, dtype=jnp.int32)
    return jnp.minimum(count, num_drafts)
