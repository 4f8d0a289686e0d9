"""PrefixCache: the index from token prefixes to the blocks that hold their KV. Read at admission, filled as requests
run.

A block's key is a chained hash, h_i = sha256(h_(i-1), token ids of block i), so that equal keys mean equal prefixes.
The chain starts from a domain tag (the model, the caller's salt), so that prefixes of different domains never match.
One key maps to the blocks of all KV groups, as far as these are still cached. To continue a prefix, a KV group with a
window needs only the last few blocks before its end, a group without one needs all.
"""

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxserve.request import NO_BLOCK
from jaxserve.scheduling.block_needs import BlockNeeds

_TOKEN_TYPE = "q"  # eight bytes a token id: hash and comparison both use these bytes


class CachedBlock(NamedTuple):
    """One full block of tokens: the block id of each KV group, and the exact content that the key stands for."""

    block_ids: list[int]
    """NO_BLOCK where a KV group has none; at least one group has one."""
    parent: bytes
    tokens: bytes


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return the token ids as bytes, which are hashed and compared."""
    return array(_TOKEN_TYPE, token_ids).tobytes()


def domain_hash(parts: Iterable[bytes]) -> bytes:
    """Return the start of a hash chain. Each part is hashed separately first, so that different lists of parts never
    collide.
    """
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


class PrefixCache:
    """The index from chained block hashes to blocks. It does not own blocks: the BlockPool does.

    Invariants (`check_integrity`): a block has at most one entry, and an entry's hash is that of its parent and tokens.
    An entry may outlive its parent: it is then unreachable until the same parent is computed again.
    """

    def __init__(self, needs: BlockNeeds):
        self._needs = needs
        self._block_size = needs.block_size
        self._has_windows = any(window is not None for window in needs.windows)
        self._has_full = None in needs.windows
        self._entries: dict[bytes, CachedBlock] = {}
        self._hash_of: dict[int, bytes] = {}  # block id -> its key in _entries

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_of

    def has(self, block_hash: bytes) -> bool:
        """Return true if a block with this hash is cached, for any KV group."""
        return block_hash in self._entries

    def extend_hashes(self, hashes: list[bytes], token_ids: list[int], num_blocks: int, *, domain: bytes) -> None:
        """Append to `hashes` until it has those of the first `num_blocks` full blocks of `token_ids`."""
        size = self._block_size
        parent = hashes[-1] if hashes else domain
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = hashlib.sha256(parent + pack_tokens(token_ids[start : start + size])).digest()
            hashes.append(parent)

    def match(self, hashes: list[bytes], token_ids: list[int], num_blocks: int, *, domain: bytes) -> list[list[int]]:
        """Return a block table per KV group of the longest prefix that can be continued, at most `num_blocks` long.

        Entries before a group's window are NO_BLOCK. Every match is verified against its parent and token ids.
        """
        size = self._block_size
        absent = [NO_BLOCK] * len(self._needs.windows)
        found: list[list[int]] = []
        parent = domain
        for index in range(num_blocks):
            entry = self._entries.get(hashes[index])
            tokens = pack_tokens(token_ids[index * size : (index + 1) * size])
            if entry is not None and entry.parent == parent and entry.tokens == tokens:
                found.append(entry.block_ids)
            elif self._has_full:
                break
            else:
                found.append(absent)
            parent = hashes[index]
        if not self._has_windows:
            return [[block_ids[group] for block_ids in found] for group in range(len(absent))]

        end = self._last_complete(found)
        tables = []
        for group in range(len(absent)):
            first = self._needs.first_block(group, end * size)
            tables.append([NO_BLOCK] * first + [block_ids[group] for block_ids in found[first:end]])
        return tables

    def _last_complete(self, found: list[list[int]]) -> int:
        """Return the last length, in blocks, at which each KV group has everything that the following tokens attend
        to.
        """
        last = 0
        num_before = [0] * len(self._needs.windows)  # consecutive cached blocks before the end
        for end, block_ids in enumerate(found, start=1):
            num_before = [
                0 if block_id == NO_BLOCK else count + 1 for count, block_id in zip(num_before, block_ids, strict=True)
            ]
            if all(
                end - count <= self._needs.first_block(group, end * self._block_size)
                for group, count in enumerate(num_before)
            ):
                last = end
        return last

    def insert(
        self, block_ids: list[int], block_hash: bytes, *, parent: bytes, is_first: bool, token_ids: list[int]
    ) -> None:
        """Insert a full block of tokens: `block_ids` has the block of each KV group, or NO_BLOCK; the list becomes the
        cache's own.

        A group that already has a block for this prefix keeps it. Nothing is inserted unless the preceding block is
        cached: the entry would be unreachable, and after a `purge` the descendants of what was purged must not come
        back.
        """
        entry = self._entries.get(block_hash)
        if entry is not None:
            for group, block_id in enumerate(block_ids):
                if block_id != NO_BLOCK and entry.block_ids[group] == NO_BLOCK:
                    entry.block_ids[group] = block_id
                    self._hash_of[block_id] = block_hash
        elif (is_first or parent in self._entries) and max(block_ids) != NO_BLOCK:
            self._entries[block_hash] = CachedBlock(block_ids, parent, pack_tokens(token_ids))
            for block_id in block_ids:
                if block_id != NO_BLOCK:
                    self._hash_of[block_id] = block_hash

    def remove(self, block_id: int) -> None:
        """Remove this block, if it is cached."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            block_ids = self._entries[block_hash].block_ids
            block_ids[block_ids.index(block_id)] = NO_BLOCK
            if all(other == NO_BLOCK for other in block_ids):
                del self._entries[block_hash]

    def purge(self, hashes: Iterable[bytes]) -> list[int]:
        """Remove these prefixes and all that continue them; return their block ids. Linear in the cache: only used
        after NaNs.
        """
        children = defaultdict(list)
        for block_hash, entry in self._entries.items():
            children[entry.parent].append(block_hash)
        stack = list(hashes)
        removed = []
        while stack:
            block_hash = stack.pop()
            stack += children.pop(block_hash, ())
            entry = self._entries.get(block_hash)
            if entry is not None:
                held = [block_id for block_id in entry.block_ids if block_id != NO_BLOCK]
                for block_id in held:
                    self.remove(block_id)
                removed += held
        return removed

    def block_ids(self) -> list[int]:
        """Return every cached block."""
        return list(self._hash_of)

    def check_integrity(self) -> None:
        """Assert the invariants of the class docstring."""
        blocks = [
            (block_id, block_hash)
            for block_hash, entry in self._entries.items()
            for block_id in entry.block_ids
            if block_id != NO_BLOCK
        ]
        assert dict(blocks) == self._hash_of
        assert len(blocks) == len(self._hash_of), "a block under two hashes"
        for block_hash, (block_ids, parent, tokens) in self._entries.items():
            assert any(block_id != NO_BLOCK for block_id in block_ids), "an entry without a block"
            assert hashlib.sha256(parent + tokens).digest() == block_hash, "an entry under a wrong hash"
            assert len(tokens) == self._block_size * array(_TOKEN_TYPE).itemsize, "a block that is not full"
