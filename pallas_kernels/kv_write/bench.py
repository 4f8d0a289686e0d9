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
from pallas_kernels.timing import Row, floor, measure, on_gpu, ours, random_arrays

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, _PAGES = 32, 8, 128, 16, 2048
_LAYERS = 16


def rope_and_write_kv_rows() -> Iterator[Row]:
    """Yield a row for each number of tokens and implementation, timed as one layer of several.

    A layer's queries go into the next layer's `qkv` by an addition, so that XLA keeps all of them, in order; the time
    of the addition alone is subtracted.
    """
    for num_tokens in (1, 16, 64, 256, 2048, 8192) if on_gpu() else (1, 64):
        bound = floor(num_bytes=2 * num_tokens * _HEAD_DIM * 2 * (_HEADS + 2 * _KV_HEADS))
        nothing = _microseconds(num_tokens, None)
        gain = jnp.ones(_HEAD_DIM, jnp.bfloat16 if on_gpu() else jnp.float32)
        for name, head_norms in ("", None), (", norms", HeadNorms(gain, gain, eps=1e-6)):
            for implementation, write in ours(rope_and_write_kv, head_norms=head_norms).items():
                took = _microseconds(num_tokens, write) - nothing
                yield Row(f"{num_tokens} tokens{name}", implementation, took, bound)


def _microseconds(num_tokens: int, write: Any) -> float:
    group = _HEADS // _KV_HEADS
    [qkv] = random_arrays(0, (num_tokens, _KV_HEADS, group + 2, _HEAD_DIM))
    # Different ones, since the pools are donated one by one.
    shape = _PAGES, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM
    pools = [jnp.zeros(shape, qkv.dtype) for _ in range(2 * _LAYERS if on_gpu() else 2)]
    pages = list(map(Pages, pools[::2], pools[1::2]))
    angles = jax.random.normal(jax.random.key(1), (num_tokens, _HEAD_DIM // 2))
    index = np.random.default_rng(0).permutation(_PAGES * _BLOCK_SIZE)[:num_tokens]
    inputs = [((jnp.cos(angles), jnp.sin(angles)), jnp.asarray(index, jnp.int32))] * 2
    return measure(functools.partial(_layers, write), inputs, carry=(pages, qkv)) / len(pages)


def _layers(write: Any, carry: Any, rotation: Any, index: jax.Array) -> Any:
    pools, qkv = carry
    changed = []
    for pages in pools:
        q = qkv[:, :, :-2].reshape(len(qkv), -1, qkv.shape[-1])
        if write is not None:
            q, pages = write(qkv, pages, index, rotation=rotation)
        q = q.reshape(len(qkv), qkv.shape[1], -1, qkv.shape[-1])
        qkv = qkv * 0.5 + jnp.pad(q, ((0, 0), (0, 0), (1, 1), (0, 0)))
        changed.append(pages)
    return changed, qkv
