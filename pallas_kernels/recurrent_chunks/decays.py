"""Decays of the tokens of a chunk."""

import jax.numpy as jnp
from jaxtyping import Array, Float

MIN_LOG_DECAY = -88.0
"""Logarithm of a decay that leaves nothing: of the least number that float32 has with all its digits."""


def decayed(
    log_decay: Float[Array, "*decays"], axis: int = -1
) -> tuple[Float[Array, "*decays"], Float[Array, "*decays"]]:
    """Return logarithms of the products of a chunk's decays up to each token of an `axis`, as two summands.

    Sums of the first are exact, those of the second small, so that strong decays round off none of the weak ones.
    """
    log_decay = jnp.maximum(log_decay, MIN_LOG_DECAY)
    coarse = jnp.round(log_decay * 256) / 256
    return jnp.cumsum(coarse, axis=axis), jnp.cumsum(log_decay - coarse, axis=axis)
