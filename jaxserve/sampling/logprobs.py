"""Log probabilities of chosen, of named and of most likely tokens, for `logprobs` and `prompt_logprobs`."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.nn import logsumexp
from jaxtyping import Array, Float, Int32


class Logprobs(NamedTuple):
    """Log probabilities at N positions: the token's and its rank (1 = most likely), the most likely tokens, in order,
    and those of the tokens that were asked for, with their ranks.

    Equally likely tokens rank by their ids.
    """

    logprob: Float[Array, " N"]
    rank: Int32[Array, " N"]
    top_ids: Int32[Array, "N num_top"]
    top_logprobs: Float[Array, "N num_top"]
    asked_logprobs: Float[Array, "N asked"]
    asked_ranks: Int32[Array, "N asked"]


def token_logprobs(logits: Float[Array, "N V"], token_ids: Int32[Array, " N"], num_top: int) -> Logprobs:
    """Return log-softmax of the model's raw logits at `token_ids` and at the `num_top` (static) most likely tokens.

    No others have been asked for.
    """
    logprob, rank = logprobs_at(logits, token_ids[:, None])
    logits = logits.astype(jnp.float32)
    top_logits, top_ids = lax.top_k(logits, num_top)
    return Logprobs(
        logprob=logprob[:, 0],
        rank=rank[:, 0],
        top_ids=top_ids.astype(jnp.int32),
        top_logprobs=top_logits - logsumexp(logits, axis=1, keepdims=True),
        asked_logprobs=logprob[:, 1:],
        asked_ranks=rank[:, 1:],
    )


def logprobs_at(
    logits: Float[Array, "N V"], token_ids: Int32[Array, "N k"]
) -> tuple[Float[Array, "N k"], Int32[Array, "N k"]]:
    """Return log-softmax of the raw logits at k tokens of each row, and their ranks. Ids of V or more are padding, for
    which anything comes back.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, token_ids, axis=1, mode="clip")
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, None]
    every, one = logits[:, None], chosen[:, :, None]
    is_before = (every > one) | ((every == one) & (ids < token_ids[:, :, None]))
    rank = jnp.sum(is_before, axis=2, dtype=jnp.int32) + 1
    return chosen - logsumexp(logits, axis=1, keepdims=True), rank
