"""The last part of a step: draw one token for each sampled row, and record it in the sampling state."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.sampling.features import OF_NUMBER, Feature
from jaxserve.sampling.processors import process
from jaxserve.sampling.state import DEFAULTS, SamplingState, unpack_rows
from pallas_kernels import sampling as kernels
from pallas_kernels.implementation import Implementation


class SampledTokens(NamedTuple):
    """The drawn tokens. Rows with `is_corrupted` had no usable logits (NaN, +inf, or nothing but -inf); their token is
    0.
    """

    token_ids: Int32[Array, " B"]
    is_corrupted: Bool[Array, " B"]


def sample(
    logits: Float[Array, "B V"],
    state: SamplingState,
    slot_ids: Int32[Array, " B"],
    num_output_tokens: Int32[Array, " B"],
    features: Int32[Array, ""],
    *,
    columns: Int32[Array, " B"] | None = None,
    plain: bool = False,
    implementation: Implementation = "xla",
) -> SampledTokens:
    """Draw the next token of each row by the parameters of its slot.

    `num_output_tokens` counts the tokens generated before this one, including those the host has not seen yet. Together
    with the seed it determines the draw, so that a row's token does not depend on the other rows. `features` are the
    bits that some row needs (see `Feature`); parts that are not in it do not run. `plain` (static) leaves the
    processors out of the program, for steps in which no row needs them. Rows may be the `columns` of fewer sequences.

    The order is that of Hugging Face transformers: processors, filters of logits, temperature, top-k, top-p, min-p.
    Greedy ties go to the lowest id, and all tokens that tie at a filter's threshold are kept.
    """
    params = unpack_rows(state, slot_ids)
    processed = logits
    if not plain:
        processed = lax.cond(
            features & (Feature.PROCESSORS | Feature.LOGIT_FILTERS) != 0,
            lambda x: process(
                x,
                params,
                state.extras,
                slot_ids=slot_ids,
                columns=jnp.zeros_like(slot_ids) if columns is None else columns,
                num_output_tokens=num_output_tokens,
                features=features,
            ),
            lambda x: x,
            logits,
        )

    def if_needed(name: str) -> Array:
        """Neutralize a parameter that no row needs: padding rows carry the parameters of some slot, which must not cost
        work.
        """
        column, feature = params.numbers[name], OF_NUMBER[name]
        return jnp.where(features & feature != 0, column, jnp.asarray(DEFAULTS[name], column.dtype))

    def draw(logits: Float[Array, "B V"], parameters: dict[str, Array]) -> tuple[Array, Array]:
        return kernels.sample(logits, **parameters, implementation=implementation)

    mesh = jax.typeof(processed).sharding.mesh
    if implementation != "xla" and not mesh.empty:
        everywhere = PartitionSpec()  # replicated: each device draws all tokens itself
        draw = jax.shard_map(draw, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    token_ids, maximum = draw(
        processed,
        {
            "temperature": jnp.where(features & Feature.RANDOM != 0, params.numbers["temperature"], 0.0),
            "top_k": if_needed("top_k"),
            "top_p": if_needed("top_p"),
            "min_p": if_needed("min_p"),
            "uniform": uniforms(params.seed, num_output_tokens),
        },
    )
    # The largest raw logit shows everything that makes a softmax fail: it is NaN, +inf, or -inf if all are.
    is_corrupted = ~jnp.isfinite(maximum if plain else jnp.max(logits, axis=1))
    return SampledTokens(jnp.where(is_corrupted, 0, token_ids), is_corrupted)


def record(
    state: SamplingState,
    slot_ids: Int32[Array, " B"],
    token_ids: Int32[Array, " B"],
    active: Bool[Array, " B"],
    features: Int32[Array, ""],
) -> SamplingState:
    """Record the tokens of the `active` rows in their slots' histories, if `features` says that some row needs them.

    No two active rows have the same slot.
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


def uniforms(seed: UInt32[Array, "B 2"], counters: Int32[Array, " B"]) -> Float[Array, "B 2"]:
    """Return two numbers in [0, 1) for each row, a function of its seed and counter alone (Threefry 2x32)."""

    def of_row(words: Array, counter: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, counter), (2,), jnp.float32)

    return jax.vmap(of_row)(seed, counters)
