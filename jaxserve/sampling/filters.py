"""Top-k, top-p and min-p without a sort: how far below its best token a row still lets tokens in.

A token's distance is how much its logit (over the temperature) lies below the row's maximum. The bits of a float >= 0,
read as an integer, keep its order, so the exact threshold is found by bisection over these integers, one vectorised
pass over the vocabulary a bit. Tokens at the threshold are all kept, as in Hugging Face transformers.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.sampling.features import Feature
from jaxserve.sampling.state import RowParams

_INFINITY = 0x7F800000  # the bits of +inf: no token is farther


def kept_tokens(
    distance: Float[Array, "B V"], weights: Float[Array, "B V"], params: RowParams, features: Int32[Array, ""]
) -> Bool[Array, "B V"]:
    """Which tokens survive top-k, then top-p on what top-k has left, then min-p; exp(-distance) are the weights."""
    bits = lax.bitcast_convert_type(jnp.abs(distance), jnp.int32)  # abs: -0.0 has other bits than 0.0
    limit = jnp.full_like(params.top_k, _INFINITY)
    limit = lax.cond(features & Feature.TOP_K != 0, lambda: _top_k_limit(bits, params.top_k), lambda: limit)
    limit = lax.cond(
        features & Feature.TOP_P != 0, lambda x: _top_p_limit(bits, weights, params.top_p, x), lambda x: x, limit
    )
    farthest = -jnp.log(params.min_p)[:, None]
    return (bits <= limit[:, None]) & (distance <= farthest)


def _top_k_limit(bits: Int32[Array, "B V"], top_k: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """The distance of the k-th nearest token; 0 is no limit."""

    def is_enough(limit: Array) -> Array:
        return jnp.sum(bits <= limit[:, None], axis=1, dtype=jnp.int32) >= top_k

    return jnp.where(top_k > 0, _smallest(is_enough, jnp.full_like(top_k, _INFINITY)), _INFINITY)


def _top_p_limit(
    bits: Int32[Array, "B V"], weights: Float[Array, "B V"], top_p: Float[Array, " B"], farthest: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """The smallest distance within which lies a share `top_p` of the weight within `farthest`."""

    def mass(limit: Array) -> Array:
        return jnp.sum(jnp.where(bits <= limit[:, None], weights, 0.0), axis=1)

    target = top_p * mass(farthest)
    limit = _smallest(lambda limit: mass(limit) >= target, farthest)
    return jnp.where(top_p < 1.0, limit, farthest)


def _smallest(is_enough: Callable[[Array], Array], high: Int32[Array, " B"]) -> Int32[Array, " B"]:
    """The smallest integer in [0, high] for which a monotone predicate holds, taken to hold at `high`."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = is_enough(middle)
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    return lax.fori_loop(0, 31, halve, (jnp.zeros_like(high), high))[1]
