"""Rows in the registers of a warpgroup, and their RMS norms."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128
"""Threads of a warpgroup."""
MAX_VALUES_PER_THREAD = 128
"""Values of float32, two of them at a time: more would not fit into 255 registers."""


def why_not_row(size: int, dtype: jnp.dtype) -> str | None:
    """Return why no kernel has rows of `size` values of this dtype in registers, or None if they fit."""
    if dtype in (jnp.bfloat16, jnp.float16) and size % THREADS == 0 and size <= THREADS * MAX_VALUES_PER_THREAD:
        return None
    return (
        f"rows must be bfloat16 or float16, of a multiple of {THREADS} and up to {THREADS * MAX_VALUES_PER_THREAD} "
        f"values, got {size} in {dtype}"
    )


def row_layout(size: int) -> Any:
    """Return the layout of a row in a warpgroup's registers, with the widest possible loads."""
    vector = next(width for width in (8, 4, 2, 1) if size % (THREADS * width) == 0)
    return plgpu.Layout.WG_STRIDED((size,), vector)


def norm(row, load_gain: Callable[[], Any], *, eps: float):
    """Return the RMS norm of a row in registers, in its dtype, times the gain, which is loaded when it is needed."""
    wide = row.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / len(wide) + eps)
    gain = load_gain().astype(jnp.float32)
    return (wide * scale * gain).astype(row.dtype)
