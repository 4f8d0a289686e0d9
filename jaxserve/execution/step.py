"""The device side of serving as pure functions: `forward`, from a packed plan to logits, then `draw`, to tokens.

Prefill, chunked prefill and decode are these two with different numbers of new tokens per row. They are compiled
separately, so that what the host contributes to sampling, a grammar's masks, may arrive while the layers run; `step` is
both in one program, for rows to which the host contributes nothing.
"""

import dataclasses
from typing import Any, NamedTuple, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.execution.batch import Bucket, make_batch, unpack
from jaxserve.execution.pooling import pool
from jaxserve.execution.slots import Slots, admit
from jaxserve.layers.batch import Batch, KVCache, Launch
from jaxserve.layers.context import PLAIN, Kernels
from jaxserve.layers.embedding import gathered
from jaxserve.layers.peers import Peers
from jaxserve.models.family import Family
from jaxserve.sampling.features import Feature
from jaxserve.sampling.logprobs import Logprobs, logprobs_at, token_logprobs
from jaxserve.sampling.sampler import record, sample
from jaxserve.sampling.state import unpack_rows

CORRUPTED = -1
"""The token id of a row whose logits contain NaN."""

PROMPT_LOGPROBS_CHUNK = 128
"""Tokens whose logits are alive at once while prompt log probabilities are computed."""


@no_type_check
@flax.struct.dataclass
class DrawingRows:
    """What `draw` needs to know of R rows besides their slots."""

    slots: Int[Array, " R"]
    draws: Bool[Array, " R"]
    """True if the row's tokens reach the end of its sequence."""
    num_output_tokens: Int[Array, " R"]
    """Generated before this step."""
    features: Int[Array, ""]
    """The bits of `Feature` that some row needs."""


@no_type_check
@flax.struct.dataclass
class Begun:
    """What the first layers of a forward pass leave for the others."""

    x: Float[Array, "T E"]
    """The residual stream; behind the last layer, the hidden states."""
    batch: Batch
    """Without peers."""
    rows: DrawingRows


@no_type_check
@flax.struct.dataclass
class Forwarded:
    """The results of a forward pass. `hidden` is None if all rows have one token."""

    logits: Float[Array, "R V"]
    """Logits of the last token of each row, in float32."""
    rows: DrawingRows
    hidden: Float[Array, "T E"] | None


@no_type_check
@flax.struct.dataclass
class Drawn:
    """What the host reads of a step, one entry per row. `logprobs` is None if no row can request any, and zeros if none
    does.
    """

    token_ids: Int[Array, " R"]
    """CORRUPTED where logits were no numbers. In memory of the host, if the program is to copy them there."""
    logprobs: Logprobs | None


class Reading(NamedTuple):
    """How a program reads packed plans."""

    bucket: Bucket
    group_of_layer: tuple[int, ...]
    """The KV group of each layer; it matters only if there are several."""
    kernels: Kernels
    is_decode_only: bool
    """If true, what rows of several tokens need is left out."""
    launch: Launch = "at once"
    """See `layers.launch`."""


def step(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    peers: Peers | None,
    packed: Int[Array, " packed"],
    *,
    family: Family,
    config: Any,
    reading: Reading,
    has_tokens_on_host: bool,
) -> tuple[KVCache, Slots, Drawn]:
    """Run `forward`, then `draw`, for plain rows of one token each. `kv_cache` and `slots` are donated; the keyword
    arguments are static.
    """
    assert reading.is_decode_only
    kv_cache, slots, forwarded = forward(
        params, kv_cache, slots, peers, packed, family=family, config=config, reading=reading
    )
    slots, drawn = draw(
        slots,
        forwarded.logits,
        forwarded.rows,
        kernels=reading.kernels,
        is_plain=True,
        num_top_logprobs=None,
        has_tokens_on_host=has_tokens_on_host,
    )
    return kv_cache, slots, drawn


def forward(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    peers: Peers | None,
    packed: Int[Array, " packed"],
    admissions: Int[Array, "rows width"] | None = None,
    *,
    family: Family,
    config: Any,
    reading: Reading,
) -> tuple[KVCache, Slots, Forwarded]:
    """Compute the logits of a packed plan's rows; also write KV and block tables, and the slots of new requests that
    `slots.pack_admissions` has packed. `kv_cache` and `slots` are donated, `peers` must not be; the keyword arguments
    are static.
    """
    span = range(config.num_layers)
    kv_cache, slots, begun = begin(
        params, kv_cache, slots, peers, packed, admissions, family=family, config=config, reading=reading, span=span
    )
    kv_cache, forwarded = finish(params, kv_cache, peers, begun, family=family, config=config, span=range(0))
    return kv_cache, slots, forwarded


def begin(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    peers: Peers | None,
    packed: Int[Array, " packed"],
    admissions: Int[Array, "rows width"] | None = None,
    *,
    family: Family,
    config: Any,
    reading: Reading,
    span: range,
) -> tuple[KVCache, Slots, Begun]:
    """Begin what `forward` does: with the layers of `span`, which are the first ones. Weights and pools of other layers
    may be missing.
    """
    if admissions is not None:
        slots = admit(slots, admissions)
    sizes = {"block_size": kv_cache.block_size, "num_blocks": kv_cache.num_blocks}
    slots, batch, rows = read_plan(slots, packed, reading, **sizes)
    own = dataclasses.replace(batch, peers=None if peers is None else peers.sums)
    x = family.embed(params, config, own)
    x, kv_cache = family.run(params, config, x, own, kv_cache, span)
    return kv_cache, slots, Begun(x, batch, rows)


def finish(
    params: Any, kv_cache: KVCache, peers: Peers | None, begun: Begun, *, family: Family, config: Any, span: range
) -> tuple[KVCache, Forwarded]:
    """Finish what `begin` has begun: the layers of `span`, all that remain, then the head. `kv_cache` is donated."""
    x, batch = begun.x, begun.batch
    if span:
        own = dataclasses.replace(batch, peers=None if peers is None else peers.sums)
        x, kv_cache = family.run(params, config, x, own, kv_cache, span)
    last_tokens = x if batch.is_decode_only else x[jnp.maximum(batch.query_starts[1:] - 1, 0)]
    with jax.named_scope("lm_head"):
        logits = family.head(params, config, last_tokens, batch.context)
        logits = gathered(logits, None if peers is None else peers.logits, batch.context)
    return kv_cache, Forwarded(logits, begun.rows, None if batch.is_decode_only else x)


def read_plan(
    slots: Slots,
    packed: Int[Array, " packed"],
    reading: Reading,
    *,
    block_size: int,
    num_blocks: int,
) -> tuple[Slots, Batch, DrawingRows]:
    """Return the slots with the plan's new blocks, its Batch, without peers, and what `draw` must know of its rows."""
    pieces = unpack(packed, reading.bucket)
    block_tables = (
        slots.block_tables.reshape(-1)
        .at[pieces["new_block_index"]]
        .set(pieces["new_block_ids"], mode="drop", unique_indices=True)
        .reshape(slots.block_tables.shape)
    )
    batch = make_batch(
        pieces,
        slots.last_tokens,
        block_tables,
        group_of_layer=reading.group_of_layer,
        block_size=block_size,
        num_blocks=num_blocks,
        is_decode_only=reading.is_decode_only,
        launch=reading.launch,
        kernels=reading.kernels,
    )
    rows = DrawingRows(
        slots=pieces["slots"],
        draws=pieces["samples"] > 0,
        num_output_tokens=pieces["num_output_tokens"],
        features=pieces["header"][2],
    )
    return dataclasses.replace(slots, block_tables=block_tables), batch, rows


def draw(
    slots: Slots,
    logits: Float[Array, "R V"],
    rows: DrawingRows,
    *,
    kernels: Kernels,
    is_plain: bool,
    num_top_logprobs: int | None,
    has_tokens_on_host: bool,
) -> tuple[Slots, Drawn]:
    """Sample the next token of each row, and write it into its slot. `slots` is donated; the keyword arguments are
    static.

    `is_plain` compiles no more than draws from filtered distributions, for steps in which no row needs other features.
    `num_top_logprobs` is the number of most likely tokens beside the drawn one; None leaves log probabilities out.
    `has_tokens_on_host` makes the copy of the tokens to pinned memory of the host a part of the program: a copy that is
    requested from outside begins only when the host has learned that the program is done, a third of a millisecond
    later.
    """
    with jax.named_scope("sample"):
        sampled = sample(
            logits,
            slots.sampling,
            rows.slots,
            rows.num_output_tokens,
            rows.features,
            plain=is_plain,
            implementation=kernels,
        )
    sampling_state, logprobs = slots.sampling, None
    if not is_plain:
        sampling_state = record(sampling_state, rows.slots, sampled.token_ids, rows.draws, rows.features)
    if num_top_logprobs is not None:
        logprobs = jax.lax.cond(
            rows.features & Feature.LOGPROBS != 0,
            lambda: token_logprobs(logits, sampled.token_ids, num_top_logprobs),
            lambda: _no_logprobs(logits.shape[0], num_top_logprobs),
        )
        asked_ids = slots.sampling.extras.logprob_ids.at[rows.slots].get(mode="clip")
        asked_logprobs, asked_ranks = jax.lax.cond(
            rows.features & Feature.LOGPROB_TOKEN_IDS != 0,
            lambda: logprobs_at(logits, asked_ids),
            lambda: (jnp.zeros(asked_ids.shape, jnp.float32), jnp.zeros(asked_ids.shape, jnp.int32)),
        )
        logprobs = logprobs._replace(asked_logprobs=asked_logprobs, asked_ranks=asked_ranks)
    written = jnp.where(rows.draws, rows.slots, slots.last_tokens.shape[0])
    last_tokens = slots.last_tokens.at[written].set(sampled.token_ids, mode="drop")
    slots = dataclasses.replace(slots, last_tokens=last_tokens, sampling=sampling_state)
    token_ids = jnp.where(sampled.is_corrupted, CORRUPTED, sampled.token_ids)
    if has_tokens_on_host:
        # After everything else: XLA leaves copies to the host out of command buffers, and one in the middle would split
        # them.
        token_ids, slots, logprobs = jax.lax.optimization_barrier((token_ids, slots, logprobs))
        token_ids = jax.device_put(token_ids, jax.memory.Space.Host)
    return slots, Drawn(token_ids, logprobs)


def prompt_logprobs(
    params: Any,
    hidden: Float[Array, "T E"],
    packed: Int[Array, " packed"],
    *,
    family: Family,
    config: Any,
    bucket: Bucket,
    num_top: int,
) -> Logprobs:
    """Return, for each token of a forward pass, the log probability of the token that follows it in its prompt, and
    those of the `num_top` most likely ones; undefined if none does. The keyword arguments are static.
    """
    pieces = unpack(packed, bucket)
    num_tokens = hidden.shape[0]
    is_row = jnp.arange(bucket.num_rows) < pieces["header"][0]
    last_token_of_row = jnp.where(is_row, jnp.cumsum(pieces["num_tokens"], dtype=jnp.int32) - 1, num_tokens)
    following = jnp.roll(pieces["token_ids"], -1).at[last_token_of_row].set(pieces["next_token_ids"], mode="drop")
    chunk = min(PROMPT_LOGPROBS_CHUNK, num_tokens)
    padding = -num_tokens % chunk
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    following = jnp.pad(following, (0, padding)).reshape(-1, chunk)

    def of_chunk(xs: tuple[Array, Array]) -> Logprobs:
        hidden, following = xs
        return token_logprobs(gathered(family.head(params, config, hidden, PLAIN)), following, num_top)

    chunks = jax.lax.map(of_chunk, (hidden, following))
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])[:num_tokens], chunks)


def embed(
    slots: Slots, hidden: Float[Array, "T E"], packed: Int[Array, " packed"], *, bucket: Bucket
) -> tuple[Slots, Float[Array, "R E"]]:
    """Return the vector of each row after a forward pass; undefined for rows that request none. `slots` is donated: it
    has the sums and maxima of prompts that come in chunks. `bucket` is static.
    """
    pieces = unpack(packed, bucket)
    pooled, embeddings = pool(
        hidden,
        slots.pooled,
        slot_ids=pieces["slots"],
        starts=pieces["starts"],
        num_tokens=pieces["num_tokens"],
        row_features=unpack_rows(slots.sampling, pieces["slots"]).features,
        features=pieces["header"][2],
    )
    return dataclasses.replace(slots, pooled=pooled), embeddings


def _no_logprobs(num_rows: int, num_top: int) -> Logprobs:
    return Logprobs(
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros(num_rows, jnp.int32),
        jnp.zeros((num_rows, num_top), jnp.int32),
        jnp.zeros((num_rows, num_top), jnp.float32),
        jnp.zeros((num_rows, 0), jnp.float32),
        jnp.zeros((num_rows, 0), jnp.int32),
    )
