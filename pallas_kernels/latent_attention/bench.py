"""Benchmark of `latent_attention`: steps of one layer of DeepSeek V2 Lite (16 heads), and of V3 with all 128 heads."""

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels.latent_attention.op import latent_attention
from pallas_kernels.paging.steps import Step
from pallas_kernels.timing import MIN_CALLS, Row, floor, measure, on_gpu, ours

_LATENT_SIZE, _SIZE = 512, 576
"""Sizes of a latent, and of a position's vector."""


def _step(name: str, chunks: tuple[tuple[int, int], ...], num_heads: int = 16) -> Step:
    return Step(name, chunks, num_heads, num_kv_heads=1, head_dim=_SIZE)


def _decode(rows: int, context: int, num_heads: int) -> Step:
    return _step(f"{rows} x {context}, {num_heads} heads", ((1, context),) * rows, num_heads)


_FULL = (
    *(_decode(rows, context, 16) for context in (1024, 4096) for rows in (1, 16, 64, 128)),
    *(_decode(rows, 4096, 128) for rows in (1, 16, 64)),
    _step("chunk of 4096", ((4096, 4096),)),
    _step("chunks of 16 x 512", ((512, 512),) * 16),
    _step("the last 1024 of 8192", ((1024, 8192),)),
)
_SMALL = (_decode(4, 256, 4), _step("chunk of 128", ((128, 128),), 4))


def latent_attention_rows() -> Iterator[Row]:
    """Yield a row for each step and implementation; on a GPU, plain XLA runs only the smallest steps."""
    for step in _FULL if on_gpu() else _SMALL:
        flops = 2 * step.num_pairs * step.num_heads * (_SIZE + _LATENT_SIZE)
        # Of vectors, queries and results in 16 bits.
        num_bytes = 2 * (step.num_positions * _SIZE + step.num_tokens * step.num_heads * (_SIZE + _LATENT_SIZE))
        counts = [new for new, _ in step.chunks]
        options = step.query_rows() | {"latent_size": _LATENT_SIZE, "scale": _SIZE**-0.5}
        options |= {"num_decode_rows": jnp.int32(counts.count(1)), "is_decode_only": set(counts) == {1}}
        for implementation, call in ours(latent_attention, **options).items():
            if on_gpu() and implementation == "xla" and num_bytes >= 2**23:
                continue
            inputs = []
            for seed in range(MIN_CALLS if on_gpu() else 2):
                q, pages = step.arrays(seed)
                inputs.append((q, pages._replace(v=pages.k)))
            took, bound = measure(call, inputs), floor(num_bytes=num_bytes, flops=flops)
            yield Row(step.name, implementation, took, bound, f"{flops / took / 1e6:.3g} TFLOP/s")
