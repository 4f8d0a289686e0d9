"""The device side of serving as pure functions: `forward`, from a packed plan to logits, then `draw`, to tokens.

Prefill, chunked prefill and decode are these two with different numbers of new tokens per row. They are compiled
separately, so that what the host contributes to sampling, a grammar's masks, may arrive while the layers run; `step` is
both in one program, for rows to which the host contributes nothing.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.execution.batch import Bucket, make_batch, unpack
from jaxserve.execution.drafting import Drafting, draft, take_in
from jaxserve.execution.pooling import pool
from jaxserve.execution.slots import Drafts, Slots, admit
from jaxserve.layers.batch import Batch, KVCache, Launch
from jaxserve.layers.context import PLAIN, Kernels
from jaxserve.layers.embedding import gathered
from jaxserve.layers.peers import Peers
from jaxserve.layers.states import Unsettled, settle, take_unsettled
from jaxserve.models.family import Family
from jaxserve.sampling.features import Feature
from jaxserve.sampling.logprobs import Logprobs, logprobs_at, token_logprobs
from jaxserve.sampling.sampler import record, sample
from jaxserve.sampling.state import unpack_rows
from jaxserve.speculative import NewTokens
from jaxserve.speculative.verification import num_accepted, synthetic_num_accepted

CORRUPTED = -1
"""The token id of a row whose logits contain NaN."""

NOTHING = -2
"""The token id of a column behind the first draft of its row that was not accepted."""

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
    num_valid: Int[Array, " R"] | None = None
    """One and the number of drafts, of rows that verify some; 0 if the request has reached its last token."""
    drafts: Int[Array, "R Q-1"] | None = None


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
    """The results of a forward pass. `hidden` is None if all rows have one token, or as many columns."""

    logits: Float[Array, "N V"]
    """Logits of the last token of each row, or of all its columns, in float32."""
    rows: DrawingRows
    hidden: Float[Array, "T E"] | None
    unsettled: tuple[Unsettled, ...] = ()
    """If rows verify drafts, their tokens, which `settle_states` is to take into each layer's states."""


@no_type_check
@flax.struct.dataclass
class Drawn:
    """What the host reads of a step. `logprobs`, with an entry for each column of each row, is None if no row can
    request any, and zeros if none does.
    """

    token_ids: Int[Array, "R columns"]
    """A token in the first column, CORRUPTED where logits were no numbers. If rows verify drafts, one more for each
    draft that was accepted, then NOTHING. With speculation, further columns: the number of drafts that were verified,
    the number of those that the next step may verify, and these. In memory of the host, if the program is to copy them
    there.
    """
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


class Pass(NamedTuple):
    """What a program that runs layers is compiled for."""

    family: Family
    config: Any
    reading: Reading
    span: range
    """The layers that it runs."""
    drafting: Drafting | None = None


def step(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    peers: Peers | None,
    packed: Int[Array, " packed"],
    x: Float[Array, "T E"] | None = None,
    *,
    of: Pass,
    has_tokens_on_host: bool,
) -> tuple[KVCache, Slots, Drawn]:
    """Run `forward`, then `draw`, for plain rows of one token each, or of as many columns. `kv_cache` and `slots` are
    donated; the keyword arguments are static.
    """
    kernels = of.reading.kernels
    assert of.reading.is_decode_only or of.reading.bucket.num_columns
    kv_cache, slots, forwarded = forward(params, kv_cache, slots, peers, packed, x, of=of)
    slots, drawn = draw(
        slots,
        forwarded.logits,
        forwarded.rows,
        kernels=kernels,
        is_plain=True,
        num_top_logprobs=None,
        has_tokens_on_host=has_tokens_on_host,
        drafting=of.drafting,
    )
    if forwarded.unsettled:
        kv_cache = settle_states(kv_cache, slots, forwarded.rows, forwarded.unsettled, kernels=kernels)
    return kv_cache, slots, drawn


def forward(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    peers: Peers | None,
    packed: Int[Array, " packed"],
    x: Float[Array, "T E"] | None = None,
    admissions: Int[Array, "rows width"] | None = None,
    *,
    of: Pass,
) -> tuple[KVCache, Slots, Forwarded]:
    """Compute the logits of a packed plan's rows; also write KV and block tables, and the slots of new requests that
    `slots.pack_admissions` has packed. `kv_cache` and `slots` are donated, `peers` must not be; `of` is static, and has
    all layers, or those of the last stage, which continues with `x`.
    """
    kv_cache, slots, begun = begin(params, kv_cache, slots, peers, packed, x, admissions, of=of)
    kv_cache, forwarded = finish(params, kv_cache, peers, begun, family=of.family, config=of.config, span=range(0))
    kv_cache, unsettled = take_unsettled(kv_cache)
    return kv_cache, slots, dataclasses.replace(forwarded, unsettled=unsettled)


def settle_states(
    kv_cache: KVCache, slots: Slots, rows: DrawingRows, unsettled: tuple[Unsettled, ...], *, kernels: Kernels
) -> KVCache:
    """Advance what layers keep as states by the tokens that a step of drafts has added to each sequence, when `draw`
    has counted them. `kv_cache` is donated; the keyword argument is static.
    """
    starts = rows.num_output_tokens + slots.num_prompt_tokens.at[rows.slots].get(mode="clip") - 1
    counts = slots.num_computed.at[rows.slots].get(mode="clip") - starts
    with jax.named_scope("settle_states"):
        return settle(kv_cache, unsettled, rows.slots, counts, starts == 0, kernels=kernels)


def begin(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    peers: Peers | None,
    packed: Int[Array, " packed"],
    x: Float[Array, "T E"] | None = None,
    admissions: Int[Array, "rows width"] | None = None,
    *,
    of: Pass,
) -> tuple[KVCache, Slots, Begun]:
    """Begin what `forward` does: with the layers of the span, which are the first ones, or those that follow the stage
    that has made `x`, and all if a drafter takes in what they make. Weights and pools of other layers may be missing.
    """
    family, config, reading, span, drafting = of
    if admissions is not None:
        slots = admit(slots, admissions)
    sizes = {"block_size": kv_cache.block_size, "num_blocks": kv_cache.num_blocks}
    slots = with_new_blocks(slots, packed, reading.bucket)
    drafter = None if drafting is None else drafting.drafter
    if drafter is not None and reading.bucket.num_columns:
        assert drafting is not None
        static: dict[str, Any] = {"drafting": drafting, "bucket": reading.bucket, "kernels": reading.kernels}
        kv_cache, slots = draft(params, kv_cache, slots, peers, packed, **static)
    slots, batch, rows = read_plan(slots, packed, reading, **sizes)
    own = dataclasses.replace(batch, peers=None if peers is None else peers.sums)
    x = family.embed(params, config, own) if x is None else x
    tapped: list[Array] = []
    bounds = [span.start, *(drafter.taps if drafter is not None else ()), span.stop]
    for first, end in itertools.pairwise(bounds):
        x, kv_cache = family.run(params, config, x, own, kv_cache, range(first, end)) if first < end else (x, kv_cache)
        tapped.append(x)
    if drafter is not None:
        assert drafting is not None
        x, kv_cache = take_in(params, kv_cache, own, tapped[:-1], x, drafting=drafting)
    return kv_cache, slots, Begun(x, batch, rows)


def run_stage(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    peers: Peers | None,
    packed: Int[Array, " packed"],
    given: Float[Array, "T E"] | Int[Array, " N"],
    admissions: Int[Array, "rows width"] | None = None,
    *,
    of: Pass,
) -> tuple[KVCache, Slots, Float[Array, "T E"]]:
    """Run `begin` for a stage before the last one; the next one continues with what it has made of the stream. The
    first one is given the last tokens of all slots, which the last one has drawn.
    """
    x = given if of.span.start else None
    if x is None:
        slots = dataclasses.replace(slots, last_tokens=given)
    kv_cache, slots, begun = begin(params, kv_cache, slots, peers, packed, x, admissions, of=of)
    return kv_cache, slots, begun.x


def finish(
    params: Any, kv_cache: KVCache, peers: Peers | None, begun: Begun, *, family: Family, config: Any, span: range
) -> tuple[KVCache, Forwarded]:
    """Finish what `begin` has begun: the layers of `span`, all that remain, then the head. `kv_cache` is donated."""
    x, batch = begun.x, begun.batch
    if span:
        own = dataclasses.replace(batch, peers=None if peers is None else peers.sums)
        x, kv_cache = family.run(params, config, x, own, kv_cache, span)
    draws_from_all = batch.is_decode_only or batch.num_columns > 0
    last_tokens = x if draws_from_all else x[jnp.maximum(batch.query_starts[1:] - 1, 0)]
    with jax.named_scope("lm_head"):
        logits = family.head(params, config, last_tokens, batch.context)
        logits = gathered(logits, None if peers is None else peers.logits, batch.context)
    return kv_cache, Forwarded(logits, begun.rows, None if draws_from_all else x)


def with_new_blocks(slots: Slots, packed: Int[Array, " packed"], bucket: Bucket) -> Slots:
    """Return the slots with the plan's new blocks."""
    pieces = unpack(packed, bucket)
    block_tables = (
        slots.block_tables.reshape(-1)
        .at[pieces["new_block_index"]]
        .set(pieces["new_block_ids"], mode="drop", unique_indices=True)
        .reshape(slots.block_tables.shape)
    )
    return dataclasses.replace(slots, block_tables=block_tables)


def read_plan(
    slots: Slots,
    packed: Int[Array, " packed"],
    reading: Reading,
    *,
    block_size: int,
    num_blocks: int,
) -> tuple[Slots, Batch, DrawingRows]:
    """Return the slots with the plan's tokens, its Batch, without peers, and what `draw` must know of its rows. The
    slots have the plan's new blocks.
    """
    pieces = unpack(packed, reading.bucket)
    num_columns = reading.bucket.num_columns
    batch, (starts, num_valid) = make_batch(
        pieces,
        slots,
        num_columns=num_columns,
        group_of_layer=reading.group_of_layer,
        block_size=block_size,
        num_blocks=num_blocks,
        is_decode_only=reading.is_decode_only,
        launch=reading.launch,
        kernels=reading.kernels,
    )
    slot_ids = pieces["slots"]
    ends = starts + 1 if num_columns else batch.seq_lens
    draws = pieces["samples"] > 0
    rows = DrawingRows(
        slots=slot_ids,
        draws=draws if slots.drafts is None else draws & (num_valid > 0),
        num_output_tokens=ends - slots.num_prompt_tokens.at[slot_ids].get(mode="clip"),
        features=pieces["header"][2],
    )
    if num_columns:  # `draw` will know how far the rows get
        drafts = batch.token_ids.reshape(-1, num_columns)[:, 1:]
        return slots, batch, dataclasses.replace(rows, num_valid=num_valid, drafts=drafts)
    num_computed = slots.num_computed.at[slot_ids].set(starts + num_valid, mode="drop")
    return dataclasses.replace(slots, num_computed=num_computed), batch, rows


def draw(
    slots: Slots,
    logits: Float[Array, "N V"],
    rows: DrawingRows,
    *,
    kernels: Kernels,
    is_plain: bool,
    num_top_logprobs: int | None,
    has_tokens_on_host: bool,
    drafting: Drafting | None = None,
) -> tuple[Slots, Drawn]:
    """Sample the next token of each row, and write it into its slot. `slots` is donated; the keyword arguments are
    static.

    Where rows have drafts, sample in each column as if its drafts were the sequence; what follows the first one that
    was not drawn is dropped. With `drafting`, propose the next drafts.

    `is_plain` compiles no more than draws from filtered distributions, for steps in which no row needs other features.
    `num_top_logprobs` is the number of most likely tokens beside the drawn one; None leaves log probabilities out.
    `has_tokens_on_host` makes the copy of the tokens to pinned memory of the host a part of the program: a copy that is
    requested from outside begins only when the host has learned that the program is done, a third of a millisecond
    later.
    """
    slot_ids, counters, columns = _of_columns(rows, num_columns=logits.shape[0] // rows.slots.shape[0])
    with jax.named_scope("sample"):
        sampled = sample(
            logits,
            slots.sampling,
            slot_ids,
            counters,
            rows.features,
            columns=columns,
            plain=is_plain,
            implementation=kernels,
        )
    token_ids = sampled.token_ids.reshape(rows.slots.shape[0], -1)
    sampling_state, logprobs = slots.sampling, None
    if not is_plain:  # rows with a history in their sampling state have no drafts
        sampling_state = record(sampling_state, rows.slots, token_ids[:, 0], rows.draws, rows.features)
    if num_top_logprobs is not None:
        logprobs = jax.lax.cond(
            rows.features & Feature.LOGPROBS != 0,
            lambda: token_logprobs(logits, sampled.token_ids, num_top_logprobs),
            lambda: _no_logprobs(logits.shape[0], num_top_logprobs),
        )
        asked_ids = slots.sampling.extras.logprob_ids.at[slot_ids].get(mode="clip")
        asked_logprobs, asked_ranks = jax.lax.cond(
            rows.features & Feature.LOGPROB_TOKEN_IDS != 0,
            lambda: logprobs_at(logits, asked_ids),
            lambda: (jnp.zeros(asked_ids.shape, jnp.float32), jnp.zeros(asked_ids.shape, jnp.int32)),
        )
        logprobs = logprobs._replace(asked_logprobs=asked_logprobs, asked_ranks=asked_ranks)
    slots = dataclasses.replace(slots, sampling=sampling_state)
    written = jnp.where(rows.draws, rows.slots, slots.last_tokens.shape[0])
    host_ids = jnp.where(sampled.is_corrupted, CORRUPTED, sampled.token_ids).reshape(token_ids.shape)
    if rows.drafts is None:
        counts, last_tokens = rows.draws.astype(jnp.int32), token_ids[:, 0]
        num_verified = jnp.zeros_like(counts)
    else:
        assert rows.num_valid is not None
        slots, num_verified, counts = _verify(slots, token_ids, rows)
        last_tokens = jnp.take_along_axis(token_ids, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        column = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
        host_ids = jnp.where(column < counts[:, None], host_ids, NOTHING)
    slots = dataclasses.replace(slots, last_tokens=slots.last_tokens.at[written].set(last_tokens, mode="drop"))
    if drafting is not None:
        lengths = rows.num_output_tokens + slots.num_prompt_tokens.at[rows.slots].get(mode="clip")
        slots, drafts, num_drafts = _propose(slots, NewTokens(written, token_ids, counts, lengths), drafting)
        host_ids = jnp.concatenate([host_ids, num_verified[:, None], num_drafts[:, None], drafts], axis=1)
    token_ids = host_ids
    if has_tokens_on_host:
        # After everything else: XLA leaves copies to the host out of command buffers, and one in the middle would split
        # them.
        token_ids, slots, logprobs = jax.lax.optimization_barrier((token_ids, slots, logprobs))
        token_ids = jax.device_put(token_ids, jax.memory.Space.Host)
    return slots, Drawn(token_ids, logprobs)


def _of_columns(rows: DrawingRows, *, num_columns: int) -> tuple[Int[Array, " N"], Int[Array, " N"], Int[Array, " N"]]:
    """Return the slot, the number of output tokens before, and the index in its row, of each column of each row."""
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    if num_columns == 1:
        return rows.slots, rows.num_output_tokens, jnp.zeros_like(rows.slots)
    counters = (rows.num_output_tokens[:, None] + column).reshape(-1)
    return jnp.repeat(rows.slots, num_columns), counters, jnp.tile(column[0], rows.slots.shape[0])


def _verify(
    slots: Slots, drawn: Int[Array, "R Q"], rows: DrawingRows
) -> tuple[Slots, Int[Array, " R"], Int[Array, " R"]]:
    """Return the slots as far as their rows got, how many drafts each row has verified, and tokens drawn."""
    assert rows.num_valid is not None
    assert rows.drafts is not None
    assert slots.drafts is not None
    num_masked = slots.drafts.num_masked.at[rows.slots].get(mode="clip")
    num_drafts = jnp.minimum(jnp.maximum(rows.num_valid - 1, 0), num_masked)
    if (rates := slots.drafts.acceptance_rates) is not None:
        seed = unpack_rows(slots.sampling, rows.slots).seed
        accepted = synthetic_num_accepted(seed, rows.num_output_tokens, num_drafts, rates)
    else:
        accepted = num_accepted(drawn, rows.drafts, num_drafts)
    counts = jnp.where(rows.draws, accepted + 1, 0)
    added = jnp.where(rows.draws, counts, jnp.maximum(rows.num_valid, 0))
    slots = dataclasses.replace(slots, num_computed=slots.num_computed.at[rows.slots].add(added, mode="drop"))
    return slots, num_drafts, counts


def _propose(slots: Slots, new: NewTokens, drafting: Drafting) -> tuple[Slots, Int[Array, "R k"], Int[Array, " R"]]:
    """Write the drafts that follow the new tokens into their slots. Also returns the drafts of each row, and how many
    there are.
    """
    assert slots.drafts is not None
    num_rows, num_drafts = new.slots.shape[0], drafting.proposer.num_drafts
    is_written = new.slots < slots.last_tokens.shape[0]
    with jax.named_scope("propose"):
        proposer, token_ids, counts = drafting.proposer.propose(slots.drafts.proposer, new)
    if num_rows > drafting.max_rows:  # then XLA leaves out whatever does not change the proposer's state
        token_ids, counts = jnp.zeros_like(token_ids), jnp.zeros_like(counts)
    elif slots.drafts.acceptance_rates is not None:
        counts = jnp.full_like(counts, num_drafts)
    else:
        token_ids, counts = _forced(slots.drafts, new, token_ids, counts)
    drafts = dataclasses.replace(
        slots.drafts,
        token_ids=slots.drafts.token_ids.at[new.slots].set(token_ids, mode="drop"),
        counts=slots.drafts.counts.at[new.slots].set(counts, mode="drop"),
        proposer=proposer,
    )
    return dataclasses.replace(slots, drafts=drafts), token_ids, jnp.where(is_written, counts, 0)


def _forced(
    held: Drafts, new: NewTokens, token_ids: Int[Array, "R k"], counts: Int[Array, " R"]
) -> tuple[Int[Array, "R k"], Int[Array, " R"]]:
    """Replace the drafts of rows whose grammar forces more tokens than they have just drawn."""
    forced, num_forced = (x.at[new.slots].get(mode="clip") for x in (held.forced, held.num_forced))
    num_columns, num_drafts = new.token_ids.shape[1], token_ids.shape[1]
    column = jnp.arange(num_columns, dtype=jnp.int32)[None]
    is_same = (new.token_ids == forced[:, :num_columns]) | (column >= new.counts[:, None])
    num_left = jnp.where(jnp.all(is_same, axis=1), num_forced - new.counts, 0)
    place = new.counts[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None]
    following = jnp.take_along_axis(forced, place, axis=1, mode="clip")
    is_forced = num_left > 0
    return jnp.where(is_forced[:, None], following, token_ids), jnp.where(
        is_forced, jnp.minimum(num_left, num_drafts), counts
    )


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
    ends = slots.num_computed.at[pieces["slots"]].get(mode="fill", fill_value=0)
    pooled, embeddings = pool(
        hidden,
        slots.pooled,
        slot_ids=pieces["slots"],
        starts=ends - pieces["num_tokens"],
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
