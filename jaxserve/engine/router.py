"""Which of several equal engines gets a request: the one that has most of its prompt in its prefix cache, unless it has
much more to do than others. No jax here.

The caches themselves are elsewhere. What is known of them is which prompts were sent to which engine, the last of which
its cache still has: an LRU list of chunks of prompts for each, as long as the cache is large.
"""

import array
import collections
import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence

CHUNK_TOKENS = 64
"""Tokens of a prompt that are known together. A shorter common prefix is not worth sending a request anywhere."""

NEAR = 0.1
"""Fraction of a prompt by which an engine may know less of it than the one that knows most, and still be as good."""

LOAD_FACTOR = 1.25
LOAD_SLACK = 8
"""An engine gets no request for its prefix if it has more than LOAD_FACTOR times as many requests as the engine with
the fewest, and LOAD_SLACK.
"""

PROMPTS = ("system", "instructions", "messages", "prompt", "input")
"""Fields of bodies that are prompts, in the order in which templates have them."""


def prompt_chunks(token_ids: Sequence[int], salt: str = "") -> list[bytes]:
    """Return the hashes of a prompt's full chunks, each with all before it; those of different salts differ."""
    data = memoryview(array.array("i", token_ids)).cast("B")
    size = CHUNK_TOKENS * array.array("i").itemsize
    chunks, last = [], salt.encode()
    for start in range(0, len(data) - size + 1, size):
        digest = hashlib.blake2b(data[start : start + size], digest_size=8)
        digest.update(last)
        last = digest.digest()
        chunks.append(last)
    return chunks


def prompt_bytes(body: bytes) -> bytes:
    """Return the prompt of a request as bytes: equal beginnings of prompts are equal beginnings of these."""
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(body)
        if isinstance(fields, Mapping):
            return b"".join(json.dumps(fields[name]).encode() for name in PROMPTS if name in fields)
    return b""


class PrefixRouter:
    """Chooses among engines; each has a cache for `num_tokens` tokens. The caller reports what it has sent."""

    def __init__(self, *, num_tokens: int):
        self._capacity = max(1, num_tokens // CHUNK_TOKENS)
        self._known: dict[int, collections.OrderedDict[bytes, None]] = collections.defaultdict(collections.OrderedDict)

    def choose(self, chunks: Sequence[bytes], loads: Sequence[int | None]) -> int:
        """Return the engine for a prompt. `loads` are the numbers of requests that each has, None for one that is not
        there; one must be.
        """
        there = [engine for engine, load in enumerate(loads) if load is not None]
        least = min(load for load in loads if load is not None)
        lengths = [self._num_known(engine, chunks) for engine in range(len(loads))]
        needed = max(lengths[engine] for engine in there) - max(1, NEAR * len(chunks))
        near = [
            engine
            for engine in there
            if lengths[engine] >= needed and (loads[engine] or 0) <= LOAD_FACTOR * least + LOAD_SLACK
        ]
        return min(near or there, key=lambda engine: (loads[engine], -lengths[engine]))

    def record(self, engine: int, chunks: Sequence[bytes]) -> None:
        """Note that an engine gets a prompt."""
        known = self._known[engine]
        for chunk in reversed(chunks):  # so that the beginning, which more prompts have, is forgotten last
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > self._capacity:
            known.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Note that an engine's cache is empty."""
        self._known[engine].clear()

    def _num_known(self, engine: int, chunks: Sequence[bytes]) -> int:
        known = self._known[engine]
        return next((index for index, chunk in enumerate(chunks) if chunk not in known), len(chunks))
