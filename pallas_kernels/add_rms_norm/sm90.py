"""`add_rms_norm` for Hopper (sm_90a), in Mosaic GPU: a warpgroup a row, which stays in registers from update to norm.

XLA makes two or three kernels of it, which read the sum again; a decode step has two of them a layer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.rows import THREADS, RowParts, why_not_row_in_parts

MAX_HELD_GAINS = 48 * THREADS
"""Most values of a row whose gains are loaded before its update is normalised: a load behind the sum of squares would
start when that is there. They take up to 96 registers of a thread.
"""


def add_rms_norm_sm90(
    x: Float[Array, "T E"],
    update: Float[Array, "T E"],
    weight: Float[Array, " E"] | None,
    update_gain: Float[Array, " E"] | None,
    *,
    eps: float,
    update_scale: float,
) -> Sequence[Float[Array, "T E"]]:
    """Return the sum and, with a weight, its norm: see `add_rms_norm`. Raises NotImplementedError, with the reason, for
    rows that the kernel does not take.
    """
    if (reason := why_not_row_in_parts(x.shape[1], x.dtype)) is not None:
        raise NotImplementedError(reason)
    if update.dtype != x.dtype:
        raise NotImplementedError(f"rows of one dtype, got {x.dtype} and {update.dtype}")
    return _kernel(x, update, weight, update_gain, eps=eps, update_scale=update_scale)


@functools.partial(jax.jit, static_argnames=("eps", "update_scale"))  # so that a step's layers use one compiled kernel
def _kernel(
    x: Array, update: Array, weight: Array | None, update_gain: Array | None, *, eps: float, update_scale: float
) -> Sequence[Array]:
    num_rows, size = x.shape
    parts = RowParts(size)
    holds_gains = update_gain is not None and size <= MAX_HELD_GAINS

    def loader(gain) -> Callable[[], Any]:
        if not holds_gains:
            return functools.partial(parts.load, gain)
        loaded = parts.load(gain)
        return lambda: loaded

    def body(x, update, *refs):
        *gains, total, normed = refs if weight is not None else (*refs, None)
        row = lax.axis_index("row")
        residual, values = parts.load(x.at[row]), parts.load(update.at[row])
        loaders = [loader(gain) for gain in gains]
        if update_gain is not None:
            values = parts.norm(values, loaders[0], eps=eps)
        if update_scale != 1.0:  # a product in float32 cannot be fused with the addition, and is rounded on its own
            values = [(value.astype(jnp.float32) * update_scale).astype(value.dtype) for value in values]
        values = [old + value for old, value in zip(residual, values, strict=True)]
        parts.store(total.at[row], values)
        if normed is not None:
            parts.store(normed.at[row], parts.norm(values, loaders[-1], eps=eps))

    run = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * (1 if weight is None else 2),
        grid=(num_rows,),
        grid_names=("row",),
        kernel_name="add_rms_norm",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(x, update, *(gain for gain in (update_gain, weight) if gain is not None))
