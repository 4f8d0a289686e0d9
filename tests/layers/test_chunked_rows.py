"""Rows of a step are cut where chunks of their texts begin: what then attends is a row for each chunk."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.batch import Batch
from jaxserve.layers.chunked_rows import cut_rows

BLOCK_SIZE, CHUNK_SIZE, MAX_BLOCKS = 2, 4, 6


def make_batch(starts, seq_lens, *, num_tokens, **options):
    """Rows with these first tokens, of which the last is padding; row b has the blocks 10 b, 10 b + 1, ..."""
    rows = len(seq_lens)
    return Batch(
        token_ids=jnp.zeros(num_tokens, jnp.int32),
        positions=jnp.zeros(num_tokens, jnp.int32),
        write_index=jnp.zeros(num_tokens, jnp.int32),
        query_starts=jnp.asarray(starts, jnp.int32),
        seq_lens=jnp.asarray(seq_lens, jnp.int32),
        block_tables=10 * jnp.arange(rows, dtype=jnp.int32)[:, None] + jnp.arange(MAX_BLOCKS, dtype=jnp.int32)[None],
        slots=jnp.zeros(rows, jnp.int32),
        num_rows=jnp.int32(rows - 1),
        **options,
    )


def pieces(batch):
    """Return the (first token, context, blocks) of each row with tokens, and check that others are empty."""
    count = int(batch.num_rows)
    assert not batch.seq_lens[count:].any()
    assert (batch.query_starts[count:] == batch.query_starts[count]).all()
    return [
        (int(start), int(length), np.asarray(blocks)[: -(-int(length) // BLOCK_SIZE)].tolist())
        for start, length, blocks in zip(batch.query_starts, batch.seq_lens, batch.block_tables, strict=False)
    ][:count]


def cut(batch):
    return cut_rows(batch, chunk_size=CHUNK_SIZE, block_size=BLOCK_SIZE)


def test_rows_that_decode_see_the_chunk_of_their_last_token():
    batch = make_batch([0, 1, 2, 3, 3], [1, 4, 11, 0], num_tokens=4, is_decode_only=True, num_decode_rows=jnp.int32(3))
    assert pieces(cut(batch)) == [(0, 1, [0]), (1, 4, [10, 11]), (2, 3, [24, 25])]


def test_rows_with_several_tokens_are_cut_where_chunks_begin():
    """One decodes at position 8; one has the positions 2 to 9, of three chunks; and one begins its text."""
    batch = make_batch([0, 1, 9, 12, 12], [9, 10, 3, 0], num_tokens=13, num_decode_rows=jnp.int32(1))
    after = cut(batch)
    expected = [(0, 1, [4]), (1, 4, [10, 11]), (3, 4, [12, 13]), (7, 2, [14]), (9, 3, [20, 21])]
    assert pieces(after) == expected
    assert int(after.query_starts[-1]) == 12
    assert int(after.num_decode_rows) == 1


def test_columns_of_drafts_are_rows_of_their_own():
    batch = make_batch([0, 3, 6, 6], [10, 5, 0], num_tokens=9, num_columns=3, num_decode_rows=jnp.int32(0))
    after = cut(batch)
    of_first, of_second = [(0, 4, [2, 3]), (1, 1, [4]), (2, 2, [4])], [(3, 3, [10, 11]), (4, 4, [10, 11]), (5, 1, [12])]
    assert pieces(after) == of_first + of_second
    assert (after.num_columns, after.is_decode_only, int(after.num_decode_rows)) == (0, True, 6)


def test_chunks_are_whole_blocks():
    batch = make_batch([0, 1, 1], [1, 0], num_tokens=1, is_decode_only=True, num_decode_rows=jnp.int32(1))
    with pytest.raises(ValueError, match="chunks of 5 tokens are not whole blocks of 2"):
        cut_rows(batch, chunk_size=5, block_size=BLOCK_SIZE)
