"""PrefixCache: which block holds the KV of which token prefix. Looked up when a request is admitted, filled as it runs.

A block's key is a chained hash, h_i = sha256(h_(i-1), token ids of block i), so that equal keys mean equal prefixes.
The chain starts from a domain tag (the model, the caller's salt): prefixes of different domains never meet.
"""

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_TOKEN_TYPE = "q"  # eight bytes a token id: hash and comparison both run over these bytes


class CachedBlock(NamedTuple):
    """One full block of KV: where it lies and exactly what it stands for."""

    block_id: int
    parent: bytes
    tokens: bytes


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The token ids as bytes, the form in which blocks are hashed and compared."""
    return array(_TOKEN_TYPE, token_ids).tobytes()


def domain_hash(parts: Iterable[bytes]) -> bytes:
    """The start of a hash chain. Each part is hashed on its own first, so that no two lists of parts run together."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


class PrefixCache:
    """The index from chained block hash to block, nothing more: who holds a block is the BlockPool's business.

    Invariants (`check_integrity`): a block has one entry at most, an entry's hash is that of its parent and tokens.
    An entry may outlive its parent: it is then unreachable until somebody computes the same parent again.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._entries: dict[bytes, CachedBlock] = {}
        self._hash_of: dict[int, bytes] = {}  # block id -> its key in _entries

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._hash_of

    def extend_hashes(self, hashes: list[bytes], token_ids: list[int], num_blocks: int, *, domain: bytes) -> None:
        """Append to `hashes` until it has those of the first `num_blocks` full blocks of `token_ids`."""
        size = self._block_size
        parent = hashes[-1] if hashes else domain
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = hashlib.sha256(parent + pack_tokens(token_ids[start : start + size])).digest()
            hashes.append(parent)

    def match(self, hashes: list[bytes], token_ids: list[int], num_blocks: int, *, domain: bytes) -> list[int]:
        """Block ids of the longest cached prefix, `num_blocks` at most, each verified against parent and token ids."""
        size = self._block_size
        block_ids = []
        parent = domain
        for index in range(num_blocks):
            entry = self._entries.get(hashes[index])
            if entry is None or entry.parent != parent:
                break
            if entry.tokens != pack_tokens(token_ids[index * size : (index + 1) * size]):
                break
            block_ids.append(entry.block_id)
            parent = hashes[index]
        return block_ids

    def insert(self, block_id: int, block_hash: bytes, *, parent: bytes, is_first: bool, token_ids: list[int]) -> None:
        """Offer a full block. Refused when the prefix is cached already, or when the block before it is not: nobody
        could reach it, and after a `purge` the descendants of what was purged must not come back.
        """
        if block_hash in self._entries or block_id in self._hash_of or not (is_first or parent in self._entries):
            return
        self._entries[block_hash] = CachedBlock(block_id, parent, pack_tokens(token_ids))
        self._hash_of[block_id] = block_hash

    def remove(self, block_id: int) -> None:
        """Forget this block, if it is cached."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._entries[block_hash]

    def purge(self, hashes: Iterable[bytes]) -> list[int]:
        """Forget these prefixes and all that continue them; returns their block ids. Linear in the cache: for NaNs."""
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
                self.remove(entry.block_id)
                removed.append(entry.block_id)
        return removed

    def block_ids(self) -> list[int]:
        """Every cached block."""
        return list(self._hash_of)

    def check_integrity(self) -> None:
        """Assert the invariants of the class docstring."""
        assert {entry.block_id: key for key, entry in self._entries.items()} == self._hash_of
        assert len(self._entries) == len(self._hash_of), "a block under two hashes"
        for block_hash, (_, parent, tokens) in self._entries.items():
            assert hashlib.sha256(parent + tokens).digest() == block_hash, "an entry under a wrong hash"
            assert len(tokens) == self._block_size * array(_TOKEN_TYPE).itemsize, "a block that is not full"
