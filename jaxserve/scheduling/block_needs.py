"""BlockNeeds: the number of KV blocks that a request needs, as counted by schedulers, start-up and `jaxserve models`.

A model's layers form KV groups (`execution.kv_layout`): the layers of a group look equally far back. A block holds
`block_size` tokens in the layers of one group, so a request has one block table per group, all of equal length. Blocks
that lie before the window of all future tokens are released.
"""

import bisect
import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockNeeds:
    """Block counts for steps of at most `max_chunk` tokens per request."""

    windows: tuple[int | None, ...]
    """For each KV group, the number of tokens that a token attends to, including itself; None for all before it."""
    block_size: int
    max_chunk: int

    def first_block(self, group: int, position: int) -> int:
        """Return the index of the first block that tokens from `position` on attend to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def most_of_window(self, window: int, *, chunk: int) -> int:
        """Return the largest number of blocks that `chunk` consecutive tokens attend to, wherever they start."""
        return (chunk + window - 1 + self.block_size - 2) // self.block_size + 1

    def peak(self, num_tokens: int, *, start: int = 0) -> int:
        """Return the most blocks, over all KV groups, that a request holds while its tokens [start, num_tokens) are
        computed.
        """
        return sum(self.peaks(num_tokens, start=start, chunk=self.max_chunk))

    def peaks(self, num_tokens: int, *, start: int = 0, chunk: int) -> list[int]:
        """Return `peak` for each KV group, for steps of at most `chunk` tokens."""
        end = -(-num_tokens // self.block_size)
        held = [end - self.first_block(group, start) for group in range(len(self.windows))]
        return [
            count if window is None else min(count, self.most_of_window(window, chunk=chunk))
            for count, window in zip(held, self.windows, strict=True)
        ]

    def longest(self, num_blocks: int, *, limit: int) -> int:
        """Return the length in tokens of the longest request that fits into `num_blocks`, at most `limit`."""
        return bisect.bisect_right(range(1, limit + 1), num_blocks, key=self.peak)

    def num_requests(self, num_blocks: int, *, num_tokens: int) -> int:
        """Return how many requests can grow to `num_tokens` together, if only one of them at a time computes its
        prompt.
        """
        peak = self.peak(num_tokens)
        return 0 if num_blocks < peak else 1 + (num_blocks - peak) // sum(self.peaks(num_tokens, chunk=1))
