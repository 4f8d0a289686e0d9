"""What drafters with weights do in a step: they draft before it is verified, and take in the tokens of every step."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.execution.batch import Bucket, read_columns, unpack
from jaxserve.execution.slots import Slots
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.context import Kernels
from jaxserve.layers.embedding import gathered
from jaxserve.layers.peers import Peers
from jaxserve.sampling.sampler import sample
from jaxserve.speculative import Drafter, Features, Proposer


class Drafting(NamedTuple):
    """How a program drafts and verifies."""

    proposer: Proposer
    max_rows: int = 2**31 - 1
    """Rows of the largest program whose rows get drafts."""
    drafter: Drafter | None = None
    group: int = 0
    """The KV group whose block tables the drafter uses."""
    is_coupled: bool = False
    """The drafter draws with the numbers with which the target will draw; otherwise it takes the most likely token."""


def draft(
    params: Any,
    kv_cache: KVCache,
    slots: Slots,
    peers: Peers | None,
    packed: Int[Array, " packed"],
    *,
    drafting: Drafting,
    bucket: Bucket,
    kernels: Kernels,
) -> tuple[KVCache, Slots]:
    """Write drafts into the slots of rows that will verify some, unless they have other ones already.

    Each draft is a pass of one token a row, whose keys and values go where those of the target will go, too.
    """
    assert drafting.drafter is not None
    assert slots.drafts is not None
    drafter, own, kept = drafting.drafter, *_own(kv_cache, drafting.drafter)
    pieces = unpack(packed, bucket)
    rows = read_columns(pieces, slots)
    slot_ids, num_rows, block_size = pieces["slots"], pieces["header"][0], kv_cache.block_size
    tables = slots.block_tables[drafting.group].at[slot_ids].get(mode="fill", fill_value=0)
    row = jnp.arange(slot_ids.shape[0], dtype=jnp.int32)

    def index(positions: Int[Array, " R"]) -> Int[Array, " R"]:
        positions = jnp.maximum(positions, 0)
        return tables[row, positions // block_size] * block_size + positions % block_size

    features = None
    if kept is not None:
        features = jnp.where((rows.starts > 0)[:, None], kept.read(index(rows.starts - 1)), 0)
    counters = rows.starts + 1 - slots.num_prompt_tokens.at[slot_ids].get(mode="clip")
    token_ids, drafts = rows.last_tokens, []
    for count in range(bucket.num_columns - 1):
        positions = rows.starts + (count if features is None else count - 1)
        is_written = (count < rows.num_valid) & (positions >= 0)
        batch = Batch(
            token_ids=token_ids,
            positions=jnp.maximum(jnp.where(rows.is_row, positions, 0), 0),
            write_index=jnp.where(is_written, index(positions), kv_cache.num_blocks * block_size + row),
            query_starts=jnp.minimum(jnp.arange(slot_ids.shape[0] + 1, dtype=jnp.int32), num_rows),
            seq_lens=jnp.where(rows.is_row, positions + 1, 0),
            block_tables=tables,
            slots=slot_ids,
            num_decode_rows=num_rows,
            num_rows=num_rows,
            is_decode_only=True,
            kernels=kernels,
            peers=None if peers is None else peers.sums,
        )
        with jax.named_scope(f"draft_{count}"):
            hidden, own = drafter.run(params, batch, features, own)
            logits = drafter.logits(params, hidden, batch.context)
            logits = gathered(logits, None if peers is None else peers.logits, batch.context)
            if drafting.is_coupled:
                bits = pieces["header"][2]
                parameters = slots.sampling, slot_ids, counters + count, bits
                token_ids = sample(logits, *parameters, plain=True, implementation=kernels).token_ids
            else:
                token_ids = jnp.argmax(logits, axis=1).astype(jnp.int32)
        drafts.append(token_ids)
        features = None if features is None else hidden
    held = slots.drafts
    is_free = held.counts.at[slot_ids].get(mode="clip") == 0
    if held.acceptance_rates is not None:
        is_free = jnp.ones_like(is_free)
    written = jnp.where(is_free, slot_ids, held.counts.shape[0])
    drafted = dataclasses.replace(
        held,
        token_ids=held.token_ids.at[written, : len(drafts)].set(jnp.stack(drafts, axis=1), mode="drop"),
        counts=held.counts.at[written].set(len(drafts), mode="drop"),
    )
    return _with_own(kv_cache, own, kept), dataclasses.replace(slots, drafts=drafted)


def take_in(
    params: Any,
    kv_cache: KVCache,
    batch: Batch,
    tapped: list[Float[Array, "T E"]],
    hidden: Float[Array, "T E"],
    *,
    drafting: Drafting,
) -> tuple[Float[Array, "T E"], KVCache]:
    """Return `hidden`, and the cache with what the drafter keeps of a step's tokens. `tapped` and `hidden` are those of
    `Drafter.features`.
    """
    drafter = drafting.drafter
    assert drafter is not None
    own, kept = _own(kv_cache, drafter)
    if batch.groups:
        batch = dataclasses.replace(batch, **batch.groups[drafting.group]._asdict(), groups=(), group_of_layer=())
    batch = dataclasses.replace(batch, launch="at once")
    with jax.named_scope("drafter"):
        features = None
        if kept is not None:
            new = drafter.features(params, tapped, hidden, batch.context)
            kept = kept.write(new, batch.write_index)
            batch, features = _behind(batch, new, kept, end=kv_cache.num_blocks * kv_cache.block_size)
        _, own = drafter.run(params, batch, features, own)
    # Otherwise XLA may do this behind the copy of the tokens to the host, which would split the command buffer.
    return jax.lax.optimization_barrier((hidden, _with_own(kv_cache, own, kept)))


def _behind(batch: Batch, new: Float[Array, "T F"], kept: Features, *, end: int) -> tuple[Batch, Float[Array, "T F"]]:
    """Return the batch in which each token is at the position of the one before it, and the features of those. The
    first token of a sequence is at none.
    """
    block_size = kept.values.shape[1]
    token = jnp.arange(len(batch.token_ids), dtype=jnp.int32)
    row = jnp.searchsorted(batch.query_starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, batch.seq_lens.shape[0] - 1)
    positions = jnp.maximum(batch.positions - 1, 0)
    index = batch.block_tables[row, positions // block_size] * block_size + positions % block_size
    is_first = token == batch.query_starts[row]
    features = jnp.where(is_first[:, None], kept.read(index), jnp.roll(new, 1, axis=0).astype(kept.values.dtype))
    is_written = (batch.write_index < end) & (batch.positions > 0)
    behind = dataclasses.replace(
        batch,
        positions=positions,
        write_index=jnp.where(is_written, index, end + token),
        seq_lens=jnp.maximum(batch.seq_lens - 1, 0),
    )
    return behind, features


def _own(kv_cache: KVCache, drafter: Drafter) -> tuple[KVCache, Features | None]:
    """Return the cache of the drafter's layers, and the features, which are the last pools."""
    pools = kv_cache.pools[len(kv_cache.pools) - len(drafter.cache_specs) :]
    own = pools[: len(drafter.layer_specs)]
    layers = dataclasses.replace(kv_cache, pools=own, pool_of_layer=(), expert_loads=None)  # the target's experts alone
    return layers, pools[-1] if drafter.feature_size else None


def _with_own(kv_cache: KVCache, own: KVCache, kept: Features | None) -> KVCache:
    pools = own.pools if kept is None else (*own.pools, kept)
    return dataclasses.replace(kv_cache, pools=(*kv_cache.pools[: len(kv_cache.pools) - len(pools)], *pools))
