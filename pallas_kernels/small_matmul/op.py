"""The public operations: the matmuls of the layers in a decode step, fused with neighbouring operations.

A norm between two matmuls need not be a separate operation: the first one writes its rows times the gain and sums of
their squares, the second one divides its sums by the root mean square. `Normed` is passed between them.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.small_matmul.sm90 import Epilogue, heuristic, matmul_sm90, why_not


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normed:
    """Rows after an RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), which may still lack their common factor."""

    values: Float[Array, "M K"]
    """Rows times the gain; also divided by the root mean square if there are no `squares`."""
    squares: Float[Array, "64 P"] | None
    """Sums of the squares of parts of each of the rows before the gain; those past M mean nothing."""
    eps: float = dataclasses.field(metadata={"static": True})
    """Added to the mean square."""

    def rows(self) -> Float[Array, "M K"]:
        """Return the rows with all factors applied."""
        if self.squares is None:
            return self.values
        num_rows, size = self.values.shape
        scale = jax.lax.rsqrt(jnp.sum(self.squares[:num_rows], axis=1, keepdims=True) / size + self.eps)
        return (self.values.astype(jnp.float32) * scale).astype(self.values.dtype)


def matmul(
    x: Float[Array, "M K"] | Normed,
    weight: Float[Array, "..."],
    *,
    activation: Callable[[Array], Array] | None = None,
    output_dtype: DTypeLike | None = None,
    implementation: Implementation = "xla",
) -> Float[Array, "M N"]:
    """Compute x @ weight^T for a decode step's few rows: sums in float32, the result in x's dtype or `output_dtype`.

    The weight is [N, K], as in checkpoints. With an `activation` it is [2, N, K], gate and up, and the result
    activation(gate) * up.

    "sm90" is a Mosaic kernel for Hopper GPUs that reads the weight at the speed of HBM; "xla" runs anywhere. Raises
    ValueError for an unknown implementation or shapes that do not match, NotImplementedError for what "sm90" does not
    support: more than 64 rows, dtypes other than bfloat16 and float16, K that is not a multiple of 64, N that is not a
    multiple of 8 or is less than 64.
    """
    return _run(x, weight, activation=activation, output_dtype=output_dtype, implementation=implementation)[0]


def matmul_then_norm(
    x: Float[Array, "M K"] | Normed,
    weight: Float[Array, "..."],
    *,
    residual: Float[Array, "..."],
    gain: Float[Array, "..."],
    eps: float,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "M N"], Normed]:
    """Compute y = residual + x @ weight^T, and y after the RMS norm that follows. See `matmul`.

    In float16 the norm of "sm90" may overflow although y does not: its values are multiplied by the gain, but not yet
    divided by the root mean square.
    """
    y, normed = _run(x, weight, residual=residual, gain=gain, eps=eps, implementation=implementation)
    assert normed is not None
    return y, normed


def _run(
    x: Float[Array, "M K"] | Normed,
    weight: Float[Array, "..."],
    *,
    activation: Callable[[Array], Array] | None = None,
    residual: Float[Array, "..."] | None = None,
    gain: Float[Array, "..."] | None = None,
    eps: float = 0.0,
    output_dtype: DTypeLike | None = None,
    implementation: str,
) -> tuple[Float[Array, "M N"], Normed | None]:
    check_implementation(implementation)
    rows = x if isinstance(x, Normed) else Normed(x, None, 0.0)
    _check_shapes(rows.values, weight, residual=residual, gain=gain, is_gated=activation is not None)
    if implementation == "xla":
        y = _by_xla(rows, weight, activation=activation, residual=residual, output_dtype=output_dtype)
        return y, None if gain is None else Normed(_rms_norm(y, gain, eps), None, eps)
    if (reason := why_not(rows.values, weight)) is not None:
        raise NotImplementedError(reason)
    config = heuristic(
        rows.values.shape[0],
        weight.shape[-2],
        is_gated=activation is not None,
        output_bytes=jnp.dtype(output_dtype or rows.values.dtype).itemsize,
        num_results=1 + (gain is not None) + (residual is not None),
    )
    y, values, squares_of_y = matmul_sm90(
        rows.values,
        weight,
        squares=rows.squares,
        residual=residual,
        gain=gain,
        config=config,
        epilogue=Epilogue(activation=activation, eps=rows.eps, output_dtype=output_dtype),
    )
    return y, None if gain is None else Normed(values, squares_of_y, eps)


def _by_xla(
    rows: Normed,
    weight: Float[Array, "*outputs K"],
    *,
    activation: Callable[[Array], Array] | None,
    residual: Float[Array, "M N"] | None,
    output_dtype: DTypeLike | None,
) -> Float[Array, "M N"]:
    """Multiply in plain JAX, which wins on a GPU from some 100 rows on; float32 operands in full float32."""
    x, squares = rows.values, rows.squares
    output_dtype = output_dtype or x.dtype
    outputs = weight.shape[:-1]
    y = jax.lax.dot_general(
        x,
        weight.reshape(-1, weight.shape[-1]),
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=output_dtype if squares is None else jnp.float32,
    )
    if squares is not None:
        mean_square = jnp.sum(squares[: x.shape[0]], axis=1, keepdims=True) / x.shape[1]
        y = (y * jax.lax.rsqrt(mean_square + rows.eps)).astype(output_dtype)
    if activation is not None:
        gate, up = jnp.split(y, outputs[0], axis=1)
        y = activation(gate) * up
    return y if residual is None else residual.astype(y.dtype) + y


def _rms_norm(x: Float[Array, "M N"], gain: Float[Array, " N"], eps: float) -> Float[Array, "M N"]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
    return (wide * scale * gain[None].astype(jnp.float32)).astype(x.dtype)


def _check_shapes(
    x: Float[Array, "M K"],
    weight: Float[Array, "..."],
    *,
    residual: Float[Array, "..."] | None,
    gain: Float[Array, "..."] | None,
    is_gated: bool,
) -> None:
    outputs = weight.shape[:-1]
    if len(outputs) != 1 + is_gated or (is_gated and outputs[0] != 2):
        wanted = "[2, N, K], gate and up" if is_gated else "[N, K]"
        raise ValueError(f"weight must be {wanted}, got shape {weight.shape}")
    if x.ndim != 2 or x.shape[1] != weight.shape[-1]:
        raise ValueError(f"x of shape {x.shape} does not fit a weight of shape {weight.shape}")
    for name, value, shape in (
        ("residual", residual, (x.shape[0], outputs[-1])),
        ("gain", gain, outputs[-1:]),
    ):
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {value.shape}")
