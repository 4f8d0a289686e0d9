"""Requests among several engines: to whom they go, and what that costs in prefix hits, on a recorded workload."""

import collections
import heapq
import json

import numpy as np
import pytest

from jaxserve.engine.client import EngineInfo, EngineStats
from jaxserve.engine.replicas import of_all, total_stats
from jaxserve.engine.router import CHUNK_TOKENS, PrefixRouter, prompt_bytes, prompt_chunks


def tokens(rng, number):
    return rng.integers(1000, size=number).tolist()


def test_chunks_tell_prompts_apart_by_all_that_comes_before():
    rng = np.random.default_rng(0)
    first, second = tokens(rng, 2 * CHUNK_TOKENS + 1), tokens(rng, CHUNK_TOKENS)
    chunks = prompt_chunks(first)
    assert len(chunks) == 2 == len(set(chunks))
    assert prompt_chunks(first[:CHUNK_TOKENS] + second) == [chunks[0], prompt_chunks(first[:CHUNK_TOKENS] + second)[1]]
    assert prompt_chunks(second + first[CHUNK_TOKENS:])[1] != chunks[1]
    assert not set(prompt_chunks(first, "salt")) & set(chunks)
    assert prompt_chunks([]) == prompt_chunks(first[: CHUNK_TOKENS - 1]) == []


def test_equal_beginnings_of_prompts_are_equal_bytes():
    one, two = (prompt_bytes(b'{"temperature": %d, "prompt": "Once upon %d"}' % (n, n)) for n in (1, 2))
    assert one[:-2] == two[:-2]
    deep = b'{"prompt": %b%b}' % (b"[" * 10_000, b"]" * 10_000)
    assert prompt_bytes(b"[") == prompt_bytes(b"[]") == prompt_bytes(deep) == b""


def test_a_prompt_follows_its_prefix_unless_the_engine_has_too_much_to_do():
    rng = np.random.default_rng(1)
    router = PrefixRouter(num_tokens=100 * CHUNK_TOKENS)
    known = tokens(rng, 10 * CHUNK_TOKENS)
    router.record(1, prompt_chunks(known))
    longer = prompt_chunks(known + tokens(rng, CHUNK_TOKENS))
    assert router.choose(longer, [0, 5, 0]) == 1
    assert router.choose(longer, [0, 9, 2]) == 0
    assert router.choose(longer, [None, 9, 2]) == 1
    assert router.choose(longer, [4, None, 2]) == 2
    assert router.choose([], [4, 3, 5]) == 1
    assert router.choose(prompt_chunks(known[:CHUNK_TOKENS] + tokens(rng, 20 * CHUNK_TOKENS)), [0, 1, 1]) == 0
    router.forget(1)
    assert router.choose(longer, [0, 5, 0]) == 0


def test_a_router_forgets_what_a_cache_has_no_room_for():
    rng = np.random.default_rng(2)
    router = PrefixRouter(num_tokens=10 * CHUNK_TOKENS)
    old, new = prompt_chunks(tokens(rng, 8 * CHUNK_TOKENS)), prompt_chunks(tokens(rng, 4 * CHUNK_TOKENS))
    router.record(0, old)
    router.record(0, new)
    assert [router._num_known(0, chunks) for chunks in (old, new)] == [6, 4]


class Cache:
    """A prefix cache: an LRU list of blocks."""

    def __init__(self, num_blocks):
        self.num_blocks, self.blocks = num_blocks, collections.OrderedDict()

    def hits(self, blocks):
        found = next((index for index, block in enumerate(blocks) if block not in self.blocks), len(blocks))
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.num_blocks:
            self.blocks.popitem(last=False)
        return found


@pytest.mark.parametrize("num_engines", [2, 4, 8])
def test_hits_and_loads_on_a_recorded_workload(test_data, num_engines):
    """12,000 conversations of an hour (Mooncake's trace, blocks of 512 tokens), each engine with a cache of a million
    tokens and 20,000 prompt tokens a second: nearly the hits of one cache of all their sizes, and no engine left out.
    """
    lines = (test_data / "workloads" / "conversation_trace.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    one, caches = Cache(2000 * num_engines), [Cache(2000) for _ in range(num_engines)]
    router = PrefixRouter(num_tokens=2000 * CHUNK_TOKENS)  # a chunk stands for a block
    running: list[list[float]] = [[] for _ in caches]
    free_at, best, hits, numbers = [0.0] * num_engines, 0, 0, [0] * num_engines
    for request in requests:
        now, blocks = request["timestamp"] / 1000, request["hash_ids"]
        for ends in running:
            while ends and ends[0] <= now:
                heapq.heappop(ends)
        chunks = [number.to_bytes(8) for number in blocks]
        engine = router.choose(chunks, [len(ends) for ends in running])
        router.record(engine, chunks)
        found = caches[engine].hits(blocks)
        best, hits = best + one.hits(blocks), hits + found
        free_at[engine] = max(free_at[engine], now) + (len(blocks) - found) * 512 / 20000
        heapq.heappush(running[engine], free_at[engine] + 0.02 * request["output_length"])
        numbers[engine] += 1
    assert hits >= 0.97 * best
    assert max(numbers) <= 1.3 * min(numbers)


def test_several_engines_are_told_as_one():
    info = EngineInfo(
        model="m", vocab_size=9, hidden_size=8, max_model_len=64, block_size=16, num_blocks=10, max_num_seqs=4,
        max_num_batched_tokens=32, eos_token_ids=(), weight_bytes=5, kv_kinds=(),
    )  # fmt: skip
    both = of_all(info, 2)
    assert (both.num_blocks, both.max_num_seqs, both.max_model_len, both.device) == (20, 8, 64, "2 x cpu")
    one = EngineStats(num_running=1, kv_cache_usage=0.5, kv_bytes_held={"full": 3}, step_time_counts=(1, 2))
    other = EngineStats(num_running=2, kv_cache_usage=0.0, kv_bytes_held={"full": 4}, step_time_counts=())
    total = total_stats([one, other])
    assert (total.num_running, total.kv_cache_usage, total.kv_bytes_held) == (3, 0.25, {"full": 7})
    assert total.step_time_counts == (1, 2)
    assert type(total.num_running) is int  # /load has it in JSON
    assert total_stats([]) == EngineStats()
