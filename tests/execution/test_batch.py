"""The packed upload: the device reads what the host has written."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.execution.batch import make_buckets, pack, unpack
from jaxserve.execution.slots import admit, init_slots, pack_admissions
from jaxserve.execution.step import Reading, read_plan
from jaxserve.request import EngineRequest, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan import Row, StepPlan

BLOCK_SIZE, MAX_BLOCKS, NUM_SLOTS, NUM_BLOCKS = 4, 8, 6, 50


def make_request(slot, token_ids, num_prompt, block_ids, **params):
    engine_request = EngineRequest(
        request_id=f"r{slot}",
        group_id=f"r{slot}",
        prompt_token_ids=token_ids[:num_prompt],
        params=SamplingParams(**params),
        max_tokens=20,
    )
    request = Request(engine_request, arrival=slot)
    request.token_ids, request.block_tables, request.slot = list(token_ids), [block_ids], slot
    return request


def test_buckets_cover_every_step():
    buckets = make_buckets(max_num_batched_tokens=100, max_num_seqs=24, block_size=16)
    assert [bucket.num_tokens for bucket in buckets] == [1, 4, 16, 24, 32, 64, 100]
    assert [bucket.num_rows for bucket in buckets] == [1, 4, 16, 24, 24, 24, 24]
    for bucket in buckets:
        # The most blocks a step can add: every row begins a new block with its first token, one row has all the others.
        longest = bucket.num_tokens - bucket.num_rows + 1
        assert bucket.num_new_blocks >= bucket.num_rows - 1 + -(-longest // 16)
    # Drafts that a step leaves out have their blocks all the same.
    for bucket in make_buckets(max_num_batched_tokens=100, max_num_seqs=24, block_size=16, max_drafts=20):
        assert bucket.num_new_blocks >= bucket.num_rows * 2


def rounded(max_num_seqs):
    return max_num_seqs if max_num_seqs <= 16 else -(-max_num_seqs // 16) * 16


def sizes_of(budget, max_num_seqs, *, has_finer_sizes):
    buckets = make_buckets(
        max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, block_size=16, has_finer_sizes=has_finer_sizes
    )
    max_num_rows = rounded(max_num_seqs) if has_finer_sizes else max_num_seqs
    assert [bucket.num_rows for bucket in buckets] == [min(bucket.num_tokens, max_num_rows) for bucket in buckets]
    return [bucket.num_tokens for bucket in buckets]


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "expected"),
    [
        (512, 64, []),
        (512, 512, [192, 384]),
        (2048, 256, [192, 768, 1536]),
        (8192, 512, [192, 384, 768, 1536, 3072, 5120, 6144, 7168]),
        (16384, 64, [768, 1536, 3072, 5120, 6144, 7168, 10240, 12288, 14336]),
        (5000, 300, [192, 768, 1536, 3072]),  # and 304
        (7000, 250, [192, 768, 1536, 3072, 5120, 6144]),
        (8192, 900, [192, 384, 768, 1536, 3072, 5120, 6144, 7168]),  # and 912
    ],
)
def test_sizes_between_powers_of_two(budget, max_num_seqs, expected):
    doubling = sizes_of(budget, rounded(max_num_seqs), has_finer_sizes=False)
    assert sizes_of(budget, max_num_seqs, has_finer_sizes=True) == sorted(doubling + expected)


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "left_out", "kept"),
    [
        (8192, 200, 192, 128),
        (8192, 170, 192, 128),
        (7500, 64, 7168, 6144),
        (8200, 64, 8192, 7168),
        (8192, 1000, 1024, 768),
        (8192, 1100, 1024, 768),
    ],
)
def test_no_size_near_the_largest_of_tokens_or_rows(budget, max_num_seqs, left_out, kept):
    sizes = sizes_of(budget, max_num_seqs, has_finer_sizes=True)
    assert left_out not in sizes
    assert {kept, rounded(max_num_seqs), budget} <= set(sizes)


@given(budget=st.integers(1, 40_000), max_num_seqs=st.integers(1, 2000))
def test_finer_sizes_waste_less_and_are_not_too_many(budget, max_num_seqs):
    sizes = sizes_of(budget, max_num_seqs, has_finer_sizes=True)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == budget
    limits = {budget, min(budget, rounded(max_num_seqs))}
    for smaller, larger in itertools.pairwise(sizes):
        if smaller > 256 and not {smaller, larger} <= limits:
            assert larger >= 1.1 * smaller
        if {smaller, larger} <= limits:  # sizes near either limit are left out
            assert larger <= 1.1**2 * 1.5 * smaller or smaller < 512
        elif smaller >= 512:
            assert larger <= 1.1 * (1.25 if smaller >= 4096 else 1.5) * smaller


def test_a_mixed_step():
    """Rows continue where their slots are, which then are at the rows' ends."""
    decoding = make_request(4, [7, 8, 9, 10, 11], 3, [20, 21])  # its next token is still on the device
    decoding.num_pending = 1
    known = make_request(1, [1, 2, 3], 2, [30])  # resumed: the last token is known
    chunk = make_request(2, list(range(40, 52)), 12, [5, 6, 7], prompt_logprobs=0)
    rows = [Row(decoding, 4, 5, 1, True, 0), Row(known, 1, 2, 1, True, 1), Row(chunk, 2, 3, 6, False, 2)]
    plan = StepPlan(rows, num_decode_rows=2, num_tokens=8, admitted=[rows[1]])
    bucket = make_buckets(max_num_batched_tokens=16, max_num_seqs=NUM_SLOTS, block_size=BLOCK_SIZE)[-1]
    packed = pack(plan, bucket, num_slots=NUM_SLOTS, max_blocks=MAX_BLOCKS, num_groups=1, features=3)
    assert packed.shape == (bucket.packed_size,)

    pieces = unpack(jax.numpy.asarray(packed), bucket)
    assert pieces["header"].tolist() == [3, 2, 3, 1]
    assert pieces["slots"].tolist() == [4, 1, 2] + [NUM_SLOTS] * 3
    assert pieces["samples"].tolist() == [1, 1, 0, 0, 0, 0]
    assert pieces["next_token_ids"].tolist()[:3] == [0, 0, 49]
    index = pieces["new_block_index"].tolist()
    assert index[:2] == [2 * MAX_BLOCKS + 1, 2 * MAX_BLOCKS + 2]  # the admitted row's table is uploaded separately
    assert pieces["new_block_ids"].tolist()[:2] == [6, 7]
    assert len(set(index)) == len(index)
    assert min(index[2:]) >= NUM_SLOTS * MAX_BLOCKS

    tables = np.zeros((NUM_SLOTS, MAX_BLOCKS), np.int32)
    for request in (decoding, known, chunk):
        (table,) = request.block_tables
        tables[request.slot, : len(table)] = table
    sizes = {"num_slots": NUM_SLOTS, "max_blocks": MAX_BLOCKS, "num_groups": 1}
    slots = admit(init_slots(**sizes, vocab_size=8, hidden_size=1), jax.numpy.asarray(pack_admissions(rows, **sizes)))
    slots = dataclasses.replace(slots, last_tokens=jax.numpy.arange(100, 100 + NUM_SLOTS, dtype=np.int32))
    assert slots.block_tables[0].tolist() == tables.tolist()
    reading = Reading(bucket, (), kernels="xla", is_decode_only=False)
    packed = jax.numpy.asarray(packed)
    slots, batch, drawing = read_plan(slots, packed, reading, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    assert slots.num_computed.tolist() == [0, 3, 9, 0, 6, 0]
    assert drawing.num_output_tokens.tolist()[:3] == [3, 1, -3]
    assert batch.token_ids.tolist()[:8] == [104, 3, 43, 44, 45, 46, 47, 48]
    assert batch.positions.tolist() == [5, 2, 3, 4, 5, 6, 7, 8] + [0] * 8
    assert batch.query_starts.tolist() == [0, 1, 2, 8, 8, 8, 8]
    assert batch.seq_lens.tolist() == [6, 3, 9, 0, 0, 0]
    expected = [21 * 4 + 1, 30 * 4 + 2, 5 * 4 + 3, 6 * 4, 6 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3, 7 * 4]
    assert batch.write_index.tolist()[:8] == expected
    padding = batch.write_index.tolist()[8:]
    assert len(set(padding)) == 8
    assert min(padding) >= NUM_BLOCKS * BLOCK_SIZE
    assert batch.block_tables[:3].tolist() == [tables[4].tolist(), tables[1].tolist(), tables[2].tolist()]
    assert (int(batch.num_rows), int(batch.num_decode_rows)) == (3, 2)
