"""The last part of a step: one token for each sampled row, and the note of it in the sampling state."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.sampling.features import Feature
from jaxserve.sampling.filters import filter_weights
from jaxserve.sampling.processors import process
from jaxserve.sampling.state import RowParams, SamplingState, unpack_rows

# Tokens whose weights are summed before the prefix sum over the vocabulary, and among which a second draw decides.
_BLOCK = 512


class SampledTokens(NamedTuple):
    """`is_corrupted` rows had no usable logits (NaN, +inf, or nothing but -inf); their token is 0."""

    token_ids: Int32[Array, " B"]
    is_corrupted: Bool[Array, " B"]


def sample(
    logits: Float[Array, "B V"],
    state: SamplingState,
    slot_ids: Int32[Array, " B"],
    num_output_tokens: Int32[Array, " B"],
    features: Int32[Array, ""],
    *,
    greedy_only: bool = False,
) -> SampledTokens:
    """Choose the next token of each row, by the parameters of its slot.

    `num_output_tokens` are the tokens generated before this one, those the host has not seen included: with the seed
    they determine the draw, so that a row's token does not depend on the rows beside it. `features` are the bits that
    some row needs (see `Feature`); what is not in them is not run. `greedy_only` (static) compiles nothing but an
    argmax of the raw logits. The order is that of Hugging Face transformers: processors, temperature, top-k, top-p,
    min-p. Ties go to the lowest id when greedy, and all tokens that tie at a filter's threshold are kept.
    """
    # The maximum carries everything that makes a softmax fail: NaN, +inf, and -inf if all are. Such a row may go
    # through all that follows: nothing there looks across rows.
    is_corrupted = ~jnp.isfinite(jnp.max(logits, axis=1))
    if greedy_only:
        return SampledTokens(jnp.where(is_corrupted, 0, _argmax(logits)), is_corrupted)
    params = unpack_rows(state, slot_ids)
    logits = lax.cond(
        features & Feature.PROCESSORS != 0,
        lambda x: process(
            x,
            params,
            state.extras,
            slot_ids=slot_ids,
            num_output_tokens=num_output_tokens,
            features=features,
        ),
        lambda x: x,
        logits,
    )
    token_ids = lax.cond(
        features & Feature.RANDOM != 0,
        lambda x: jnp.where(params.temperature > 0, _draw(x, params, num_output_tokens, features), _argmax(x)),
        _argmax,
        logits,
    )
    return SampledTokens(jnp.where(is_corrupted, 0, token_ids), is_corrupted)


def record(
    state: SamplingState,
    slot_ids: Int32[Array, " B"],
    token_ids: Int32[Array, " B"],
    active: Bool[Array, " B"],
    features: Int32[Array, ""],
) -> SamplingState:
    """Note the tokens of the `active` rows in their slots' histories, if `features` says that some row needs them.

    No two active rows share a slot.
    """
    extras = state.extras
    num_slots = state.scalars.shape[0]

    def targets(feature: Feature) -> Int32[Array, " B"]:
        return jnp.where(active & (features & feature != 0), slot_ids, num_slots)

    counts = extras.output_counts.at[targets(Feature.PENALTIES), token_ids].add(1, mode="drop")
    recent = extras.recent_tokens.at[slot_ids].get(mode="clip")
    recent = jnp.concatenate([recent[:, 1:], token_ids[:, None]], axis=1)
    recent = extras.recent_tokens.at[targets(Feature.BAD_WORDS)].set(recent, mode="drop")
    extras = dataclasses.replace(extras, output_counts=counts, recent_tokens=recent)
    return dataclasses.replace(state, extras=extras)


def _argmax(logits: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """The lowest id among the largest logits. In two passes, which vectorise where `jnp.argmax` on CPU does not."""
    vocab_size = logits.shape[1]
    ids = jnp.arange(vocab_size, dtype=jnp.int32)[None]
    is_largest = logits == jnp.max(logits, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_largest, ids, vocab_size), axis=1)


def _draw(
    logits: Float[Array, "B V"], params: RowParams, counters: Int32[Array, " B"], features: Int32[Array, ""]
) -> Int32[Array, " B"]:
    """A token from each row's distribution after temperature and filters. Greedy rows get any token."""
    temperature = jnp.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    # Subtracting first keeps the quotient from overflowing upwards, however low the temperature.
    distance = (jnp.max(logits, axis=1, keepdims=True) - logits) / temperature
    weights = lax.cond(
        features & Feature.FILTERS != 0,
        lambda d: filter_weights(d, params, features),
        lambda d: jnp.exp(-d),
        distance,
    )
    return draw_by_weight(weights, uniforms(params.seed, counters))


def uniforms(seed: UInt32[Array, "B 2"], counters: Int32[Array, " B"]) -> Float[Array, "B 2"]:
    """Two numbers in [0, 1) for each row, a function of its seed and counter alone (Threefry 2x32)."""

    def of_row(words: Array, counter: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, counter), (2,), jnp.float32)

    return jax.vmap(of_row)(seed, counters)


def draw_by_weight(weights: Float[Array, "B V"], uniform: Float[Array, "B 2"]) -> Int32[Array, " B"]:
    """Token i of a row with probability weights[i] / sum(weights), by inverting the distribution function in two
    steps: the block of tokens, then the token in it. Never one of weight 0.

    One float32 prefix sum over a vocabulary would lose the rare tokens at its end: they are smaller than its rounding
    errors, and than the steps of one uniform number.
    """
    num_rows, vocab_size = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -vocab_size % _BLOCK))).reshape(num_rows, -1, _BLOCK)
    block = _invert(jnp.sum(weights, axis=2), uniform[:, 0])
    within = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _invert(within, uniform[:, 1])


def _invert(weights: Float[Array, "B n"], uniform: Float[Array, " B"]) -> Int32[Array, " B"]:
    """The first entry where the running sum exceeds its share `uniform` of the total, among those with weight."""
    cumulative = jnp.cumsum(weights, axis=1)
    has_weight = weights > 0
    is_reached = has_weight & (cumulative > uniform[:, None] * cumulative[:, -1:])
    last = weights.shape[1] - 1 - jnp.argmax(has_weight[:, ::-1], axis=1)  # if rounding has kept all from being reached
    return jnp.where(jnp.any(is_reached, axis=1), jnp.argmax(is_reached, axis=1), last).astype(jnp.int32)
