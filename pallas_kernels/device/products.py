"""The four matmuls between two attentions, as the kernels that run them one after the other know them, dense or
quantized.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Norm(NamedTuple):
    """The addition to the residual stream and the norm that follow a matmul: names of arrays in global memory."""

    residual: str
    """Name of the array that the product is added to."""
    gain: str
    normed: str
    """The sum times the gain, which still lacks the division by its root mean square."""
    squares: str
    """Name of the partial sums of squares of each row."""


class Product(NamedTuple):
    """One of the matmuls before it is divided; `x` and `y` name arrays in global memory, as `name` does its weight."""

    name: str
    x: str
    y: str
    weight: Any
    norm: Norm | None = None
    squares: str | None = None
    """Name of the sums of squares of x, if x has not been divided by its norm yet."""


class Weights(NamedTuple):
    """The weights of the four matmuls, each [outputs, K] as in checkpoints: arrays, or quantized each in its format."""

    o: Any
    """[E, A], from the heads' outputs to the residual stream."""
    gate_up: Any
    """[2, F, E]"""
    down: Any
    """[E, F]"""
    qkv: Any
    """[N, E], of the next layer; None after the last one."""


def products_of_layer(weights: Weights) -> list[Product]:
    """Return the matmuls of "heads", from the array "stream" to "residual" and, with the next layer's qkv, "y"."""
    norm1 = Norm(residual="stream", gain="mlp_gain", normed="normed1", squares="squares1")
    norm2 = Norm(residual="x1", gain="next_gain", normed="normed", squares="squares")
    products = [
        Product("o", "heads", "x1", weights.o, norm=norm1),
        Product("gate_up", "normed1", "inner", weights.gate_up, squares="squares1"),
        Product("down", "inner", "residual", weights.down, norm=norm2),
        Product("qkv", "normed", "y", weights.qkv, squares="squares"),
    ]
    return products[: 3 if weights.qkv is None else 4]


def wait_until_free(free: Any, num_slots: int, first: Any, end: Any) -> None:
    """Wait for the slots of the ring's steps from `first` to `end` that were in use before. No barrier may be left
    pending.
    """

    def wait(step, _):
        @pl.when(step >= num_slots)
        def _():
            plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(num_slots))])

    lax.fori_loop(first, end, wait, None)
