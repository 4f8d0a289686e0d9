"""Random inputs that several operations are timed with."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.device.codes import Code, codes_per_byte
from pallas_kernels.layer_matmuls import Weights
from pallas_kernels.quantized_matmuls import QuantizedMatrix
from pallas_kernels.recurrent_step import Tokens

RECURRENCES = {"delta rule": (16, 2, 128, 128), "Mamba-2": (8, 16, 128, 64)}
"""Heads of keys, heads of values for each, and the sizes of both, by rule."""


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return the product of SwiGLU."""
    return jax.nn.silu(gate) * up


def random_tokens(
    num_tokens: int, num_slots: int, shape: tuple[int, int, int, int], seed: int
) -> tuple[Tokens, jax.Array]:
    """Return tokens and states of a recurrence of one of the RECURRENCES."""
    H, G, K, V = shape
    sizes = (H, K), (H, K), (H, G, V), (H, G), (H, G)
    keys = jax.random.split(jax.random.key(seed), 6)
    q, k, v, decay, beta = (jax.random.normal(key, (num_tokens, *size)) for key, size in zip(keys, sizes, strict=False))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    tokens = Tokens(q, k, v, -jnp.abs(decay), jax.nn.sigmoid(beta))
    return tokens, jax.random.normal(keys[5], (num_slots, *shape))


def random_weights(sizes: tuple[int, int, int], code: Code, group: int | None, seed: int) -> Weights:
    """Return a layer's weights for sizes of the residual stream, of the MLP's inner rows and of the next qkv."""
    hidden, inner, outputs = sizes
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    return Weights(
        o=random_matrix(next(keys), (hidden,), hidden, code, group),
        gate_up=random_matrix(next(keys), (2, inner), hidden, code, group),
        down=random_matrix(next(keys), (hidden,), inner, code, group),
        qkv=random_matrix(next(keys), (outputs,), hidden, code, group),
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def random_matrix(
    key: jax.Array, outputs: tuple[int, ...], depth: int, code: Code, group: int | None
) -> QuantizedMatrix:
    """Return random codes, and scales for a product about as large as its rows; with factors those of GGUF, NVFP4."""
    shape = (*outputs, 1 if group is None else depth // group)
    typical = depth**-0.5 * (1 / 4 if codes_per_byte(code) == 2 else 1 / 32 if code == "int8" else 1)
    if codes_per_byte(code) == 2:
        codes = jax.random.bits(key, (*outputs, depth // 2), jnp.uint8)
    else:
        values = jax.random.normal(key, (*outputs, depth), jnp.float32)
        codes = jnp.round(values * 32).astype(jnp.int8) if code == "int8" else values.astype(jnp.float8_e4m3fn)
    if (code, group) == ("e2m1", 16):
        factors = jnp.full((*outputs, 1), typical, jnp.float32)
        return QuantizedMatrix(codes=codes, scales=jnp.ones(shape, jnp.float8_e4m3fn), factors=factors, code=code)
    if (code, group) in (("uint4", 32), ("int8", 16)):
        scales, factors = jnp.full(shape, 32, jnp.int8), jnp.full((*outputs, depth // 256), typical / 32, jnp.float16)
        of_minimums = {"minimums": scales, "minimum_factors": 8 * factors} if code == "uint4" else {}
        return QuantizedMatrix(codes=codes, scales=scales, factors=factors, **of_minimums, code=code)
    kind = jnp.bfloat16 if codes_per_byte(code) == 2 else jnp.float32
    return QuantizedMatrix(codes=codes, scales=jnp.full(shape, typical, kind), code=code)
