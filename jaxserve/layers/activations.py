"""Activations of feed-forwards, by their names in checkpoints, and which of them kernels compute inside a matmul."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}

Gate = Callable[[Array, Array], Array]
"""(gate, up) -> the input of a gated block's second matmul"""

FUSED_ACTIVATIONS = {"silu", "swish", "gelu_new", "gelu_pytorch_tanh"}
"""Keys of ACTIVATIONS that Mosaic can compile into a matmul: not erf, nor functions with a custom derivative."""


def scaled(x: Array, factor: float) -> Array:
    """Return x times a number that may be more precise than x is, in the dtype of x."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


# Cached: what is compiled for one layer's function is used for the others.
@functools.cache
def gate_of(activation: str | Gate) -> Gate:
    """Return activation(gate) * up for a key of ACTIVATIONS; a function of both is returned unchanged."""
    if callable(activation):
        return activation
    function = ACTIVATIONS[activation]
    return lambda gate, up: function(gate) * up


def fuses(activation: str | Gate) -> bool:
    """Return true if kernels for GPUs can fuse the gate into a matmul. Functions of both are written so that they
    can.
    """
    return callable(activation) or activation in FUSED_ACTIVATIONS


def why_not_activation(activation: str | Gate) -> str:
    """Return why a matmul does not include an activation."""
    return f"no matmul has the activation {activation}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledGate:
    """The Gate activation(scale * gate) * up."""

    activation: str
    scale: float

    def __call__(self, gate: Array, up: Array) -> Array:
        """Return the input of the second matmul."""
        return ACTIVATIONS[self.activation](scaled(gate, self.scale)) * up


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU:
    """The Gate of GPT-OSS. Two with the same numbers are equal, so that what is compiled for one is used for the
    other.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Array, up: Array) -> Array:
        """(up + 1) * gate * sigmoid(alpha * gate); gate is at most `limit`, and up within it on both sides."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)
