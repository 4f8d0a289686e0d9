"""BlockNeeds: how many KV blocks a request needs. Schedulers, start-up and `jaxserve models` count with it.

The layers of a model lie in groups (`execution.kv_layout`). A block has room for `block_size` tokens in the layers of
one group, so that a request has a block table for each group, all of the same length. The layers of a group look
equally far back; blocks before the window of all tokens to come are given back.
"""

import bisect
import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockNeeds:
    """What a request holds, for steps of at most `max_chunk` tokens a request."""

    windows: tuple[int | None, ...]
    """Of each group: to how many tokens a token attends, itself included; None: to all before it."""
    block_size: int
    max_chunk: int

    def first_block(self, group: int, position: int) -> int:
        """The first block that tokens at `position` or behind it attend to."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def most_of_window(self, window: int, *, chunk: int) -> int:
        """Blocks that `chunk` tokens in a row attend to, wherever they are."""
        return (chunk + window - 1 + self.block_size - 2) // self.block_size + 1

    def peak(self, num_tokens: int, *, start: int = 0) -> int:
        """Blocks, of all groups, that a request holds at most until its tokens [start, num_tokens) are computed."""
        return sum(self.peaks(num_tokens, start=start, chunk=self.max_chunk))

    def peaks(self, num_tokens: int, *, start: int = 0, chunk: int) -> list[int]:
        """The same of each group, for steps of at most `chunk` tokens."""
        end = -(-num_tokens // self.block_size)
        held = [end - self.first_block(group, start) for group in range(len(self.windows))]
        return [
            count if window is None else min(count, self.most_of_window(window, chunk=chunk))
            for count, window in zip(held, self.windows, strict=True)
        ]

    def longest(self, num_blocks: int, *, limit: int) -> int:
        """Tokens of the longest request that `num_blocks` are enough for, at most `limit`."""
        return bisect.bisect_right(range(1, limit + 1), num_blocks, key=self.peak)

    def num_requests(self, num_blocks: int, *, num_tokens: int) -> int:
        """Requests that can grow to `num_tokens` together, if one of them at a time computes its prompt."""
        peak = self.peak(num_tokens)
        return 0 if num_blocks < peak else 1 + (num_blocks - peak) // sum(self.peaks(num_tokens, chunk=1))
