"""BlockPool and PrefixCache by themselves: ref-counts, eviction order, hash chains."""

import pytest

from jaxserve.scheduling.block_needs import BlockNeeds
from jaxserve.scheduling.block_pool import BlockPool
from jaxserve.scheduling.prefix_cache import CachedBlock, PrefixCache, domain_hash

DOMAIN = domain_hash((b"model",))


@pytest.fixture
def cache():
    return PrefixCache(BlockNeeds(windows=(None,), block_size=2, max_chunk=8))


@pytest.fixture
def pool(cache):
    return BlockPool(6, cache)


def fill(cache: PrefixCache, token_ids: list[int], block_ids: list[int], domain: bytes = DOMAIN) -> list[bytes]:
    hashes: list[bytes] = []
    cache.extend_hashes(hashes, token_ids, len(block_ids), domain=domain)
    for index, block_id in enumerate(block_ids):
        parent = hashes[index - 1] if index else domain
        tokens = token_ids[2 * index : 2 * index + 2]
        cache.insert([block_id], hashes[index], parent=parent, is_first=index == 0, token_ids=tokens)
    return hashes


def match(cache: PrefixCache, token_ids: list[int], domain: bytes = DOMAIN) -> list[int]:
    hashes: list[bytes] = []
    num_blocks = len(token_ids) // 2
    cache.extend_hashes(hashes, token_ids, num_blocks, domain=domain)
    (table,) = cache.match(hashes, token_ids, num_blocks, domain=domain)
    return table


def test_blocks_go_round(pool):
    first, second = pool.allocate(2), pool.allocate(4)
    assert sorted(first + second) == list(range(6))
    assert pool.num_free == 0
    pool.check_integrity([first, second])
    pool.release(first)
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == sorted(first)


def test_exhausted_pool_is_a_bug_of_the_caller(pool):
    pool.allocate(5)
    with pytest.raises(AssertionError, match="exhausted"):
        pool.allocate(2)


def test_cached_blocks_survive_their_holder_until_they_are_needed(pool, cache):
    blocks = pool.allocate(3)
    fill(cache, [1, 2, 3, 4, 5, 6], blocks)
    pool.release(blocks)
    assert pool.num_free == 6
    assert match(cache, [1, 2, 3, 4, 9, 9]) == blocks[:2]
    pool.allocate(3)  # free blocks are used first
    assert match(cache, [1, 2, 3, 4, 5, 6]) == blocks
    pool.check_integrity([[3, 4, 5]])


def test_tail_is_evicted_before_head_and_old_before_new(pool, cache):
    old, new = pool.allocate(3), pool.allocate(3)
    fill(cache, [1, 2, 3, 4, 5, 6], old)
    fill(cache, [7, 8, 9, 10, 11, 12], new)
    pool.release(old)
    pool.release(new)
    evicted = [pool.allocate(1)[0] for _ in range(6)]
    assert evicted == old[::-1] + new[::-1]
    assert len(cache) == 0


def test_shared_blocks_stay_until_the_last_holder_goes(pool, cache):
    blocks = pool.allocate(2)
    fill(cache, [1, 2, 3, 4], blocks)
    pool.share(blocks[:1])
    pool.check_integrity([blocks, blocks[:1]])
    assert pool.held_only_by([blocks]) == {blocks[1]}
    assert pool.held_only_by([blocks, blocks[:1]]) == set(blocks)
    pool.release(blocks)
    assert pool.num_free == 5
    assert pool.is_held(blocks[0])
    pool.release(blocks[:1])
    assert pool.num_free == 6
    pool.share(blocks)  # both are cached, though no request held them
    assert pool.num_free == 4
    pool.check_integrity([blocks])


@pytest.mark.parametrize("tables", [[], [[0]], [[0, 1], [1]], [[0, 1, 1]], [[0, 1, 2]]])
def test_integrity_check_sees_wrong_holders(pool, tables):
    pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_purge_frees_what_nobody_holds(pool, cache):
    blocks = pool.allocate(3)
    hashes = fill(cache, [1, 2, 3, 4, 5, 6], blocks)
    pool.share(blocks[:1])
    pool.release(blocks)
    pool.purge(hashes[:1])  # the descendants go too
    assert len(cache) == 0
    pool.check_integrity([blocks[:1]])
    pool.release(blocks[:1])
    pool.check_integrity([])


def test_forget_evictable_keeps_what_is_held(pool, cache):
    blocks = pool.allocate(3)
    fill(cache, [1, 2, 3, 4, 5, 6], blocks)
    pool.share(blocks[:1])
    pool.release(blocks)
    pool.forget_evictable()
    assert match(cache, [1, 2, 3, 4]) == blocks[:1]
    pool.check_integrity([blocks[:1]])


def test_domains_never_meet(cache):
    fill(cache, [1, 2, 3, 4], [0, 1])
    assert match(cache, [1, 2, 3, 4]) == [0, 1]
    assert match(cache, [1, 2, 3, 4], domain_hash((b"model", b"salt"))) == []
    assert domain_hash((b"ab", b"c")) != domain_hash((b"a", b"bc"))
    assert domain_hash((b"ab",)) != domain_hash((b"ab", b""))


def test_same_block_after_another_prefix_is_another_block(cache):
    fill(cache, [1, 2, 3, 4], [0, 1])
    assert match(cache, [5, 6, 3, 4]) == []


def test_first_copy_of_a_prefix_stays(cache):
    fill(cache, [1, 2, 3, 4], [0, 1])
    fill(cache, [1, 2, 3, 4, 5, 6], [2, 3, 4])
    assert match(cache, [1, 2, 3, 4, 5, 6]) == [0, 1, 4]
    cache.check_integrity()


@pytest.mark.parametrize("change", [{"tokens": b"x" * 16}, {"parent": b"x" * 32}])
def test_hit_is_verified(cache, change):
    hashes = fill(cache, [1, 2, 3, 4], [0, 1])
    cache._entries[hashes[1]] = CachedBlock(**(cache._entries[hashes[1]]._asdict() | change))  # as if sha256 collided
    assert match(cache, [1, 2, 3, 4]) == [0]
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_purged_prefix_takes_no_new_descendants(cache):
    tokens = [1, 2, 3, 4, 5, 6]
    hashes = fill(cache, tokens, [0, 1])
    assert sorted(cache.purge(hashes[:1])) == [0, 1]
    hashes.append(b"unused")
    cache.insert([2], hashes[2], parent=hashes[1], is_first=False, token_ids=tokens[4:])
    assert len(cache) == 0
