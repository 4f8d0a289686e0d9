"""Benchmark of `ragged_prefill_attention`: prefill steps of a Llama-3-8B layer, compared with cuDNN on contiguous
tensors.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paging import Pages, Scores
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu, with_plan


class _Step(NamedTuple):
    """Chunks of (new tokens, context they end)."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.chunks)

    @property
    def flops(self) -> float:
        pairs = sum(new * (context - (new - 1) / 2) for new, context in self.chunks)
        return 4 * pairs * self.num_heads * self.head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of queries, results, keys and values in 16 bits."""
        contexts = sum(context for _, context in self.chunks)
        return 4 * self.head_dim * (self.num_tokens * self.num_heads + contexts * self.num_kv_heads)


_MIXED = (1500, 37, 512, 800, 64, 300, 900, 128, 511, 700, 200, 1000, 450, 250, 640, 200)
_FULL = (
    _Step("1 x 8192", ((8192, 8192),)),
    _Step("8 x 1024", ((1024, 1024),) * 8),
    _Step("16 x 512", ((512, 512),) * 16),
    _Step("16 prompts of 37 to 1500", tuple((n, n) for n in _MIXED)),
    _Step("the last 1024 of 8192", ((1024, 8192),)),
    _Step("1 x 32768", ((32768, 32768),)),
)
_SMALL = (
    _Step("1 x 512", ((512, 512),), 12, 4, 64),
    _Step("1 x 512", ((512, 512),)),
    _Step("the last 512 of 4096", ((512, 4096),)),
)


def ragged_prefill_attention_rows() -> Iterator[Row]:
    """Yield a row for each step and implementation; cuDNN only if all chunks are whole prompts of one length."""
    for step in _FULL if on_gpu() else _SMALL:
        bound = floor(num_bytes=step.num_bytes, flops=step.flops)
        layout = _layout(step)

        def row(
            implementation: str, call: Callable[..., Any], inputs: list[Any], out=None, step=step, bound=bound
        ) -> Row:
            took = measure(call, inputs, carry=out, repeats=5)
            note = f"{step.flops / took / 1e6:.0f} TFLOP/s" if on_gpu() else f"{step.flops / took / 1e3:.0f} GFLOP/s"
            return Row(step.name, implementation, took, bound, note)

        seeds = range(min(8, num_rotations(step.num_bytes)))
        implementation = "sm90" if on_gpu() else "xla"
        call = functools.partial(
            _call, layout=layout, scores=Scores(scale=step.head_dim**-0.5), implementation=implementation
        )
        inputs = [_arrays(step, seed) for seed in seeds]
        yield row(implementation, call, with_plan(inputs), out=jnp.zeros_like(inputs[0][0]))
        if on_gpu() and len(set(step.chunks)) == 1 and step.chunks[0][0] == step.chunks[0][1]:
            call = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            yield row("cuDNN, no pages", call, [_contiguous(step, seed) for seed in seeds])


def _call(
    out: jax.Array,
    q: jax.Array,
    pages: Pages,
    *,
    layout: dict[str, Any],
    scores: Scores,
    implementation: Any,
) -> jax.Array:
    return ragged_prefill_attention(q, pages, out, **layout, scores=scores, implementation=implementation)


def _layout(step: _Step) -> dict[str, Any]:
    """Return the layout of a step, its pages scattered over the pool."""
    blocks = [math.ceil(context / step.block_size) for _, context in step.chunks]
    tables = np.zeros((len(blocks), max(blocks)), np.int32)
    pages = np.random.default_rng(0).permutation(sum(blocks))
    for table, own in zip(tables, np.split(pages, np.cumsum(blocks)[:-1]), strict=True):
        table[: len(own)] = own
    return {
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.asarray([context for _, context in step.chunks], jnp.int32),
        "query_starts": jnp.asarray(np.cumsum([0, *(new for new, _ in step.chunks)]), jnp.int32),
        "first_row": jnp.int32(0),
        "num_rows": jnp.int32(len(step.chunks)),
    }


def _arrays(step: _Step, seed: int) -> tuple[jax.Array, Pages]:
    """Q and the pages."""
    num_blocks = sum(math.ceil(context / step.block_size) for _, context in step.chunks)
    pool = (num_blocks, step.num_kv_heads, step.block_size, step.head_dim)
    q, k, v = _normal(seed, (step.num_tokens, step.num_heads, step.head_dim), pool, pool)
    return q, Pages(k, v)


def _contiguous(step: _Step, seed: int) -> tuple[jax.Array, ...]:
    """q, k and v as cuDNN takes them."""
    batch, length = len(step.chunks), step.chunks[0][0]
    kv = (batch, length, step.num_kv_heads, step.head_dim)
    return _normal(seed, (batch, length, step.num_heads, step.head_dim), kv, kv)


def _normal(seed: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
