"""Drive a model step by step over a paged KV cache, without scheduler or runner: ragged, chunked, padded batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from naive import QUICK_TO_COMPILE, owners

from jaxserve.execution.kv_cache import abstract_kv_cache, zeros
from jaxserve.layers.batch import Batch
from jaxserve.layers.context import PLAIN
from jaxserve.layers.embedding import gathered

BLOCK_SIZE = 4


def empty_cache(kv_specs, num_blocks, mesh):
    """Pools of float32 zeros."""
    return zeros(
        abstract_kv_cache(
            kv_specs,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_slots=num_blocks,
            dtype=np.dtype(np.float32),
            mesh=mesh,
            pool_of_layer=owners(kv_specs),
        )
    )


def make_batch(rows, *, num_tokens, num_rows, num_blocks):
    """Return a padded Batch, and its rows in order; a row is (token ids of the whole sequence, blocks, start, stop)."""
    rows = sorted(rows, key=lambda row: row[3] - row[2] > 1)
    lengths = [stop - start for _, _, start, stop in rows]
    assert sum(lengths) <= num_tokens
    assert len(rows) <= num_rows
    token_ids, positions = np.zeros((2, num_tokens), np.int32)
    write_index = num_blocks * BLOCK_SIZE + np.arange(num_tokens, dtype=np.int32)
    query_starts = np.full(num_rows + 1, sum(lengths), np.int32)
    query_starts[: len(rows) + 1] = np.cumsum([0, *lengths])
    seq_lens = np.zeros(num_rows, np.int32)
    block_tables = np.zeros((num_rows, max(len(blocks) for _, blocks, _, _ in rows)), np.int32)
    slots = np.full(num_rows, num_blocks, np.int32)
    for index, (sequence, blocks, start, stop) in enumerate(rows):
        mine = slice(query_starts[index], query_starts[index + 1])
        position = np.arange(start, stop)
        token_ids[mine], positions[mine] = sequence[start:stop], position
        write_index[mine] = np.asarray(blocks)[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        seq_lens[index] = stop
        block_tables[index, : len(blocks)] = blocks
        slots[index] = blocks[0]  # which no other sequence has
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        write_index=write_index,
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=block_tables,
        slots=slots,
        num_decode_rows=np.int32(lengths.count(1)),
        num_rows=np.int32(len(rows)),
    )
    return jax.tree.map(jnp.asarray, batch), rows


@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=4, compiler_options=QUICK_TO_COMPILE)
def paged_logits(params, config, family, batch, kv_cache):
    """Logits of every token of a step, and the cache after it."""
    hidden, kv_cache = family.forward(params, config, batch, kv_cache)
    return gathered(family.head(params, config, hidden, PLAIN)), kv_cache


def chunked_logits(params, config, family, sequence, chunkings, *, mesh):
    """Return the logits [T, V] of one sequence for each of its chunkings, which run together: one row each in every
    step.

    A chunking lists how many tokens each step computes; they need not end together. Blocks are in mixed-up order.
    """
    assert all(sum(chunks) == len(sequence) for chunks in chunkings)
    blocks_each = -(-len(sequence) // BLOCK_SIZE)
    num_blocks = blocks_each * len(chunkings) + 1
    blocks = np.random.default_rng(0).permutation(num_blocks)[: num_blocks - 1].reshape(len(chunkings), blocks_each)
    num_steps = max(map(len, chunkings))
    num_tokens = max(sum(chunks[step] for chunks in chunkings if step < len(chunks)) for step in range(num_steps)) + 2
    results = np.full((len(chunkings), len(sequence), config.vocab_size), np.nan, np.float32)
    with jax.set_mesh(mesh):
        kv_cache = empty_cache(family.kv_specs(config), num_blocks, mesh)
        for step in range(num_steps):
            # The sequence's blocks are kept with its row, so that results can be told apart after the sorting.
            rows = [
                (sequence, tuple(blocks[index]), sum(chunks[:step]), sum(chunks[: step + 1]))
                for index, chunks in enumerate(chunkings)
                if step < len(chunks)
            ]
            batch, rows = make_batch(rows, num_tokens=num_tokens, num_rows=len(chunkings) + 1, num_blocks=num_blocks)
            logits, kv_cache = paged_logits(params, config, family, batch, kv_cache)
            for row, first in zip(rows, np.asarray(batch.query_starts), strict=False):
                _, mine, start, stop = row
                index = next(index for index in range(len(chunkings)) if tuple(blocks[index]) == mine)
                results[index, start:stop] = np.asarray(logits)[first : first + stop - start]
    return results
