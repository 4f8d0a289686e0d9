"""`add_rms_norm` for Hopper (sm_90a), in Mosaic GPU: a warpgroup a row, which stays in registers from sum to norm.

XLA makes two or three kernels of it, which read the sum again; a decode step has two of them a layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

THREADS = 128  # of a warpgroup
MAX_VALUES_PER_THREAD = 128  # float32, two of them at a time: more would not fit into 255 registers


def add_rms_norm_sm90(
    x: Float[Array, "T E"], update: Float[Array, "T E"], weight: Float[Array, " E"], *, eps: float
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """See `add_rms_norm`. Raises NotImplementedError with the reason of `why_not`, or for types that differ."""
    if (reason := why_not(x.shape[1], x.dtype)) is not None:
        raise NotImplementedError(reason)
    if update.dtype != x.dtype:
        raise NotImplementedError(f"rows of one dtype, got {x.dtype} and {update.dtype}")
    return _kernel(x, update, weight, eps=eps)


def why_not(size: int, dtype: jnp.dtype) -> str | None:
    """Return why the kernel does not support rows of `size` values of this dtype, or None if it does."""
    if dtype in (jnp.bfloat16, jnp.float16) and size % THREADS == 0 and size <= THREADS * MAX_VALUES_PER_THREAD:
        return None
    return (
        f"rows must be bfloat16 or float16, of a multiple of {THREADS} and up to {THREADS * MAX_VALUES_PER_THREAD} "
        f"values, got {size} in {dtype}"
    )


@functools.partial(jax.jit, static_argnames="eps")  # so that all layers of a step use one compiled kernel
def _kernel(x: Array, update: Array, weight: Array, *, eps: float) -> tuple[Array, Array]:
    num_rows, size = x.shape
    load = functools.partial(plgpu.load, layout=row_layout(size))

    def body(x, update, weight, total, normed):
        row = lax.axis_index("row")
        value = load(x.at[row]) + load(update.at[row])
        total[row] = value
        normed[row] = norm(value, functools.partial(load, weight), eps=eps)

    run = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
        grid=(num_rows,),
        grid_names=("row",),
        kernel_name="add_rms_norm",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(x, update, weight)


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
