"""Benchmark of `ragged_prefill_attention`: prefill steps of a Llama-3-8B layer, compared with cuDNN on contiguous
tensors.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paging import MAX_HEAD_DIM, Pages, Scores
from pallas_kernels.paging.steps import Step
from pallas_kernels.ragged_prefill_attention.op import ragged_prefill_attention
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu, random_arrays, with_plan

_MIXED = (1500, 37, 512, 800, 64, 300, 900, 128, 511, 700, 200, 1000, 450, 250, 640, 200)
_FULL = (
    Step("1 x 8192", ((8192, 8192),)),
    Step("8 x 1024", ((1024, 1024),) * 8),
    Step("16 x 512", ((512, 512),) * 16),
    Step("16 prompts of 37 to 1500", tuple((n, n) for n in _MIXED)),
    Step("the last 1024 of 8192", ((1024, 8192),)),
    Step("1 x 32768", ((32768, 32768),)),
    Step("1 x 8192, FP8", ((8192, 8192),), kv_dtype="float8_e4m3fn"),
    Step("16 x 512, FP8", ((512, 512),) * 16, kv_dtype="float8_e4m3fn"),
    Step("the last 1024 of 4096, FP8", ((1024, 4096),), kv_dtype="float8_e4m3fn"),
    # Gemma 4's layers without a window: 31B, 26B-A4B, E4B.
    *(
        Step(f"{name}, H/K/D {num_heads}/{num_kv_heads}/512", chunks, num_heads, num_kv_heads, 512)
        for num_heads, num_kv_heads in ((32, 4), (16, 2), (8, 2))
        for name, chunks in (
            ("1 x 8192", ((8192, 8192),)),
            ("16 x 512", ((512, 512),) * 16),
            ("the last 1024 of 8192", ((1024, 8192),)),
        )
    ),
)
_SMALL = (
    Step("1 x 512", ((512, 512),), 12, 4, 64),
    Step("1 x 512", ((512, 512),)),
    Step("the last 512 of 4096", ((512, 4096),)),
)


def ragged_prefill_attention_rows() -> Iterator[Row]:
    """Yield a row for each step and implementation; cuDNN only if all chunks are whole prompts of one length, and XLA
    for the ends of contexts in large heads, which cuDNN does not have.
    """
    for step in _FULL if on_gpu() else _SMALL:
        flops = 4 * step.num_pairs * step.num_heads * step.head_dim
        kv_bytes = 2 * step.bytes_of_value * step.num_positions * step.num_kv_heads
        num_bytes = int(step.head_dim * (4 * step.num_tokens * step.num_heads + kv_bytes))
        seeds = range(min(8, num_rotations(num_bytes)))
        implementation = "sm90" if on_gpu() else "xla"
        options = step.query_rows() | {"first_row": jnp.int32(0), "scores": Scores(scale=step.head_dim**-0.5)}
        calls = {name: functools.partial(_call, **options, implementation=name) for name in (implementation, "xla")}
        inputs = [step.arrays(seed) for seed in seeds]
        names = [implementation]
        if on_gpu() and step.head_dim > MAX_HEAD_DIM and step.num_positions > step.num_tokens:
            names.append("xla")
        cases: list[tuple[str, Callable[..., Any], Any, Any]] = [
            (name, calls[name], with_plan(inputs), jnp.zeros_like(inputs[0][0])) for name in names
        ]
        is_whole = len(set(step.chunks)) == 1 and step.chunks[0][0] == step.chunks[0][1]
        if on_gpu() and is_whole and step.kv_dtype == "bfloat16" and step.head_dim <= MAX_HEAD_DIM:
            call = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            cases.append(("cuDNN, no pages", call, [_contiguous(step, seed) for seed in seeds], None))
        for name, call, arguments, carry in cases:
            took = measure(call, arguments, carry=carry)
            note = f"{flops / took / 1e6:.0f} TFLOP/s" if on_gpu() else f"{flops / took / 1e3:.0f} GFLOP/s"
            yield Row(step.name, name, took, floor(num_bytes=num_bytes, flops=flops), note)


def _call(out: jax.Array, q: jax.Array, pages: Pages, **options: Any) -> jax.Array:
    return ragged_prefill_attention(q, pages, out, **options)


def _contiguous(step: Step, seed: int) -> tuple[jax.Array, ...]:
    """q, k and v as cuDNN takes them."""
    batch, length = len(step.chunks), step.chunks[0][0]
    kv = (batch, length, step.num_kv_heads, step.head_dim)
    return random_arrays(seed, (batch, length, step.num_heads, step.head_dim), kv, kv)
