"""The public operation: the matmuls of a layer's experts that are stored as codes, over tokens sorted by expert."""

from collections.abc import Callable
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_codes.sm90 import SIZES, grouped_codes_sm90, tile_rows
from pallas_kernels.grouped_codes.sm90 import why_not as why_not_format
from pallas_kernels.grouped_codes.sm90_wide import heuristic, why_slower, wide_sm90
from pallas_kernels.grouped_matmul import Plan, check_groups
from pallas_kernels.hopper import NUM_SMS, num_sms
from pallas_kernels.quantized_matmuls import QuantizedMatrix


def why_not(x: Any, weight: QuantizedMatrix) -> str | None:
    """Return why no kernel is to multiply such rows by such weights, or None if one is: arrays, or their shapes.

    Some could, but would be slower than XLA.
    """
    return _why_no_kernel(x, weight) or why_slower(x, weight)


def _why_no_kernel(x: Any, weight: QuantizedMatrix) -> str | None:
    if num_sms() < NUM_SMS:
        return f"a GPU of {NUM_SMS} multiprocessors: {num_sms()}"
    return why_not_format(x, weight)


def grouped_matmul_of_codes(
    x: Float[Array, "M K"],
    weight: QuantizedMatrix,
    group_sizes: Int[Array, " X"],
    *,
    bias: Float[Array, "..."] | None = None,
    activation: Callable[[Array, Array], Array] | None = None,
    tiles: Plan | None = None,
    output_dtype: DTypeLike | None = None,
) -> Float[Array, "M N"]:
    """Compute `grouped_matmul` with a weight of codes, [X, N, K], or [X, 2, N, K] with an `activation`; see there.

    They are Mosaic kernels for Hopper GPUs, one for few rows a group and one for many, that read the codes of groups
    with rows and convert them in registers; rows stay in bfloat16, sums are in float32, the result in x's dtype or
    another. A dense matrix is that of a single group. Scales are of 8, 16 or 32 bits or powers of two (e8m0), and of 16
    columns or more, also in two levels and with minimums. `tiles` is the result of `plan` for these sizes and tiles of
    `tile_rows(M, X)`. Raises ValueError for shapes that do not fit together, NotImplementedError with a reason
    for what the kernels cannot do.
    """
    check_groups(x, weight.shape, group_sizes, bias, is_gated=activation is not None)
    if reason := _why_no_kernel(x, weight):
        raise NotImplementedError(f"the grouped matmul of codes takes {reason}")
    options = {"bias": bias, "activation": activation, "tiles": tiles, "output_dtype": output_dtype}
    if (rows := tile_rows(len(x), len(group_sizes))) > SIZES[-1]:
        config = heuristic(len(x), weight, rows=rows)
        return wide_sm90(x, weight, group_sizes, config=config, **options)
    return grouped_codes_sm90(x, weight, group_sizes, **options)
