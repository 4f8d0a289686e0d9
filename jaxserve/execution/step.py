"""The device side of serving in one pure function: step(params, kv_cache, slots, packed plan) -> the same, and outputs.

Prefill, chunked prefill and decode are this one transition with different numbers of new tokens per row.
"""

from types import ModuleType
from typing import Any, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.execution.batch import Bucket, make_batch, unpack
from jaxserve.execution.pooling import pool
from jaxserve.execution.slots import Slots
from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.latent_attention import paged_attention_of
from jaxserve.request import MAX_LOGPROBS
from jaxserve.sampling.features import Feature
from jaxserve.sampling.logprobs import Logprobs, token_logprobs
from jaxserve.sampling.sampler import record, sample
from jaxserve.sampling.state import unpack_rows

PROMPT_LOGPROBS_CHUNK = 128
"""Tokens whose logits are alive at once while prompt log probabilities are computed."""


@no_type_check
@flax.struct.dataclass
class StepOutputs:
    """What the host reads of a step, a row each. Logprobs and embeddings are None in steps that cannot have them, and
    zeros unless asked for.
    """

    token_ids: Int[Array, " B"]
    is_corrupted: Bool[Array, " B"]
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None
    """One entry a token of the step: the log probability of the prompt token that follows it."""
    embeddings: Float[Array, "B E"] | None


def step(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    packed: Int[Array, " packed"],
    *,
    family: ModuleType,
    config: Any,
    kernels: Kernels,
    group_of_layer: tuple[int, ...],
    bucket: Bucket,
    is_plain: bool,
    is_decode_only: bool,
    has_logprobs: bool,
) -> tuple[KVCache, Slots, StepOutputs]:
    """One step of the engine. `kv_cache` and `slots` are donated; the keyword arguments are static.

    `is_plain` compiles no more than draws from filtered distributions, for steps in which no row needs other features;
    `is_decode_only` leaves out what rows of several tokens need, for steps without any. Without `has_logprobs` there
    are no log probabilities, neither of drawn tokens nor of a prompt's.
    """
    pieces = unpack(packed, bucket)
    num_slots = slots.last_tokens.shape[0]
    block_tables = (
        slots.block_tables.reshape(-1)
        .at[pieces["new_block_index"]]
        .set(pieces["new_block_ids"], mode="drop", unique_indices=True)
        .reshape(slots.block_tables.shape)
    )
    num_blocks, _, block_size, _ = kv_cache.k[0].shape
    batch = make_batch(
        pieces,
        slots.last_tokens,
        block_tables,
        group_of_layer=group_of_layer,
        block_size=block_size,
        num_blocks=num_blocks,
        is_decode_only=is_decode_only,
        kernels=kernels,
    )

    hidden, kv_cache = family.forward(params, config, batch, kv_cache, paged_attention_of(kv_cache))
    last_tokens = hidden if is_decode_only else hidden[jnp.maximum(batch.query_starts[1:] - 1, 0)]
    with jax.named_scope("lm_head"):
        logits = family.logits(params, config, last_tokens)

    features = pieces["header"][2]
    with jax.named_scope("sample"):
        sampled = sample(
            logits,
            slots.sampling,
            pieces["slots"],
            pieces["num_output_tokens"],
            features,
            plain=is_plain,
            implementation=kernels,
        )
    draws = pieces["samples"] > 0
    written = jnp.where(draws, pieces["slots"], num_slots)
    sampling_state, pooled_sums = slots.sampling, slots.pooled_sums
    logprobs = prompt_logprobs = embeddings = None
    if not is_plain:
        sampling_state = record(sampling_state, pieces["slots"], sampled.token_ids, draws, features)
        with jax.named_scope("pool"):
            pooled_sums, embeddings = pool(
                hidden,
                pooled_sums,
                batch,
                slot_ids=pieces["slots"],
                row_features=unpack_rows(slots.sampling, pieces["slots"]).features,
                features=features,
            )
    if has_logprobs:
        logprobs = jax.lax.cond(
            features & Feature.LOGPROBS != 0,
            lambda: _logprobs(logits, sampled.token_ids),
            lambda: _no_logprobs(*logits.shape),
        )
        prompt_logprobs = jax.lax.cond(
            pieces["header"][3] > 0,
            lambda: _prompt_logprobs(params, config, family, hidden, batch, pieces["next_token_ids"]),
            lambda: _no_logprobs(hidden.shape[0], logits.shape[1]),
        )
    slots = Slots(
        last_tokens=slots.last_tokens.at[written].set(sampled.token_ids, mode="drop"),
        block_tables=block_tables,
        sampling=sampling_state,
        pooled_sums=pooled_sums,
    )
    outputs = StepOutputs(sampled.token_ids, sampled.is_corrupted, logprobs, prompt_logprobs, embeddings)
    return kv_cache, slots, outputs


def _logprobs(logits: Float[Array, "R V"], token_ids: Int[Array, " R"]) -> Logprobs:
    return token_logprobs(logits, token_ids, min(MAX_LOGPROBS, logits.shape[1]))


def _no_logprobs(num_rows: int, vocab_size: int) -> Logprobs:
    num_top = min(MAX_LOGPROBS, vocab_size)
    return Logprobs(
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros(num_rows, jnp.int32),
        jnp.zeros((num_rows, num_top), jnp.int32),
        jnp.zeros((num_rows, num_top), jnp.float32),
    )


def _prompt_logprobs(
    params: Any,
    config: Any,
    family: ModuleType,
    hidden: Float[Array, "T E"],
    batch: Batch,
    next_token_ids: Int[Array, " B"],
) -> Logprobs:
    """For each token of the step the log probability of the token that follows it in its prompt."""
    num_tokens = hidden.shape[0]
    following = jnp.roll(batch.token_ids, -1)
    is_row = jnp.arange(next_token_ids.shape[0]) < batch.num_rows
    last_token_of_row = jnp.where(is_row, batch.query_starts[1:] - 1, num_tokens)
    following = following.at[last_token_of_row].set(next_token_ids, mode="drop")
    chunk = min(PROMPT_LOGPROBS_CHUNK, num_tokens)
    padding = -num_tokens % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    following = jnp.pad(following, (0, padding)).reshape(-1, chunk)
    chunks = jax.lax.map(lambda xs: _logprobs(family.logits(params, config, xs[0]), xs[1]), (hidden, following))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], chunks)
