"""`add_rms_norm` for Hopper (sm_90a), in Mosaic GPU: a warpgroup a row, which stays in registers from sum to norm.

XLA makes two or three kernels of it, which read the sum again; a decode step has two of them a layer.
"""

import functools

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.device.rows import norm, row_layout, why_not_row


def add_rms_norm_sm90(
    x: Float[Array, "T E"], update: Float[Array, "T E"], weight: Float[Array, " E"], *, eps: float
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """See `add_rms_norm`. Raises NotImplementedError with the reason of `why_not_row`, or for types that differ."""
    if (reason := why_not_row(x.shape[1], x.dtype)) is not None:
        raise NotImplementedError(reason)
    if update.dtype != x.dtype:
        raise NotImplementedError(f"rows of one dtype, got {x.dtype} and {update.dtype}")
    return _kernel(x, update, weight, eps=eps)


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
