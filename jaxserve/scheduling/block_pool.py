"""BlockPool: the ref-counted allocator of KV blocks. Every block of a running request is allocated and released here.

All KV groups allocate from the same pool, so that memory goes to the groups that need it.

A block is in exactly one of three states: held (ref-count > 0), free, or evictable, that is cached but held by no
request.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.snapshot import BlocksSnapshot


class BlockPool:
    """A pool of `num_blocks` blocks. Every operation is O(1) per block.

    Free blocks are allocated first, then evictable ones, least recently released first. A request releases its blocks
    from its tail, so that the tail of a sequence is evicted before its head: a prefix stays reachable as long as it is
    cached.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache, *, num_groups: int = 1):
        self.num_blocks = num_blocks
        self.num_held = [0] * num_groups
        """Number of held blocks of each KV group."""
        self._cache = cache
        self._ref_counts = [0] * num_blocks
        self._group_of = [0] * num_blocks  # KV group that a block was last allocated for
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is allocated first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return now, including evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Number of blocks that are cached but held by no request."""
        return len(self._evictable)

    def is_held(self, block_id: int) -> bool:
        """Return true if a request holds this block."""
        return self._ref_counts[block_id] > 0

    def held_only_by(self, holders: Sequence[Sequence[int]]) -> set[int]:
        """Return the blocks that would become unreferenced if the holders of these block tables released them."""
        counts = Counter(block_id for table in holders for block_id in table)
        return {block_id for block_id, count in counts.items() if count == self._ref_counts[block_id]}

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Allocate `count` blocks for one holder and KV group; their content is undefined.

        The caller has checked `num_free`.
        """
        assert count <= self.num_free, "the pool is exhausted"
        block_ids = []
        for _ in range(count):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._evictable.popitem(last=False)
                self._cache.remove(block_id)
            self._ref_counts[block_id] = 1
            self._group_of[block_id] = group
            block_ids.append(block_id)
        self.num_held[group] += count
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each of these cached blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
                self.num_held[self._group_of[block_id]] += 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one holder, whose block table has these blocks in this order."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self.num_held[self._group_of[block_id]] -= 1
                if block_id in self._cache:
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def purge(self, hashes: Iterable[bytes]) -> None:
        """Drop prefixes, and whatever continues them, from the cache. Their holders keep the blocks."""
        for block_id in self._cache.purge(hashes):
            if self._evictable.pop(block_id, self) is None:
                self._free.append(block_id)

    def forget_evictable(self) -> None:
        """Drop every cached block that no request holds."""
        for block_id in self._evictable:
            self._cache.remove(block_id)
        self._free += self._evictable
        self._evictable.clear()

    def snapshot(self) -> BlocksSnapshot:
        """Copy the state of every block."""
        return BlocksSnapshot(self._ref_counts.copy(), list(self._evictable))

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that ref-counts equal the holders in `tables`, and that each block is in exactly one state."""
        counts = Counter(block_id for table in tables for block_id in table)
        held = {block_id for block_id, count in enumerate(self._ref_counts) if count}
        assert counts == {block_id: self._ref_counts[block_id] for block_id in held}, "ref-counts differ from holders"
        by_group = Counter(self._group_of[block_id] for block_id in held)
        assert self.num_held == [by_group[group] for group in range(len(self.num_held))]
        everywhere = [*self._free, *self._evictable, *held]
        assert sorted(everywhere) == list(range(self.num_blocks)), "a block is lost or in two places"
        cached = set(self._cache.block_ids())
        assert cached.isdisjoint(self._free), "a free block is cached"
        assert cached.issuperset(self._evictable), "an evictable block is not cached"
        for table in tables:
            assert len(set(table)) == len(table), "a block twice in one table"
