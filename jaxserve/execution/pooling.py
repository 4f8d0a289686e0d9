"""Pool the hidden states of a forward pass into one vector per row, for requests that want an embedding.

A prompt may come in chunks, so a mean is accumulated in its request's slot; the step of the last chunk divides.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxserve.sampling.features import Feature


def pool(
    hidden: Float[Array, "T E"],
    sums: Float[Array, "N E"],
    *,
    slot_ids: Int[Array, " B"],
    starts: Int[Array, " B"],
    num_tokens: Int[Array, " B"],
    row_features: Int32[Array, " B"],
    features: Int32[Array, ""],
) -> tuple[Float[Array, "N E"], Float[Array, "B E"]]:
    """Return the new `sums` of the slots, and each row's vector: the mean over its sequence so far, or its last hidden
    state.

    `sums` is float32, over the tokens before this step; a row whose start is 0 begins a new sum. `features` are the
    bits that some row needs: without that of means, no sums are computed.
    """
    num_slots, size = sums.shape
    ends = jnp.cumsum(num_tokens, dtype=jnp.int32)

    def add_chunk() -> Float[Array, "B E"]:
        token = jnp.arange(hidden.shape[0], dtype=jnp.int32)[None]
        is_of_row = (token >= (ends - num_tokens)[:, None]) & (token < ends[:, None])
        # A product and not a scatter: the same sum in the same order each time.
        chunk = jnp.matmul(
            is_of_row.astype(jnp.float32), hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        return chunk + jnp.where((starts == 0)[:, None], 0.0, sums.at[slot_ids].get(mode="clip"))

    has_means = features & Feature.MEAN_POOLING != 0
    row_sums = jax.lax.cond(has_means, add_chunk, lambda: jnp.zeros((slot_ids.shape[0], size), jnp.float32))
    is_mean = (row_features & Feature.MEAN_POOLING != 0) & has_means
    last = hidden[jnp.maximum(ends - 1, 0)].astype(jnp.float32)
    length = jnp.maximum(starts + num_tokens, 1).astype(jnp.float32)[:, None]
    # Outside the condition, which would copy what it only passes through.
    sums = sums.at[jnp.where(is_mean, slot_ids, num_slots)].set(row_sums, mode="drop")
    return sums, jnp.where(is_mean[:, None], row_sums / length, last)
