"""Log probabilities of chosen tokens and of the most likely ones, for `logprobs` and `prompt_logprobs`."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.nn import logsumexp
from jaxtyping import Array, Float, Int32


class Logprobs(NamedTuple):
    """Log probability and rank (1 = most likely) of one token at each of N positions, and the most likely tokens in
    order.

    Equally likely tokens rank by their ids.
    """

    logprob: Float[Array, " N"]
    rank: Int32[Array, " N"]
    top_ids: Int32[Array, "N num_top"]
    top_logprobs: Float[Array, "N num_top"]


def token_logprobs(logits: Float[Array, "N V"], token_ids: Int32[Array, " N"], num_top: int) -> Logprobs:
    """Return the log-softmax of the raw logits at `token_ids` and at the `num_top` (static) most likely tokens."""
    logits = logits.astype(jnp.float32)
    normalizer = logsumexp(logits, axis=1, keepdims=True)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1, mode="clip")
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    is_before = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    top_logits, top_ids = lax.top_k(logits, num_top)
    return Logprobs(
        logprob=(chosen - normalizer)[:, 0],
        rank=jnp.sum(is_before, axis=1, dtype=jnp.int32) + 1,
        top_ids=top_ids.astype(jnp.int32),
        top_logprobs=top_logits - normalizer,
    )
