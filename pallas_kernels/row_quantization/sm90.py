"""Rounding of rows to 8 bits on Hopper (sm_90a), in Mosaic GPU: a row stays in registers from its values to its codes.

XLA needs two kernels and reads the values twice, since codes depend on the largest value of the whole row.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Shaped

from pallas_kernels.device.codes import Code
from pallas_kernels.device.rows import kept, norm, row_layout
from pallas_kernels.hopper import BY_LANES, NUM_SMS
from pallas_kernels.row_quantization import gated
from pallas_kernels.row_quantization.gated import COLUMNS, MAX_GATED, num_warpgroups
from pallas_kernels.row_quantization.rounding import CODES, UnscaledProduct, codes_of, scale_of

__all__ = ["COLUMNS", "MAX_GATED", "add_rms_norm_and_quantize", "gate_and_quantize", "num_warpgroups", "quantize_rows"]


# Here and below, so that all layers of a step use one compiled kernel.
@functools.partial(jax.jit, static_argnames=("code", "interpret"))
def quantize_rows(
    x: Float[Array, "M K"], *, code: Code, interpret: bool = False
) -> tuple[Shaped[Array, "M K"], Float[Array, " M"]]:
    """Return codes and scales, see `op.quantize_rows`: a warpgroup a row.

    `interpret`, here and below, swaps in what the interpreter of `plgpu.force_gpu_interpret_mode` lacks.
    """
    load = functools.partial(plgpu.load, layout=row_layout(x.shape[1]))

    def body(x, codes, scales):
        row = lax.axis_index("row")
        _store(load(x.at[row]), codes, scales, row, code, interpret)

    return _a_row_each("quantize_rows", body, x.shape, _results(x.shape, code))(x)


@functools.partial(jax.jit, static_argnames=("code", "eps", "interpret"))
def add_rms_norm_and_quantize(
    x: Float[Array, "T E"],
    update: Float[Array, "T E"] | UnscaledProduct,
    weight: Float[Array, " E"],
    *,
    code: Code,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "T E"], Shaped[Array, "T E"], Float[Array, " T"]]:
    """Return the sum, codes and scales, see `op.add_rms_norm_and_quantize`: a warpgroup a row."""
    load = functools.partial(plgpu.load, layout=row_layout(x.shape[1]))

    def added(row, update, *factors):
        values = load(update.at[row])
        if not factors:
            return values
        row_scales, output_scales = factors
        return (values.astype(jnp.float32) * row_scales[row] * load(output_scales)).astype(values.dtype)

    def body(x, weight, *refs):
        (*update, total, codes, scales), row = refs, lax.axis_index("row")
        value = load(x.at[row]) + added(row, *update)
        total[row] = value
        _store(norm(value, functools.partial(load, weight), eps=eps), codes, scales, row, code, interpret)

    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), *_results(x.shape, code))
    return _a_row_each("add_rms_norm_and_quantize", body, x.shape, results)(x, weight, *jax.tree.leaves(update))


def _store(values, codes, scales, row, code: Code, interpret: bool) -> None:
    values = kept(values, interpret=interpret)  # they are widened twice
    scale = scale_of(jnp.max(jnp.abs(values.astype(jnp.float32))), code)
    values = kept(values, interpret=interpret)
    codes[row] = codes_of(values.astype(jnp.float32), scale, code)
    scales[row] = scale


def _results(shape: tuple[int, ...], code: Code) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct(shape, CODES[code]), jax.ShapeDtypeStruct(shape[:1], jnp.float32)


def _a_row_each(name: str, body: Callable[..., None], shape: tuple[int, ...], results: Any) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        kernel_name=name,
        out_type=results,
        grid=shape[:1],
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


@functools.partial(jax.jit, static_argnames=("code", "activation", "num_blocks", "interpret"))
def gate_and_quantize(
    product: UnscaledProduct,
    *,
    code: Code,
    activation: Callable[[Array], Array],
    num_blocks: int = NUM_SMS,
    interpret: bool = False,
) -> tuple[Shaped[Array, "M F"], Float[Array, " M"]]:
    """Return codes and scales, see `op.gate_and_quantize`: thread blocks take one row after the other."""
    num_rows, size = len(product.sums), product.sums.shape[1] // 2
    warpgroups = num_warpgroups(size)
    assert warpgroups is not None
    has_turns = num_rows > 2 * num_blocks  # fewer are a block each: scales are not worth a copy
    problem = gated.Problem(
        num_rows=num_rows,
        size=size,
        warpgroups=warpgroups,
        num_blocks=num_blocks if has_turns else num_rows,
        holds_scales=has_turns,
        code=code,
        activation=activation,
        dtype=product.dtype,
        interpret=interpret,
    )
    return plgpu.kernel(
        functools.partial(gated.kernel, problem),
        kernel_name="gate_and_quantize",
        out_type=_results((num_rows, size), code),
        scratch_types=(
            plgpu.SMEM((2, size if problem.holds_scales else COLUMNS), jnp.float32),
            plgpu.SMEM((2, 4 * warpgroups), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ),
        grid=(problem.num_blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=BY_LANES,
    )(product.sums.reshape(num_rows, 2, size), product.row_scales, product.output_scales.reshape(2, size))
