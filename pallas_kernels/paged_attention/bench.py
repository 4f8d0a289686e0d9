"""Benchmark of `paged_attention`: decode steps of one layer, most of them of Llama-3-8B."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu import paged_attention as jax_triton

from pallas_kernels.paged_attention.op import Implementation, paged_attention
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu, with_plan


class _Step(NamedTuple):
    """Each row has one token to compute at the end of its context."""

    name: str
    lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    max_context: int = 8192
    """Context length that the block tables have room for, used or not."""

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V in bf16."""
        return 4 * sum(self.lens) * self.num_kv_heads * self.head_dim


_SMALL = (
    _Step("64 x 1024, H/K/D 12/4/64", (1024,) * 64, 12, 4, 64),
    _Step("64 x 1024", (1024,) * 64),
    _Step("1 x 4096", (4096,)),
)
_FULL = (
    _Step("1 x 160", (160,)),
    _Step("1 x 8192", (8192,)),
    _Step("16 x 576", (576,) * 16),
    _Step("8 x 4096", (4096,) * 8),
    _Step("64 x 1152", (1152,) * 64),
    _Step("256 x 1152", (1152,) * 256),
    _Step("63 x 512 and 1 x 65536", (512,) * 63 + (65536,), max_context=65536),
    _Step("64 x 1152, pages of 64", (1152,) * 64, block_size=64),
    _Step("64 x 1152, H/K/D 64/8/64", (1152,) * 64, 64, 8, 64),
    _Step("64 x 1152, H/K/D 32/32/96", (1152,) * 64, 32, 32, 96),
    _Step("64 x 1152, H/K/D 16/8/256", (1152,) * 64, 16, 8, 256),
)


def paged_attention_rows() -> Iterator[Row]:
    """Yield a row for each step and implementation.

    jax's own kernel in Triton only profits from its split with equal lengths, and runs with the fastest split for them.
    """
    for step in _FULL if on_gpu() else _SMALL:
        q, pools, layout = _arrays(step)
        for name, call in _calls(step).items():
            try:
                # Each call's result is the next one's query; the plan is one for all, as for the layers of a model.
                took = measure(functools.partial(call, **layout), with_plan(pools), carry=jnp.copy(q), repeats=5)
            except Exception as error:  # another implementation may refuse a shape: the table says so
                yield Row(step.name, name, None, note=str(error).splitlines()[0][:60])
            else:
                yield Row(step.name, name, took, floor(num_bytes=step.num_bytes))


def _calls(step: _Step) -> dict[str, Callable[..., jax.Array]]:
    """Return the implementations that run on this device, by name."""

    def ours(q: jax.Array, pages: Pages, *, implementation: Implementation, **layout: Any) -> jax.Array:
        return paged_attention(
            q, pages, **layout, scores=Scores(scale=step.head_dim**-0.5), implementation=implementation
        )[0]

    def triton(q: jax.Array, pages: Pages, *, block_tables: jax.Array, seq_lens: jax.Array) -> jax.Array:
        # It expects [K, P, S, D]: with the axes' names swapped, heads are read with other strides than its own.
        k, v = (pool.reshape(step.num_kv_heads, -1, *pool.shape[2:]) for pool in pages[:2])
        columns = math.ceil(max(step.lens) / step.block_size)
        splits = max(1, min(16, 256 // len(step.lens)))
        tables = block_tables[:, : -(-columns // splits) * splits]
        return jax_triton.paged_attention(q[:, 0], k, v, tables, seq_lens, k_splits=splits)[:, None]

    if not on_gpu():
        return {"xla": functools.partial(ours, implementation="xla")}
    return {
        "sm90": functools.partial(ours, implementation="sm90"),
        "jax (Triton)": triton,
        "xla": functools.partial(ours, implementation="xla"),
    }


def _arrays(step: _Step) -> tuple[jax.Array, list[tuple[Pages]], dict[str, jax.Array]]:
    """Return q, enough pools that none is in the L2 cache, and a layout whose pages are scattered over a pool."""
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    blocks = [math.ceil(length / step.block_size) for length in step.lens]
    shape = (sum(blocks), step.num_kv_heads, step.block_size, step.head_dim)
    keys = jax.random.split(jax.random.key(0), 2 * max(2, num_rotations(step.num_bytes)) + 1)
    q = jax.random.normal(keys[0], (len(blocks), 1, step.num_heads, step.head_dim), dtype)
    arrays = [jax.random.normal(key, shape, dtype) for key in keys[1:]]
    scattered = np.random.default_rng(0).permutation(sum(blocks))
    tables = np.zeros((len(blocks), max(max(blocks), step.max_context // step.block_size)), np.int32)
    for row, (count, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        tables[row, :count] = scattered[end - count : end]
    layout = {"block_tables": jnp.asarray(tables), "seq_lens": jnp.asarray(step.lens, jnp.int32)}
    return q, [(Pages(k, v),) for k, v in zip(arrays[::2], arrays[1::2], strict=True)], layout
