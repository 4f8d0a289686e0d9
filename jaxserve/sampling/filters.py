"""Top-k, top-p and min-p without a sort: they cut a row's distribution where a sort would.

The bits of a float >= 0, read as an integer, keep its order. So the exact threshold is found by bisection over these
integers: one vectorised pass over the vocabulary a step, some twenty of them until no token could be taken away.
Tokens at a threshold are all kept, as in Hugging Face transformers.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.sampling.features import Feature
from jaxserve.sampling.state import RowParams

_BITS_OF_ONE = 0x3F800000
_BITS_OF_INFINITY = 0x7F800000


def filter_weights(distance: Float[Array, "B V"], params: RowParams, features: Int32[Array, ""]) -> Float[Array, "B V"]:
    """What is left of the weights exp(-distance) after top-k, then top-p on what top-k has left, then min-p.

    `distance` is how far a token's logit (over the temperature) lies below its row's maximum. Only the filters in
    `features` run; in the rows that do not ask for one it keeps everything.
    """
    weights = jnp.exp(-distance)

    def top_k(w: Array) -> Array:
        return jnp.where(distance <= _top_k_limit(distance, params.top_k)[:, None], w, 0.0)

    def top_p(w: Array) -> Array:
        return jnp.where(w >= _top_p_limit(w, params.top_p)[:, None], w, 0.0)

    weights = lax.cond(features & Feature.TOP_K != 0, top_k, lambda w: w, weights)
    weights = lax.cond(features & Feature.TOP_P != 0, top_p, lambda w: w, weights)
    return jnp.where(weights >= params.min_p[:, None], weights, 0.0)  # the largest weight is 1


def _top_k_limit(distance: Float[Array, "B V"], top_k: Int32[Array, " B"]) -> Float[Array, " B"]:
    """The distance of the k-th nearest token, inf where top_k is 0."""

    def count(bits: Array) -> Array:
        # Exact up to 2**24 tokens, and twice as fast as counting in integers.
        return jnp.sum(jnp.where(distance <= _float(bits)[:, None], 1.0, 0.0), axis=1)

    one = jnp.ones_like(top_k, jnp.float32)
    target = jnp.where(top_k > 0, top_k.astype(jnp.float32), jnp.inf)
    return _float(_smallest(count, target, lambda _: one, highest=_BITS_OF_INFINITY))


def _top_p_limit(weights: Float[Array, "B V"], top_p: Float[Array, " B"]) -> Float[Array, " B"]:
    """The weight of the lightest token to keep, so that the kept ones hold a share `top_p`; 0 where top_p is 1."""

    def limit(steps: Array) -> Array:  # down from the weight 1
        return _float(_BITS_OF_ONE - steps)

    def mass(steps: Array) -> Array:
        return jnp.sum(jnp.where(weights >= limit(steps)[:, None], weights, 0.0), axis=1)

    target = jnp.where(top_p < 1.0, top_p * jnp.sum(weights, axis=1), jnp.inf)
    return limit(_smallest(mass, target, limit, highest=_BITS_OF_ONE))


def _smallest(
    measure: Callable[[Array], Array],
    target: Float[Array, " B"],
    least: Callable[[Array], Array],
    *,
    highest: int,
) -> Int32[Array, " B"]:
    """An integer in [0, highest] that lets in just those tokens that the smallest one with measure(i) >= target does.

    `measure` sums over the tokens that an integer lets in, each of which counts for at least `least`: once the surplus
    is below that, no token can be taken away. With an infinite target the result is `highest`.
    """

    def is_open(low: Array, high: Array, measured: Array) -> Bool[Array, " B"]:
        return (low < high) & (measured - target >= least(high))

    def halve(bounds: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, measured = bounds
        middle = low + (high - low) // 2
        at_middle = measure(middle)
        # A row that is done stays as it is, so that its result does not hang on how long the others take.
        moves_down = is_open(*bounds) & (at_middle >= target)
        moves_up = is_open(*bounds) & (at_middle < target)
        return (
            jnp.where(moves_up, middle + 1, low),
            jnp.where(moves_down, middle, high),
            jnp.where(moves_down, at_middle, measured),
        )

    high = jnp.full(target.shape, highest, jnp.int32)
    bounds = (jnp.zeros_like(high), high, measure(high))
    return lax.while_loop(lambda bounds: jnp.any(is_open(*bounds)), halve, bounds)[1]


def _float(bits: Int32[Array, " B"]) -> Float[Array, " B"]:
    return lax.bitcast_convert_type(bits, jnp.float32)
