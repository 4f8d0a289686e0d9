"""`add_rms_norm` for Hopper (sm_90a), in Mosaic GPU: a warpgroup a row, which stays in registers from sum to norm.

XLA makes two or three kernels of it, which read the sum again; a decode step has two of them a layer.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import l2_prefetch

THREADS = 128  # of a warpgroup
MAX_VALUES_PER_THREAD = 128  # float32, two of them at a time: more would not fit into 255 registers
PREFETCH_BYTES = 12_000_000
"""Of the next weight: what the memory brings in the 3 us from this kernel's start to the next one's, at 4.3 TB/s."""


def add_rms_norm_sm90(
    x: Float[Array, "T E"],
    update: Float[Array, "T E"],
    weight: Float[Array, " E"],
    *,
    eps: float,
    prefetch: Float[Array, "..."] | None = None,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
    """See `add_rms_norm`. Raises NotImplementedError for what `supports` does not."""
    if not supports(x.shape[1], x.dtype) or update.dtype != x.dtype:
        raise NotImplementedError(
            f"rows must be bfloat16 or float16, of a multiple of {THREADS} and up to "
            f"{THREADS * MAX_VALUES_PER_THREAD} values, got {x.shape[1]} in {x.dtype} and {update.dtype}"
        )
    num_bytes = PREFETCH_BYTES if x.shape[0] <= l2_prefetch.MAX_TOKENS else 0
    weights = l2_prefetch.operand(prefetch, num_bytes)
    return _kernel(x, update, weight, weights, eps=eps, prefetch_bytes=num_bytes if weights else 0)


def supports(size: int, dtype: jnp.dtype) -> bool:
    """Whether the kernel takes rows of `size` values of this dtype."""
    return dtype in (jnp.bfloat16, jnp.float16) and size % THREADS == 0 and size <= THREADS * MAX_VALUES_PER_THREAD


@functools.partial(
    jax.jit, static_argnames=("eps", "prefetch_bytes")
)  # so that all layers of a step share one compiled kernel
def _kernel(
    x: Array, update: Array, weight: Array, weights: list[Array], *, eps: float, prefetch_bytes: int
) -> tuple[Array, Array]:
    num_rows, size = x.shape
    vector = next(width for width in (8, 4, 2, 1) if size % (THREADS * width) == 0)  # values a load
    layout = plgpu.Layout.WG_STRIDED((size,), vector)

    num_prefetching = l2_prefetch.num_blocks(num_rows) if weights else 0

    def norm_row(row, x, update, weight, total, normed):
        value = plgpu.load(x.at[row], layout=layout) + plgpu.load(update.at[row], layout=layout)
        total[row] = value
        wide = value.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(wide * wide) / size + eps)
        gain = plgpu.load(weight, layout=layout).astype(jnp.float32)
        normed[row] = (wide * scale * gain).astype(normed.dtype)

    def body(x, update, weight, *refs):
        block = lax.axis_index("block")
        *next_weight, total, normed = refs
        norm = functools.partial(norm_row, block, x, update, weight, total, normed)
        if not next_weight:
            norm()
            return
        pl.when(block < num_rows)(norm)

        @pl.when(block >= num_rows)
        def _():
            l2_prefetch.prefetch_share(next_weight[0], block - num_rows, num_prefetching, 0, prefetch_bytes)

    run = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
        grid=(num_rows + num_prefetching,),
        grid_names=("block",),
        kernel_name="add_rms_norm",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(x, update, weight, *weights)
