"""From memory to blocks: what is free, what weights and steps take, and what is left."""

import pytest

from jaxserve.engine.sizing import GPU_MEMORY_RESERVE, KV_CACHE_UNIT, Sizing
from jaxserve.errors import OutOfMemory
from jaxserve.scheduling.block_needs import BlockNeeds

GIB = 2**30


def make(**changes):
    options = {
        "kv_cache_memory": None,
        "weight_bytes": 16 * GIB,
        "trial_bytes": 0,
        "num_shards": 1,
        "bytes_per_block": 2**21,
        "max_num_seqs": 256,
        "max_model_len": 8192,
        "needs": BlockNeeds(windows=(None,), block_size=16, max_chunk=8192),
    }
    return Sizing(**options | changes)


@pytest.mark.parametrize(
    ("changes", "free", "step_memory", "expected"),
    [
        ({}, 40 * GIB + GPU_MEMORY_RESERVE, 4 * GIB, 36 * 512),
        ({}, 40 * GIB + GPU_MEMORY_RESERVE + KV_CACHE_UNIT - 1, 4 * GIB, 36 * 512),  # whole units
        ({"trial_bytes": GIB}, 40 * GIB + GPU_MEMORY_RESERVE, 4 * GIB, 35 * 512),
        ({"num_shards": 2}, 40 * GIB + GPU_MEMORY_RESERVE, 4 * GIB, 72 * 512),
        ({"kv_cache_memory": 5 * GIB}, 0, 4 * GIB, 5 * 512),  # whatever is free
        ({"bytes_per_block": 0}, 0, 4 * GIB, 256 * 512),  # all layers keep states: as many as slots hold
    ],
)
def test_blocks_are_what_steps_leave(changes, free, step_memory, expected):
    assert make(**changes).num_blocks(free, step_memory) == expected


def test_weights_that_are_not_loaded_yet_are_no_room():
    sizing = make()
    free = 60 * GIB + GPU_MEMORY_RESERVE
    assert sizing.expected_blocks(free, 4 * GIB) == 40 * 512 - KV_CACHE_UNIT // 2**21
    assert sizing.num_blocks(free - 16 * GIB, 4 * GIB) == 40 * 512


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda sizing: sizing.check_weights(15 * GIB, what="m"),
            "^m needs 16.0 GiB .* weights, but 15.0 GiB are free",
        ),
        (
            lambda sizing: sizing.check_steps(17 * GIB, 2 * GIB, max_num_seqs=3, max_num_batched_tokens=4),
            "max_num_seqs=3 and max_num_batched_tokens=4 need 2.0 GiB .* 1.0 GiB are free beside the weights",
        ),
        (lambda sizing: sizing.num_blocks(5 * GIB, 5 * GIB), "0 MiB for the KV cache hold 0 tokens"),
    ],
)
def test_too_little_memory_says_for_what(check, message):
    with pytest.raises(OutOfMemory, match=message):
        check(make())


def test_who_is_measured():
    assert make().is_measured
    assert not make(kv_cache_memory=1).is_measured


@pytest.mark.parametrize(
    ("changes", "free", "expected"),
    [
        ({"kv_cache_memory": 100 * 2**21}, 0, 1600),  # whole blocks, and nothing else is measured
        ({"kv_cache_memory": 5 * GIB}, 0, 8192),  # not more than the model has
        ({"bytes_per_block": 0}, 0, 8192),
        ({}, 16 * GIB + GPU_MEMORY_RESERVE + KV_CACHE_UNIT + GIB, 512 * 15 // 16 * 16),  # a sixteenth is left
        ({}, 16 * GIB, 0),
        (
            {"kv_cache_memory": 300 * 2**21, "needs": BlockNeeds(windows=(None, 64), block_size=16, max_chunk=64)},
            0,
            4656,  # 291 blocks, and 9 of the window and a chunk
        ),
    ],
)
def test_the_longest_context_is_what_memory_holds(changes, free, expected):
    sizing = make(**changes)
    longest = sizing.longest_context(free, 0)
    if expected not in (0, sizing.max_model_len):
        assert sizing.needs.peak(longest) < sizing.needs.peak(longest + 1)
    assert longest == expected
