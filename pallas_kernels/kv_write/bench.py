"""Benchmark of `rope_and_write_kv`: steps of a Llama-3-8B layer, and of one with head norms."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.head_norms import HeadNorms
from pallas_kernels.kv_write.op import rope_and_write_kv
from pallas_kernels.paging import Pages
from pallas_kernels.timing import Row, floor, measure, on_gpu

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _PAGES = 32, 8, 128, 16, 2048
_LAYERS = 16


def rope_and_write_kv_rows() -> Iterator[Row]:
    """Yield a row for each number of tokens and implementation, timed as one layer of several.

    A layer's queries go into the next layer's `qkv` by an addition, so that XLA keeps all of them, in order; the time
    of the addition alone is subtracted.
    """
    for num_tokens in (1, 16, 64, 256, 2048, 8192) if on_gpu() else (1, 64):
        num_bytes = 2 * num_tokens * _HEAD_DIM * 2 * (_HEADS + 2 * _KV_HEADS)
        nothing = _microseconds(num_tokens, None)
        for implementation in ("xla", "sm90") if on_gpu() else ("xla",):
            for is_normed in (False, True):
                took = _microseconds(num_tokens, implementation, is_normed=is_normed) - nothing
                case = f"{num_tokens} tokens{', norms' if is_normed else ''}"
                yield Row(case, implementation, took, floor(num_bytes=num_bytes))


def _microseconds(num_tokens: int, implementation: Any, *, is_normed: bool = False) -> float:
    dtype = jnp.bfloat16 if on_gpu() else jnp.float32
    group = _HEADS // _KV_HEADS
    pool = jnp.zeros((_PAGES, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM), dtype)
    pools = [Pages(pool, pool)] * (_LAYERS if on_gpu() else 1)
    qkv = jax.random.normal(jax.random.key(0), (num_tokens, _KV_HEADS, group + 2, _HEAD_DIM), dtype)
    angles = jax.random.normal(jax.random.key(1), (num_tokens, _HEAD_DIM // 2))
    index = np.random.default_rng(0).permutation(_PAGES * _BLOCK_SIZE)[:num_tokens]
    rotation = (jnp.cos(angles), jnp.sin(angles))
    gain = jnp.ones(_HEAD_DIM, dtype)
    head_norms = HeadNorms(gain, gain, eps=1e-6) if is_normed else None
    step = functools.partial(_layers, head_norms=head_norms, implementation=implementation)
    # Copies, since the pools are donated one by one.
    pools = jax.tree.map(jnp.copy, pools)
    took = measure(step, [(rotation, jnp.asarray(index, jnp.int32))] * 2, carry=(pools, qkv), repeats=5)
    return took / len(pools)


def _layers(carry: Any, rotation: Any, index: jax.Array, *, head_norms: HeadNorms | None, implementation: Any) -> Any:
    pools, qkv = carry
    changed = []
    for pages in pools:
        q = qkv[:, :, :-2].reshape(len(qkv), -1, qkv.shape[-1])
        if implementation is not None:
            q, pages = rope_and_write_kv(
                qkv, pages, index, rotation=rotation, head_norms=head_norms, implementation=implementation
            )
        q = q.reshape(len(qkv), qkv.shape[1], -1, qkv.shape[-1])
        qkv = qkv * 0.5 + jnp.pad(q, ((0, 0), (0, 0), (1, 1), (0, 0)))
        changed.append(pages)
    return changed, qkv
