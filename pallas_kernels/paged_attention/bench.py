"""Benchmark of `paged_attention`: decode steps of one layer, most of them of Llama-3-8B."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import paged_attention as jax_triton

from pallas_kernels.paged_attention.op import paged_attention
from pallas_kernels.paging import Pages, Scores
from pallas_kernels.paging.steps import Step
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu, ours, with_plan

_MAX_CONTEXT = 8192
"""Context length that the block tables have room for, used or not, at least."""


def _step(name: str, lens: Sequence[int], **options: Any) -> Step:
    """Each row has one token to compute at the end of its context; options are those of a step."""
    return Step(name, tuple((1, length) for length in lens), **options)


_SMALL = (
    _step("64 x 1024, H/K/D 12/4/64", (1024,) * 64, num_heads=12, num_kv_heads=4, head_dim=64),
    _step("64 x 1024", (1024,) * 64),
    _step("1 x 4096", (4096,)),
)
_FULL = (
    _step("1 x 160", (160,)),
    _step("1 x 8192", (8192,)),
    _step("16 x 576", (576,) * 16),
    _step("8 x 4096", (4096,) * 8),
    _step("64 x 1152", (1152,) * 64),
    _step("256 x 1152", (1152,) * 256),
    _step("63 x 512 and 1 x 65536", (512,) * 63 + (65536,)),
    _step("64 x 1152, FP8", (1152,) * 64, kv_dtype="float8_e4m3fn"),
    _step("256 x 1152, FP8", (1152,) * 256, kv_dtype="float8_e4m3fn"),
    _step("1024 x 190, FP8", (190,) * 1024, kv_dtype="float8_e4m3fn"),
    _step("8 x 32768", (32768,) * 8),
    _step("8 x 32768, FP8", (32768,) * 8, kv_dtype="float8_e4m3fn"),
    _step("64 x 1152, pages of 64", (1152,) * 64, block_size=64),
    _step("64 x 1152, H/K/D 64/8/64", (1152,) * 64, num_heads=64, num_kv_heads=8, head_dim=64),
    _step("64 x 1152, H/K/D 32/32/96", (1152,) * 64, num_heads=32, num_kv_heads=32, head_dim=96),
    _step("64 x 1152, H/K/D 16/8/256", (1152,) * 64, num_heads=16, num_kv_heads=8, head_dim=256),
    _step("1 x 8192, H/K/D 32/4/512", (8192,), num_heads=32, num_kv_heads=4, head_dim=512),
    _step("16 x 1024, H/K/D 32/4/512", (1024,) * 16, num_heads=32, num_kv_heads=4, head_dim=512),
    _step("64 x 1152, H/K/D 32/4/512", (1152,) * 64, num_heads=32, num_kv_heads=4, head_dim=512),
)


def paged_attention_rows() -> Iterator[Row]:
    """Yield a row for each step and implementation.

    jax's own kernel in Triton only profits from its split with equal lengths, and runs with the fastest split for them.
    """
    for step in _FULL if on_gpu() else _SMALL:
        num_bytes = int(2 * step.bytes_of_value * step.num_positions * step.num_kv_heads * step.head_dim)
        arrays = [step.arrays(seed) for seed in range(max(2, num_rotations(num_bytes)))]
        inputs, q = with_plan([(pages,) for _, pages in arrays]), arrays[0][0][:, None]
        for name, call in _calls(step).items():
            try:
                # Each call's result is the next one's query; the plan is one for all, as for the layers of a model.
                took = measure(call, inputs, carry=jnp.copy(q))
            except Exception as error:  # another implementation may refuse a shape: the table says so
                yield Row(step.name, name, None, note=str(error).splitlines()[0][:60])
            else:
                yield Row(step.name, name, took, floor(num_bytes=num_bytes))


def _calls(step: Step) -> dict[str, Callable[..., jax.Array]]:
    """Return the implementations that run on this device, by name."""
    rows = step.rows(min_columns=_MAX_CONTEXT // step.block_size)

    def attend(q: jax.Array, pages: Pages, **options: Any) -> jax.Array:
        return paged_attention(q, pages, **rows, scores=Scores(scale=step.head_dim**-0.5), **options)[0]

    def triton(q: jax.Array, pages: Pages) -> jax.Array:
        # It expects [K, P, S, D]: with the axes' names swapped, heads are read with other strides than its own.
        k, v = (pool.reshape(step.num_kv_heads, -1, *pool.shape[2:]) for pool in pages[:2])
        columns = math.ceil(max(context for _, context in step.chunks) / step.block_size)
        splits = max(1, min(16, 256 // len(step.chunks)))
        tables = rows["block_tables"][:, : -(-columns // splits) * splits]
        return jax_triton.paged_attention(q[:, 0], k, v, tables, rows["seq_lens"], k_splits=splits)[:, None]

    is_for_both = on_gpu() and step.kv_dtype == "bfloat16"
    return ours(attend) | ({"jax (Triton)": triton} if is_for_both else {})
