"""The public operations: what stands between two matmuls of 8 bits, up to the codes of the second one's rows."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.device.codes import Code
from pallas_kernels.device.rows import why_not_row
from pallas_kernels.implementation import Implementation, is_sm90
from pallas_kernels.row_quantization import sm90
from pallas_kernels.row_quantization.rounding import QuantizedRows, UnscaledProduct, codes_of, scale_of

FEWEST_ROWS_ALONE = 1024
"""With fewer rows that are rounded alone, XLA's two kernels take less time than ours: see NOTES.md."""


def best_implementation(size: int, dtype: Any, *, num_rows_alone: int | None = None) -> Implementation:
    """Return the implementation for a Hopper GPU and rows of `size` values, rounded behind a norm or, if their number
    is given, alone.
    """
    if num_rows_alone is not None and num_rows_alone < FEWEST_ROWS_ALONE:
        return "xla"
    return "sm90" if why_not_row(size, dtype) is None else "xla"


def quantize_rows(x: Float[Array, "M K"], code: Code, *, implementation: Implementation = "xla") -> QuantizedRows:
    """Return the codes that values are rounded to, each row by its largest magnitude.

    "sm90" is a Mosaic kernel for Hopper GPUs. Raises ValueError for an unknown implementation, NotImplementedError for
    rows that "sm90" does not take, with the reason.
    """
    if is_sm90(implementation):
        _check(why_not_row(x.shape[1], x.dtype))
        codes, scales = sm90.quantize_rows(x, code=code)
    else:
        values = x.astype(jnp.float32)
        scales = scale_of(jnp.max(jnp.abs(values), axis=1), code)
        codes = codes_of(values, scales[:, None], code)
    return QuantizedRows(codes=codes, scales=scales, dtype=jnp.dtype(x.dtype))


def add_rms_norm_and_quantize(
    x: Float[Array, "T E"],
    update: Float[Array, "T E"] | UnscaledProduct,
    weight: Float[Array, " E"],
    code: Code,
    *,
    eps: float,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "T E"], QuantizedRows]:
    """Return what `add_rms_norm` does, the norm as the codes that it is rounded to; errors are those of both."""
    if not is_sm90(implementation):
        update = update.values() if isinstance(update, UnscaledProduct) else update
        total, normed = add_rms_norm(x, update, weight, eps=eps)
        return total, quantize_rows(normed, code)
    _check(why_not_row(x.shape[1], x.dtype))
    types = [update.dtype, *([update.sums.dtype] if isinstance(update, UnscaledProduct) else [])]
    if any(dtype != x.dtype for dtype in types):
        raise NotImplementedError(f"rows of one dtype, got {x.dtype} and {', '.join(map(str, types))}")
    total, codes, scales = sm90.add_rms_norm_and_quantize(x, update, weight, code=code, eps=eps)
    return total, QuantizedRows(codes=codes, scales=scales, dtype=jnp.dtype(x.dtype))


def gate_and_quantize(
    product: UnscaledProduct,
    code: Code,
    *,
    activation: Callable[[Array], Array],
    implementation: Implementation = "xla",
) -> QuantizedRows:
    """Return the codes of activation(gate) * up, whose product of rows and weight is [M, 2 * F]: gate, then up.

    The activation gets float32 and is a static argument of a jitted function. "sm90" is a Mosaic kernel for Hopper
    GPUs. Raises ValueError for an unknown implementation, NotImplementedError for what "sm90" does not take, with the
    reason.
    """
    if is_sm90(implementation):
        _check(why_not_gated(product))
        codes, scales = sm90.gate_and_quantize(product, code=code, activation=activation)
        return QuantizedRows(codes=codes, scales=scales, dtype=product.dtype)
    gate, up = jnp.split(product.in_float32(), 2, axis=1)
    return quantize_rows((activation(gate) * up).astype(product.dtype), code)


def why_not_gated(product: UnscaledProduct) -> str | None:
    """Return why the kernel does not take such a product of gate and up, or None: of arrays, or their shapes."""
    size, dtype = product.sums.shape[1] // 2, product.sums.dtype
    if dtype in (jnp.bfloat16, jnp.float16) and dtype == product.dtype and sm90.num_warpgroups(size) is not None:
        return None
    return (
        f"sums in bfloat16 or float16, in rows of a multiple of {sm90.COLUMNS} values, at most {sm90.MAX_GATED}, got "
        f"{size} in {dtype}"
    )


def _check(reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(reason)
