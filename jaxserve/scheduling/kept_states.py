"""KeptStates: which states the device keeps for the prefix cache, by the prefix that they stand behind.

KV can be continued at any token, a state only where it was copied: each token replaces it. The prefix is named by the
hash of its last block, as in PrefixCache, which decides whether that is the prefix of a request.
"""

from collections import OrderedDict


class KeptStates:
    """At most `num_states` states, of which the one that was used longest ago makes room for a new one."""

    def __init__(self, num_states: int):
        self._num_states = num_states
        self._free = list(range(num_states))
        self._indices: OrderedDict[bytes, int] = OrderedDict()  # by use, the least recent first

    def __len__(self) -> int:
        return len(self._indices)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._indices

    def use(self, block_hash: bytes) -> int:
        """Return where the state of a prefix is kept; raise KeyError if it is not."""
        self._indices.move_to_end(block_hash)
        return self._indices[block_hash]

    def keep(self, block_hash: bytes, *, instead_of: bytes | None = None) -> int | None:
        """Return where a state is to be kept from now on; None if it is kept already. `instead_of` is the prefix whose
        state makes room, if it is there.
        """
        if block_hash in self._indices:
            self._indices.move_to_end(block_hash)
            return None
        if instead_of in self._indices:
            index = self._indices.pop(instead_of)
        else:
            index = self._free.pop() if self._free else self._indices.popitem(last=False)[1]
        self._indices[block_hash] = index
        return index

    def clear(self) -> None:
        """Forget all."""
        self.__init__(self._num_states)

    def check_integrity(self) -> None:
        """Assert that each place is free or has one state."""
        assert sorted([*self._free, *self._indices.values()]) == list(range(self._num_states)), "a state is lost"
