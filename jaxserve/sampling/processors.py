"""Logits processors, each a small pure function that applies one sampling parameter or the request's history to the
logits.

They run before the temperature, in the order of `process`, each only in a step in which some row needs it.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.sampling.features import Feature
from jaxserve.sampling.filters import filter_logits
from jaxserve.sampling.state import NO_TOKEN, Extras, RowParams


def process(
    logits: Float[Array, "B V"],
    params: RowParams,
    extras: Extras,
    *,
    slot_ids: Int32[Array, " B"],
    columns: Int32[Array, " B"],
    num_output_tokens: Int32[Array, " B"],
    features: Int32[Array, ""],
) -> Float[Array, "B V"]:
    """Apply the processors in `features` to the rows that need them. `extras` are those of all slots.

    A row whose tokens would all be masked gets its raw logits back, restricted to its allowed tokens if it has any: the
    alternative would be to fail a request because its parameters contradict each other.
    """

    def of_rows(leaf: Array) -> Array:
        return leaf.at[slot_ids].get(mode="clip")

    def wants(feature: Feature) -> Bool[Array, "B 1"]:
        return (params.features & feature)[:, None] != 0

    def allowed_tokens() -> Bool[Array, "B V"]:
        masks = extras.allowed_mask.at[slot_ids, columns].get(mode="clip")
        return unpack_mask(masks, logits.shape[1])

    def penalties(x: Array) -> Array:
        return apply_penalties(x, of_rows(extras.prompt_mask), of_rows(extras.output_counts), params.numbers)

    def bias(x: Array) -> Array:
        ids = jnp.where(wants(Feature.LOGIT_BIAS), of_rows(extras.bias_ids), x.shape[1])
        return apply_logit_bias(x, ids, of_rows(extras.bias_values))

    def allowed(x: Array) -> Array:
        return jnp.where(wants(Feature.ALLOWED_TOKENS) & ~allowed_tokens(), -jnp.inf, x)

    def bad_words(x: Array) -> Array:
        words = jnp.where(wants(Feature.BAD_WORDS)[:, :, None], of_rows(extras.bad_words), NO_TOKEN)
        return apply_bad_words(x, words, of_rows(extras.recent_tokens))

    def min_tokens(x: Array) -> Array:
        too_early = wants(Feature.MIN_TOKENS) & (num_output_tokens < params.numbers["min_tokens"])[:, None]
        return jnp.where(too_early & unpack_mask(of_rows(extras.stop_mask), x.shape[1]), -jnp.inf, x)

    def within_allowed(x: Array) -> Array:
        is_allowed = allowed_tokens()
        is_allowed |= ~wants(Feature.ALLOWED_TOKENS) | ~jnp.any(is_allowed, axis=1, keepdims=True)
        return jnp.where(is_allowed, jnp.maximum(x, jnp.finfo(jnp.float32).min), -jnp.inf)

    processed = logits
    for feature, processor in (
        (Feature.PENALTIES, penalties),
        (Feature.LOGIT_BIAS, bias),
        (Feature.ALLOWED_TOKENS, allowed),
        (Feature.BAD_WORDS, bad_words),
        (Feature.MIN_TOKENS, min_tokens),
    ):
        processed = lax.cond(features & feature != 0, processor, lambda x: x, processed)
    # Penalties near zero can overflow; the draw needs a finite maximum.
    processed = jnp.minimum(processed, jnp.finfo(jnp.float32).max)
    is_empty = jnp.max(processed, axis=1, keepdims=True) == -jnp.inf
    processed = lax.cond(
        jnp.any(is_empty), lambda x: jnp.where(is_empty, within_allowed(logits), x), lambda x: x, processed
    )
    return lax.cond(
        features & Feature.LOGIT_FILTERS != 0,
        lambda x: filter_logits(x, params.numbers),
        lambda x: x,
        processed,
    )


def apply_penalties(
    logits: Float[Array, "B V"],
    prompt_mask: UInt32[Array, "B W"],
    output_counts: Int32[Array, "B V"],
    values: Mapping[str, Float[Array, " B"]],
) -> Float[Array, "B V"]:
    """Penalize the tokens of prompt and output for repetition (Keskar et al. 2019, "CTRL"), then those of the output
    for frequency and presence (OpenAI API).

    A row without penalties has scalars of 1, 0 and 0, which change nothing whatever its slot's history is.
    """
    has_output = output_counts > 0
    is_seen = has_output | unpack_mask(prompt_mask, logits.shape[1])
    penalty = values["repetition_penalty"][:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(is_seen, penalized, logits)
    logits -= values["frequency_penalty"][:, None] * output_counts.astype(jnp.float32)
    return logits - values["presence_penalty"][:, None] * has_output.astype(jnp.float32)


def apply_logit_bias(
    logits: Float[Array, "B V"], ids: Int32[Array, "B biases"], values: Float[Array, "B biases"]
) -> Float[Array, "B V"]:
    """Add `values` to the logits of `ids`; an id of V is padding."""
    return logits.at[_rows(ids), ids].add(values, mode="drop")


def apply_bad_words(
    logits: Float[Array, "B V"],
    words: Int32[Array, "B words tokens"],
    recent_tokens: Int32[Array, "B tokens-1"],
) -> Float[Array, "B V"]:
    """Mask the last token of each word whose preceding tokens are the latest of the output.

    Words are right-aligned and padded with NO_TOKEN, which matches anything.
    """
    prefixes = words[:, :, :-1]
    is_complete = jnp.all((prefixes == NO_TOKEN) | (prefixes == recent_tokens[:, None]), axis=2)
    last = words[:, :, -1]
    banned = jnp.where(is_complete & (last != NO_TOKEN), last, logits.shape[1])
    return logits.at[_rows(banned), banned].set(-jnp.inf, mode="drop")


def unpack_mask(words: UInt32[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """Unpack bit masks over the vocabulary into booleans."""
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]
    return (bits & 1).astype(bool).reshape(words.shape[0], -1)[:, :vocab_size]


def _rows(ids: Int32[Array, "B n"]) -> Int32[Array, "B 1"]:
    return jnp.arange(ids.shape[0])[:, None]
