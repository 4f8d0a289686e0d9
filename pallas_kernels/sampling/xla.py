"""Sampling in plain XLA, without a sort: the implementation on a CPU, and on a GPU only on request.

The filters cut a row's distribution at the same point as a sort would. The bits of a float >= 0, read as an integer,
have the same order, so the exact threshold is found by bisection over these integers: one vectorised pass over the
vocabulary per step, some twenty of them until no further token could be removed.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

_BLOCK = 512  # see `sample`
_BITS_OF_ONE = 0x3F800000
_BITS_OF_INFINITY = 0x7F800000


def sample_xla(
    logits: Float[Array, "B V"],
    *,
    temperature: Float[Array, " B"],
    top_k: Int32[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    uniform: Float[Array, "B 2"],
) -> tuple[Int32[Array, " B"], Float[Array, " B"]]:
    """Sample in XLA, see `sample`. Filters that no row needs do not run."""
    maximum = jnp.max(logits, axis=1)
    is_random = temperature > 0

    def draw(logits: Array) -> Array:
        # Subtracting first keeps the quotient from overflowing upwards, however low the temperature.
        distance = (maximum[:, None] - logits) / jnp.where(is_random, temperature, 1.0)[:, None]
        weights = filter_weights(
            distance,
            top_k=jnp.where(is_random, top_k, 0),
            top_p=jnp.where(is_random, top_p, 1.0),
            min_p=jnp.where(is_random, min_p, 0.0),
        )
        return jnp.where(is_random, draw_by_weight(weights, uniform), _argmax(logits))

    token_ids = lax.cond(jnp.any(is_random), draw, _argmax, logits)
    return jnp.where(jnp.isfinite(maximum), token_ids, 0), maximum


def _argmax(logits: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """Return the lowest id among the largest logits, in two passes, which vectorise on a CPU while `jnp.argmax` does
    not.
    """
    vocab_size = logits.shape[1]
    ids = jnp.arange(vocab_size, dtype=jnp.int32)[None]
    is_largest = logits == jnp.max(logits, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_largest, ids, vocab_size), axis=1)


def filter_weights(
    distance: Float[Array, "B V"],
    *,
    top_k: Int32[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """Return the weights exp(-distance) after top-k, then top-p on what top-k has kept, then min-p.

    `distance` is how far a token's logit (over the temperature) is below its row's maximum.
    """
    weights = jnp.exp(-distance)

    def keep_top_k(w: Array) -> Array:
        return jnp.where(distance <= _top_k_limit(distance, top_k)[:, None], w, 0.0)

    def keep_top_p(w: Array) -> Array:
        return jnp.where(w >= _top_p_limit(w, top_p)[:, None], w, 0.0)

    weights = lax.cond(jnp.any(top_k > 0), keep_top_k, lambda w: w, weights)
    weights = lax.cond(jnp.any(top_p < 1), keep_top_p, lambda w: w, weights)
    return jnp.where(weights >= min_p[:, None], weights, 0.0)  # the largest weight is 1


def _top_k_limit(distance: Float[Array, "B V"], top_k: Int32[Array, " B"]) -> Float[Array, " B"]:
    """Return the distance of the k-th nearest token, inf where top_k is 0."""

    def count(bits: Array) -> Array:
        # Exact up to 2**24 tokens, and twice as fast as counting in integers.
        return jnp.sum(jnp.where(distance <= _float(bits)[:, None], 1.0, 0.0), axis=1)

    one = jnp.ones_like(top_k, jnp.float32)
    target = jnp.where(top_k > 0, top_k.astype(jnp.float32), jnp.inf)
    return _float(_smallest(count, target, lambda _: one, highest=_BITS_OF_INFINITY))


def _top_p_limit(weights: Float[Array, "B V"], top_p: Float[Array, " B"]) -> Float[Array, " B"]:
    """Return the smallest weight to keep, so that the kept ones have the fraction `top_p` of the sum; 0 where top_p is
    1.
    """

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
    """Return an integer in [0, highest] that admits the same tokens as the smallest one with measure(i) >= target.

    `measure` sums over the tokens that an integer admits, each of which counts at least `least`: once the surplus is
    below that, no token can be removed. With an infinite target the result is `highest`.
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


def draw_by_weight(weights: Float[Array, "B V"], uniform: Float[Array, "B 2"]) -> Int32[Array, " B"]:
    """Draw token i of a row with probability weights[i] / sum(weights), by inverting the distribution function in two
    steps: the block of tokens, then the token in it. Never draws one of weight 0.

    One float32 prefix sum over a vocabulary would lose the rare tokens at its end: they are smaller than its rounding
    errors, and than the resolution of one uniform number.
    """
    num_rows, vocab_size = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -vocab_size % _BLOCK))).reshape(num_rows, -1, _BLOCK)
    block = _invert(jnp.sum(weights, axis=2), uniform[:, 0])
    within = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _invert(within, uniform[:, 1])


def _invert(weights: Float[Array, "B n"], uniform: Float[Array, " B"]) -> Int32[Array, " B"]:
    """Return the first entry with weight where the running sum exceeds the fraction `uniform` of the total."""
    cumulative = jnp.cumsum(weights, axis=1)
    has_weight = weights > 0
    is_reached = has_weight & (cumulative > uniform[:, None] * cumulative[:, -1:])
    last = weights.shape[1] - 1 - jnp.argmax(has_weight[:, ::-1], axis=1)  # if rounding has kept all from being reached
    return jnp.where(jnp.any(is_reached, axis=1), jnp.argmax(is_reached, axis=1), last).astype(jnp.int32)
