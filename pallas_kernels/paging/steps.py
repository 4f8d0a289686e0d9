"""Steps that the attentions over pages are timed with."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paging.pages import Pages, round_vectors
from pallas_kernels.timing import random_arrays


class Step(NamedTuple):
    """The work of a step in one layer, by default of Llama 3 8B: chunks of (new tokens, context they end)."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    kv_dtype: str = "bfloat16"

    @property
    def bytes_of_value(self) -> float:
        """Bytes in memory of one number of a key or a value, with its part of the scale."""
        return 2 if self.kv_dtype == "bfloat16" else 1 + 4 / self.head_dim

    @property
    def num_tokens(self) -> int:
        """New tokens of all chunks."""
        return sum(new for new, _ in self.chunks)

    @property
    def num_positions(self) -> int:
        """Positions of all contexts."""
        return sum(context for _, context in self.chunks)

    @property
    def num_pairs(self) -> float:
        """Pairs of a query and a key that it attends to, in one head."""
        return sum(new * (context - (new - 1) / 2) for new, context in self.chunks)

    @property
    def _blocks(self) -> list[int]:
        return [math.ceil(context / self.block_size) for _, context in self.chunks]

    def arrays(self, seed: int) -> tuple[jax.Array, Pages]:
        """Return random queries [T, H, D] and pages."""
        pool = sum(self._blocks), self.num_kv_heads, self.block_size, self.head_dim
        q, k, v = random_arrays(seed, (self.num_tokens, self.num_heads, self.head_dim), pool, pool)
        if self.kv_dtype == "bfloat16":
            return q, Pages(k, v)
        (k, k_scales), (v, v_scales) = (round_vectors(pool, jnp.dtype(self.kv_dtype)) for pool in (k, v))
        return q, Pages(k, v, jnp.stack([k_scales, v_scales], axis=2))

    def rows(self, *, min_columns: int = 0) -> dict[str, Any]:
        """Return the block tables, of pages scattered over the pool, and the lengths."""
        tables = np.zeros((len(self.chunks), max(*self._blocks, min_columns)), np.int32)
        pages = np.random.default_rng(0).permutation(sum(self._blocks))
        for table, own in zip(tables, np.split(pages, np.cumsum(self._blocks)[:-1]), strict=True):
            table[: len(own)] = own
        lengths = jnp.asarray([context for _, context in self.chunks], jnp.int32)
        return {"block_tables": jnp.asarray(tables), "seq_lens": lengths}

    def query_rows(self) -> dict[str, Any]:
        """Return those of several tokens: with where each begins in the queries, and their number."""
        starts = jnp.asarray(np.cumsum([0, *(new for new, _ in self.chunks)]), jnp.int32)
        return self.rows() | {"query_starts": starts, "num_rows": jnp.int32(len(self.chunks))}
