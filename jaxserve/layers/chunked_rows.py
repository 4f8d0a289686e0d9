"""Attention within chunks of a text (Llama 4): a token attends to the tokens of its chunk up to itself.

To attend so is to attend to everything in rows that begin where chunks do. So the rows of a step are cut there, and the
kernels for attention need not know.
"""

import dataclasses

import jax.numpy as jnp

from jaxserve.layers.batch import Batch


def cut_rows(batch: Batch, *, chunk_size: int, block_size: int) -> Batch:
    """Return the batch with a row for each chunk that a row has tokens of, and the block tables of these.

    What is attended with alone is changed: writes stay where they are. Raises ValueError unless chunks are whole
    blocks.
    """
    if chunk_size % block_size:
        raise ValueError(f"chunks of {chunk_size} tokens are not whole blocks of {block_size}")
    num_tokens, num_rows = len(batch.positions), len(batch.seq_lens)
    if batch.num_columns:  # each token is a row of its own
        steps = jnp.arange(num_tokens, dtype=jnp.int32)
        row, column = steps // batch.num_columns, steps % batch.num_columns
        is_used = row < batch.num_rows
        stop = jnp.where(is_used, batch.seq_lens[row] - batch.num_columns + 1 + column, 0)
        first, count = jnp.maximum(stop - 1, 0), batch.num_rows * batch.num_columns
        starts, num_decode_rows = jnp.minimum(jnp.arange(num_tokens + 1, dtype=jnp.int32), count), count
    elif batch.is_decode_only:
        row, stop, first = jnp.arange(num_rows), batch.seq_lens, jnp.maximum(batch.seq_lens - 1, 0)
        starts, num_decode_rows, count = batch.query_starts, batch.num_decode_rows, batch.num_rows
    else:
        lengths = jnp.diff(batch.query_starts)
        begins = batch.seq_lens - lengths  # positions of the rows' first tokens
        pieces = jnp.where(lengths > 0, (batch.seq_lens - 1) // chunk_size - begins // chunk_size + 1, 0)
        ends = jnp.cumsum(pieces)
        index = jnp.arange(min(num_tokens, 2 * num_rows + num_tokens // chunk_size), dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right"), num_rows - 1)
        chunk = begins[row] // chunk_size + index - (ends - pieces)[row]
        first = jnp.maximum(begins[row], chunk * chunk_size)
        count, num_decode_rows = ends[-1], batch.num_decode_rows
        stop = jnp.where(index < count, jnp.minimum(batch.seq_lens[row], (chunk + 1) * chunk_size), 0)
        first = jnp.where(index < count, first, 0)
        total = batch.query_starts[batch.num_rows]
        starts = jnp.where(index < count, batch.query_starts[row] + first - begins[row], total)
        starts = jnp.append(starts, total)
    start = first // chunk_size * chunk_size
    width = min(chunk_size // block_size, batch.block_tables.shape[1])
    blocks = start[:, None] // block_size + jnp.arange(width, dtype=jnp.int32)[None]
    tables = batch.block_tables.at[row[:, None], blocks].get(mode="fill", fill_value=0)
    return dataclasses.replace(
        batch,
        query_starts=starts.astype(jnp.int32),
        seq_lens=(stop - jnp.minimum(start, stop)).astype(jnp.int32),
        block_tables=tables,
        num_decode_rows=num_decode_rows,
        num_rows=count,
        is_decode_only=batch.is_decode_only or bool(batch.num_columns),
        num_columns=0,
    )
