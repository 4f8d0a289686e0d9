"""Compute the number of KV blocks from bytes of memory: numbers only, no device is used here."""

import dataclasses

from jaxserve.errors import OutOfMemory
from jaxserve.scheduling.block_needs import BlockNeeds

CPU_KV_CACHE_MEMORY = 2**30
"""Bytes for KV blocks on CPU, unless configured."""

MAX_POSITIONS = 2**30
"""Most positions in a pool: they are int32, and so are those beyond its end that padding tokens get."""

GPU_MEMORY_RESERVE = 512 * 2**20
"""Bytes left to what XLA's plan does not show: library workspaces, fragmentation."""

KV_CACHE_UNIT = 2**26
"""The size of the KV cache is a multiple of this many bytes: steps are compiled for a number of blocks, and are found
on disk again only if the next start arrives at the same number.
"""

CONTEXT_MARGIN = 16
"""One part in so many of the cache's memory that an automatic context leaves for steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizing:
    """What decides how many blocks there are.

    Attributes:
        kv_cache_memory: bytes for blocks on all devices, None for the remaining memory of the devices.
        weight_bytes: bytes of the weights on each device.
        trial_bytes: bytes on each device for XLA's trials of matrix products in programs that are compiled after the
            cache has been allocated.
        num_shards: number of devices that have a part of the cache, or all of it.
        bytes_per_block: bytes of a block on all devices; 0 if all layers keep states instead.
    """

    kv_cache_memory: int | None
    weight_bytes: int
    trial_bytes: int
    num_shards: int
    bytes_per_block: int
    max_num_seqs: int
    max_model_len: int
    needs: BlockNeeds

    @property
    def is_measured(self) -> bool:
        """True if the number of blocks depends on the memory that steps need."""
        return self.kv_cache_memory is None

    def check_weights(self, free: int, *, what: str) -> None:
        """Raise OutOfMemory unless the weights fit into `free` bytes of each device."""
        if self.weight_bytes > free:
            raise OutOfMemory(
                f"{what} needs {self.weight_bytes / 2**30:.1f} GiB a device for its weights, "
                f"but {free / 2**30:.1f} GiB are free"
            )

    def check_steps(self, free: int, step_memory: int, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Raise OutOfMemory unless slots and steps fit, besides the weights, into `free` bytes of each device."""
        free -= self.weight_bytes
        if step_memory > free:
            raise OutOfMemory(
                f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens} need "
                f"{step_memory / 2**30:.1f} GiB a device for the state of so many requests and their steps, but "
                f"{max(free, 0) / 2**30:.1f} GiB are free beside the weights"
            )

    def expected_blocks(self, free: int, step_memory: int) -> int:
        """Return the number of blocks before the weights are loaded. Raises OutOfMemory if they do not hold one request
        of `max_model_len` tokens.

        `free` is the memory of each device, `step_memory` what steps are expected to need of it.
        """
        return self.num_blocks(free - self.weight_bytes - KV_CACHE_UNIT, step_memory)  # allocations are rounded up

    def longest_context(self, free: int, step_memory: int) -> int:
        """Return the longest context, up to `max_model_len`, of which the cache holds one request; arguments are as for
        `expected_blocks`. Some memory is left for steps that need more than expected.
        """
        if not self.bytes_per_block:
            return self.max_model_len
        memory = self._memory(free - self.weight_bytes - KV_CACHE_UNIT, step_memory)
        if self.is_measured:
            memory -= memory // CONTEXT_MARGIN
        return self.needs.longest(memory // self.bytes_per_block, limit=self.max_model_len)

    def num_blocks(self, free: int, step_memory: int) -> int:
        """Return the number of blocks for `free` bytes of each device besides the weights. Raises OutOfMemory.

        Blocks that take no memory are as many as all slots can hold.
        """
        if not self.bytes_per_block:
            return self.max_num_seqs * self.needs.peak(self.max_model_len)
        memory = self._memory(free, step_memory)
        return choose_num_blocks(memory, self.bytes_per_block, max_model_len=self.max_model_len, needs=self.needs)

    def _memory(self, free: int, step_memory: int) -> int:
        """Return the bytes for blocks on all devices."""
        if self.kv_cache_memory is not None:
            return self.kv_cache_memory
        left = free - step_memory - self.trial_bytes - GPU_MEMORY_RESERVE
        return max(left, 0) // KV_CACHE_UNIT * KV_CACHE_UNIT * self.num_shards


def choose_num_blocks(memory: int, bytes_per_block: int, *, max_model_len: int, needs: BlockNeeds) -> int:
    """Return the number of blocks that fit into `memory` bytes.

    Raises OutOfMemory if a single request of `max_model_len` tokens would not fit.
    """
    num_blocks = memory // bytes_per_block
    needed = needs.peak(max_model_len)
    if num_blocks < needed:
        raise OutOfMemory(
            f"{memory / 2**20:.0f} MiB for the KV cache hold {needs.longest(num_blocks, limit=max_model_len)} tokens, "
            f"but max_model_len is {max_model_len} ({needed * bytes_per_block / 2**20:.0f} MiB): "
            "lower --max-model-len (auto: what there is memory for) or raise --kv-cache-memory"
        )
    return min(num_blocks, MAX_POSITIONS // needs.block_size)
