"""The end of a step for requests that want an embedding: hidden states to one vector a row.

A prompt comes in chunks, so a mean is summed up in its request's slot; the last chunk's step divides.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxserve.layers.batch import Batch
from jaxserve.sampling.features import Feature


def pool(
    hidden: Float[Array, "T E"],
    sums: Float[Array, "N E"],
    batch: Batch,
    *,
    slot_ids: Int[Array, " B"],
    row_features: Int32[Array, " B"],
    features: Int32[Array, ""],
) -> tuple[Float[Array, "N E"], Float[Array, "B E"]]:
    """The new `sums` of the slots, and each row's vector: the mean over its sequence so far, or its last hidden state.

    `sums` is float32, over the tokens before this step; a row that starts a sequence starts its sum. `features` are
    the bits that some row needs: without a pooling bit nothing is computed, and the vectors are zeros.
    """
    num_slots, size = sums.shape
    num_rows = slot_ids.shape[0]
    is_mean = (row_features & Feature.MEAN_POOLING != 0) & (features & Feature.MEAN_POOLING != 0)

    def add_chunk() -> Float[Array, "B E"]:
        token = jnp.arange(hidden.shape[0], dtype=jnp.int32)[None]
        is_of_row = (token >= batch.query_starts[:-1, None]) & (token < batch.query_starts[1:, None])
        # A product and not a scatter: the same sum in the same order each time.
        chunk = jnp.matmul(
            is_of_row.astype(jnp.float32), hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        is_first = batch.seq_lens == jnp.diff(batch.query_starts)
        return chunk + jnp.where(is_first[:, None], 0.0, sums.at[slot_ids].get(mode="clip"))

    def vectors() -> tuple[Float[Array, "B E"], Float[Array, "B E"]]:
        row_sums = jax.lax.cond(
            features & Feature.MEAN_POOLING != 0, add_chunk, lambda: jnp.zeros((num_rows, size), jnp.float32)
        )
        last = hidden[jnp.maximum(batch.query_starts[1:] - 1, 0)].astype(jnp.float32)
        length = jnp.maximum(batch.seq_lens, 1).astype(jnp.float32)[:, None]
        return row_sums, jnp.where(is_mean[:, None], row_sums / length, last)

    def nothing() -> tuple[Float[Array, "B E"], Float[Array, "B E"]]:
        zeros = jnp.zeros((num_rows, size), jnp.float32)
        return zeros, zeros

    row_sums, pooled = jax.lax.cond(features & Feature.POOLING != 0, vectors, nothing)
    # Outside of the condition, which would copy what it only passes on.
    sums = sums.at[jnp.where(is_mean, slot_ids, num_slots)].set(row_sums, mode="drop")
    return sums, pooled
