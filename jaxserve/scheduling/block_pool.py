"""BlockPool: the ref-counted allocator of KV blocks. Every block of a running request comes from here and returns here.

All groups of layers take their blocks from the same pool, so that memory goes to those who need it.

A block is in exactly one of three places: held (ref-count > 0), free, or evictable, that is cached but held by nobody.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from jaxserve.scheduling.prefix_cache import PrefixCache
from jaxserve.scheduling.snapshot import BlocksSnapshot


class BlockPool:
    """`num_blocks` blocks, all operations O(1) a block.

    Free blocks are handed out first, then evictable ones, least recently released first. A request gives its blocks
    back from its tail, so that of one sequence the tail is evicted before the head: a prefix is never cached in vain.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache, *, num_groups: int = 1):
        self.num_blocks = num_blocks
        self.num_held = [0] * num_groups
        """Blocks of each group that somebody holds."""
        self._cache = cache
        self._ref_counts = [0] * num_blocks
        self._group_of = [0] * num_blocks  # the group of layers that a block was last handed out for
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is handed out first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Blocks that are cached, and held by nobody."""
        return len(self._evictable)

    def is_held(self, block_id: int) -> bool:
        """Whether a request holds this block."""
        return self._ref_counts[block_id] > 0

    def held_only_by(self, holders: Sequence[Sequence[int]]) -> set[int]:
        """The blocks that would be given back if the holders of these block tables let go."""
        counts = Counter(block_id for table in holders for block_id in table)
        return {block_id for block_id, count in counts.items() if count == self._ref_counts[block_id]}

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """`count` blocks for one holder and group, their content undefined. The caller has made sure that they are
        there.
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
        """One more holder for these cached blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
                self.num_held[self._group_of[block_id]] += 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder, who has these in its block table in this order, lets go."""
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
        """Drop every cached block that nobody holds."""
        for block_id in self._evictable:
            self._cache.remove(block_id)
        self._free += self._evictable
        self._evictable.clear()

    def snapshot(self) -> BlocksSnapshot:
        """The state of every block, copied."""
        return BlocksSnapshot(self._ref_counts.copy(), list(self._evictable))

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert that ref-counts equal the holders in `tables`, and that each block is in exactly one place."""
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
