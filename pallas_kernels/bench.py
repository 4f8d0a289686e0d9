"""`python -m pallas_kernels.bench [OPERATION]`: times of the operations on this machine's default device."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import paged_attention


class _Step(NamedTuple):
    """One measured step: each row has `new_tokens` tokens to compute at the end of a context of `context`."""

    name: str
    rows: int
    new_tokens: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


_STEPS = (
    _Step("decode", 64, 1, 1024, 12, 4, 64),
    _Step("decode", 64, 1, 1024, 32, 8, 128),
    _Step("decode, alone", 1, 1, 4096, 32, 8, 128),
    _Step("prefill", 1, 512, 512, 12, 4, 64),
    _Step("prefill", 1, 512, 512, 32, 8, 128),
    _Step("prefill, last chunk", 1, 512, 4096, 32, 8, 128),
)


def bench_paged_attention(block_size: int = 16, max_context: int = 8192, repeats: int = 5) -> None:
    """Print milliseconds a call, bytes of K and V read a second, and floating-point operations a second.

    Every row's block table has room for `max_context`, so that cost which follows maxima would show.
    """
    print(f"{'step':22}{'rows':>5}{'new':>5}{'context':>8}{'H/K/D':>11}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>9}")
    run = jax.jit(paged_attention, static_argnames="scale")
    for step in _STEPS:
        q, k, v, layout = _arrays(step, block_size, max_context)
        seconds = _median_time(functools.partial(run, q, k, v, **layout, scale=0.1), repeats)
        pairs = step.rows * step.new_tokens * (step.context - (step.new_tokens - 1) / 2)
        flops = 4 * pairs * step.num_heads * step.head_dim
        heads = f"{step.num_heads}/{step.num_kv_heads}/{step.head_dim}"
        print(
            f"{step.name:22}{step.rows:5}{step.new_tokens:5}{step.context:8}{heads:>11}"
            f"{seconds * 1e3:9.2f}{(k.nbytes + v.nbytes) / seconds / 1e9:8.1f}{flops / seconds / 1e9:9.1f}"
        )


def _arrays(
    step: _Step, block_size: int, max_context: int
) -> tuple[jax.Array, jax.Array, jax.Array, dict[str, jax.Array]]:
    """q, k_pages, v_pages and the layout of a step, its blocks scattered over the pool."""
    rng = np.random.default_rng(0)
    blocks = step.context // block_size
    q_shape = (step.rows * step.new_tokens, step.num_heads, step.head_dim)
    pool = (step.rows * blocks, step.num_kv_heads, block_size, step.head_dim)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (q_shape, pool, pool))
    tables = np.zeros((step.rows, max_context // block_size), np.int32)
    tables[:, :blocks] = rng.permutation(step.rows * blocks).reshape(step.rows, blocks)
    layout = {
        "block_tables": jnp.asarray(tables),
        "seq_lens": jnp.full(step.rows, step.context, jnp.int32),
        "query_starts": jnp.arange(step.rows + 1, dtype=jnp.int32) * step.new_tokens,
        "num_decode_rows": jnp.int32(step.rows if step.new_tokens == 1 else 0),
        "num_rows": jnp.int32(step.rows),
    }
    return q, k, v, layout


def _median_time(call: Callable[[], jax.Array], repeats: int) -> float:
    """Seconds of a call, compiled before."""
    call().block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


_OPERATIONS = {"paged_attention": bench_paged_attention}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("operation", nargs="?", choices=_OPERATIONS, help="default: all of them")
    operation = parser.parse_args().operation
    for name in [operation] if operation else _OPERATIONS:
        _OPERATIONS[name]()


if __name__ == "__main__":
    main()
