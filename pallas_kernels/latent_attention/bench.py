"""Benchmark of `latent_attention`: steps of one layer of DeepSeek V2 Lite (16 heads), and of V3 with all 128 heads."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.latent_attention.op import Implementation, latent_attention
from pallas_kernels.paging import Pages
from pallas_kernels.timing import MIN_CALLS, Row, floor, measure, on_gpu


class _Step(NamedTuple):
    """Chunks of (new tokens, context they end), those of one token first."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    num_heads: int = 16
    latent_size: int = 512
    rotated_size: int = 64
    block_size: int = 16

    @property
    def size(self) -> int:
        """Size of a position's vector."""
        return self.latent_size + self.rotated_size

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.chunks)

    @property
    def flops(self) -> float:
        pairs = sum(new * (context - (new - 1) / 2) for new, context in self.chunks)
        return 2 * pairs * self.num_heads * (self.size + self.latent_size)

    @property
    def num_bytes(self) -> int:
        """Bytes of vectors, queries and results in 16 bits."""
        contexts = sum(context for _, context in self.chunks)
        return 2 * (contexts * self.size + self.num_tokens * self.num_heads * (self.size + self.latent_size))


def _decode(rows: int, context: int, num_heads: int) -> _Step:
    return _Step(f"{rows} x {context}, {num_heads} heads", ((1, context),) * rows, num_heads)


_FULL = (
    *(_decode(rows, context, 16) for context in (1024, 4096) for rows in (1, 16, 64, 128)),
    *(_decode(rows, 4096, 128) for rows in (1, 16, 64)),
    _Step("chunk of 4096", ((4096, 4096),)),
    _Step("chunks of 16 x 512", ((512, 512),) * 16),
    _Step("the last 1024 of 8192", ((1024, 8192),)),
)
_SMALL = (_decode(4, 256, 4), _Step("chunk of 128", ((128, 128),), 4))


def latent_attention_rows() -> Iterator[Row]:
    """Yield a row for each step and implementation; on a GPU, plain XLA runs only the smallest steps."""
    for step in _FULL if on_gpu() else _SMALL:
        implementations: tuple[Implementation, ...] = ("xla",)
        if on_gpu():
            implementations = ("sm90", "xla") if step.num_bytes < 2**23 else ("sm90",)
        for implementation in implementations:
            inputs = [_arrays(step, seed) for seed in range(MIN_CALLS if on_gpu() else 2)]
            options = _layout(step) | {"latent_size": step.latent_size, "scale": step.size**-0.5}
            call = functools.partial(latent_attention, **options, implementation=implementation)
            took = measure(call, inputs, repeats=5)
            bound = floor(num_bytes=step.num_bytes, flops=step.flops)
            yield Row(step.name, implementation, took, bound, f"{step.flops / took / 1e6:.3g} TFLOP/s")


def _layout(step: _Step) -> dict[str, Any]:
    """Return the layout of a step, its pages scattered over the pool."""
    blocks = [math.ceil(context / step.block_size) for _, context in step.chunks]
    tables = np.zeros((len(blocks), max(blocks)), np.int32)
    pages = np.random.default_rng(0).permutation(sum(blocks))
    for table, own in zip(tables, np.split(pages, np.cumsum(blocks)[:-1]), strict=True):
        table[: len(own)] = own
    counts = [new for new, _ in step.chunks]
    return {
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray([context for _, context in step.chunks], jnp.int32),
        "query_starts": jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
        "num_decode_rows": jnp.int32(counts.count(1)),
        "num_rows": jnp.int32(len(counts)),
        "is_decode_only": set(counts) == {1},
    }


def _arrays(step: _Step, seed: int) -> tuple[jax.Array, Pages]:
    """Return random queries and pages."""
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    num_blocks = sum(math.ceil(context / step.block_size) for _, context in step.chunks)
    shapes = (step.num_tokens, step.num_heads, step.size), (num_blocks, 1, step.block_size, step.size)
    q_key, pages_key = jax.random.split(jax.random.key(seed))
    pool = jax.random.normal(pages_key, shapes[1], dtype)
    return jax.random.normal(q_key, shapes[0], dtype), Pages(pool, pool)
