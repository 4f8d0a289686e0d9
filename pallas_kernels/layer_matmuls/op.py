"""The public operation: from the heads of a layer's attention to what the next one's begins with."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
from jaxtyping import Array, Float

from pallas_kernels.layer_matmuls.sm90 import check_supported, layer_matmuls_sm90
from pallas_kernels.small_matmul import matmul, matmul_then_norm

Implementation = Literal["xla", "sm90"]


class Weights(NamedTuple):
    """Of the four matmuls, each [outputs, K] as checkpoints have it."""

    o: Float[Array, "E A"]
    """From the heads' outputs to the residual stream."""
    gate_up: Float[Array, "2 F E"]
    down: Float[Array, "E F"]
    qkv: Float[Array, "N E"] | None
    """Of the next layer; None behind the last one."""


def supports(heads: Float[Array | jax.ShapeDtypeStruct, "M A"], weights: Weights) -> bool:
    """Whether "sm90" takes them: arrays, or their shapes."""
    try:
        check_supported(heads, weights.o, weights.gate_up, weights.down, weights.qkv)
    except NotImplementedError:
        return False
    return True


def layer_matmuls(
    heads: Float[Array, "M A"],
    residual: Float[Array, "..."],
    weights: Weights,
    gains: tuple[Float[Array, "..."], Float[Array, "..."]],
    *,
    activation: Callable[[Array], Array],
    eps: float,
    implementation: Implementation = "xla",
) -> tuple[Float[Array, "M E"], Float[Array, "M N"]]:
    """Compute x1 = residual + heads @ o^T, x2 = x1 + gated linear unit of norm(x1), and norm(x2) @ qkv^T.

    The residual stream x2 comes first, then that product, or norm(x2) itself if there is no qkv. `gains` are those of
    the two RMS norms, `eps` is added to their mean squares. `activation` is the gate's; "sm90" calls it in the kernel,
    with float32, and jits it as a static argument: give the same function for each layer.

    "sm90" is one Mosaic kernel for Hopper GPUs, all of whose multiprocessors it takes, for its thread blocks wait for
    each other: of the calls of a program, each should depend on the one before, as layers do. "xla" runs anywhere.
    Raises ValueError for an unknown implementation or shapes that do not fit together, NotImplementedError for what
    "sm90" cannot do: no rows or more than 16, dtypes but bfloat16, K that is no multiple of 64, outputs that are none
    of 8, less than 64 or so many that a thread block has more than 16 tiles, GPUs with fewer than 132 multiprocessors.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {implementation!r}, there is {known}")
    _check_shapes(heads, residual, weights, gains)
    if implementation == "xla":
        x, normed = matmul_then_norm(heads, weights.o, residual=residual, gain=gains[0], eps=eps)
        inner = matmul(normed, weights.gate_up, activation=activation)
        x, normed = matmul_then_norm(inner, weights.down, residual=x, gain=gains[1], eps=eps)
        return x, normed.rows() if weights.qkv is None else matmul(normed, weights.qkv)
    return layer_matmuls_sm90(heads, residual, **weights._asdict(), gains=gains, activation=activation, eps=eps)


def _check_shapes(heads: Array, residual: Array, weights: Weights, gains: tuple[Array, Array]) -> None:
    (num_rows, depth), hidden = heads.shape, residual.shape[-1]
    inner = weights.down.shape[-1]
    wanted = {
        "residual": (residual, (num_rows, hidden)),
        "o": (weights.o, (hidden, depth)),
        "gate_up": (weights.gate_up, (2, inner, hidden)),
        "down": (weights.down, (hidden, inner)),
        "gains[0]": (gains[0], (hidden,)),
        "gains[1]": (gains[1], (hidden,)),
    }
    if weights.qkv is not None:
        wanted["qkv"] = weights.qkv, (weights.qkv.shape[0], hidden)
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
