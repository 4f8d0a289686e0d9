"""Pool the hidden states of a forward pass into one vector per row, for requests that want an embedding.

A prompt may come in chunks, so a sum or a maximum is accumulated in its request's slot; the step of the last chunk
divides.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jaxserve.sampling.features import Feature


def pool(
    hidden: Float[Array, "T E"],
    pooled: Float[Array, "N E"],
    *,
    slot_ids: Int[Array, " B"],
    starts: Int[Array, " B"],
    num_tokens: Int[Array, " B"],
    row_features: Int32[Array, " B"],
    features: Int32[Array, ""],
) -> tuple[Float[Array, "N E"], Float[Array, "B E"]]:
    """Return the new `pooled` of the slots, and each row's vector: the weighted mean or the maximum over its sequence
    so far, or its last hidden state.

    `pooled` is float32, over the tokens before this step; a row whose start is 0 begins anew. `features` are the bits
    that some row needs: sums and maxima are only computed with theirs.
    """
    num_slots, size = pooled.shape
    ends = jnp.cumsum(num_tokens, dtype=jnp.int32)
    before = pooled.at[slot_ids].get(mode="clip")

    def has(feature: Feature) -> Array:
        return ((row_features & feature) != 0)[:, None]

    def add_chunk() -> Float[Array, "B E"]:
        token = jnp.arange(hidden.shape[0], dtype=jnp.int32)[None]
        is_of_row = (token >= (ends - num_tokens)[:, None]) & (token < ends[:, None])
        position = token - (ends - num_tokens - starts)[:, None]
        weight = jnp.where(has(Feature.WEIGHTED_POOLING), (position + 1).astype(jnp.float32), 1.0)
        weight = jnp.where(is_of_row & ~(has(Feature.FIRST_POOLING) & (position > 0)), weight, 0.0)
        # A product and not a scatter: the same sum in the same order each time.
        chunk = jnp.matmul(weight, hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return chunk + jnp.where((starts == 0)[:, None], 0.0, before)

    def raise_maxima() -> Float[Array, "B E"]:
        row = jnp.searchsorted(ends, jnp.arange(hidden.shape[0], dtype=jnp.int32), side="right")
        chunk = jax.ops.segment_max(hidden.astype(jnp.float32), row, num_segments=slot_ids.shape[0])
        return jnp.maximum(chunk, jnp.where((starts == 0)[:, None], -jnp.inf, before))

    def nothing() -> Float[Array, "B E"]:
        return jnp.zeros((slot_ids.shape[0], size), jnp.float32)

    has_sums, has_maxima = ((features & feature) != 0 for feature in (Feature.SUM_POOLING, Feature.MAX_POOLING))
    sums = jax.lax.cond(has_sums, add_chunk, nothing)
    maxima = jax.lax.cond(has_maxima, raise_maxima, nothing)
    is_sum, is_max = has(Feature.SUM_POOLING) & has_sums, has(Feature.MAX_POOLING) & has_maxima
    last = hidden[jnp.maximum(ends - 1, 0)].astype(jnp.float32)
    length = jnp.maximum(starts + num_tokens, 1).astype(jnp.float32)[:, None]
    divisor = jnp.where(has(Feature.ROOT_POOLING), jnp.sqrt(length), length)
    divisor = jnp.where(has(Feature.WEIGHTED_POOLING), length * (length + 1) / 2, divisor)
    divisor = jnp.where(has(Feature.FIRST_POOLING), 1.0, divisor)
    # Outside the conditions, which would copy what they only pass through.
    is_kept = (is_sum | is_max)[:, 0]
    pooled = pooled.at[jnp.where(is_kept, slot_ids, num_slots)].set(jnp.where(is_max, maxima, sums), mode="drop")
    return pooled, jnp.where(is_max, maxima, jnp.where(is_sum, sums / divisor, last))
