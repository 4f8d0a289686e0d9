"""Benchmark of the four matmuls of a layer of Llama 3 8B with quantized weights, in one kernel and in XLA's."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.device.codes import Code, codes_per_byte
from pallas_kernels.quantized_matmuls.matrix import QuantizedMatrix
from pallas_kernels.quantized_matmuls.op import Implementation, QuantizedWeights, quantized_layer_matmuls
from pallas_kernels.timing import Row, floor, measure, on_gpu

_EPS = 1e-5
_LAYERS = 6
"""With weights of their own, more than the L2 holds."""
_CALLS = 24
"""Calls per program, since launching a program takes as long as a kernel."""
_FORMATS: dict[str, tuple[Code, int | None]] = {
    "int4, groups of 128": ("int4", 128),
    "e2m1, groups of 32": ("e2m1", 32),
    "NVFP4": ("e2m1", 16),
    "NF4": ("nf4", 64),
    "Q4_K": ("uint4", 32),
    "Q6_K": ("int8", 16),
    "fp8": ("fp8", None),
    "fp8, groups of 128": ("fp8", 128),
    "int8": ("int8", None),
}


def quantized_matmuls_rows() -> Iterator[Row]:
    """Yield a row for each format, number of rows and implementation; without a GPU, of a small layer in XLA."""
    implementations: tuple[Implementation, ...] = ("sm90",) if on_gpu() else ("xla",)
    sizes = (4096, 14336, 6144) if on_gpu() else (256, 1024, 384)
    hidden, inner, _ = sizes
    for name, (code, group) in _FORMATS.items():
        layers = [_weights(sizes, code, group, seed) for seed in range(_LAYERS)]
        gain = jnp.ones(hidden, _dtype())
        num_bytes = sum(array.nbytes for array in jax.tree.leaves(layers[0]))
        for num_rows, implementation in itertools.product((1, 8, 16, 32, 64) if on_gpu() else (1,), implementations):
            start = tuple(jax.random.normal(jax.random.key(seed), (num_rows, hidden), _dtype()) for seed in range(2))
            inputs = [(layers[call % _LAYERS], gain) for call in range(_CALLS)]
            took = measure(functools.partial(_run, implementation=implementation), inputs, carry=start)
            yield Row(f"{num_rows} rows, {hidden} x {inner}, {name}", implementation, took, floor(num_bytes=num_bytes))


def _run(
    carry: tuple[jax.Array, jax.Array], weights: QuantizedWeights, gain: jax.Array, *, implementation: Implementation
) -> tuple[jax.Array, jax.Array]:
    """Run a layer after the other: what would be its queries are the next one's heads, by a copy of them."""
    heads, x = carry
    x, y = quantized_layer_matmuls(
        heads, x, weights, (gain, gain), activation=jax.nn.silu, eps=_EPS, implementation=implementation
    )
    return y[:, : heads.shape[1]], x


def _weights(sizes: tuple[int, int, int], code: Code, group: int | None, seed: int) -> QuantizedWeights:
    hidden, inner, outputs = sizes
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    return QuantizedWeights(
        o=_matrix(next(keys), (hidden,), hidden, code, group),
        gate_up=_matrix(next(keys), (2, inner), hidden, code, group),
        down=_matrix(next(keys), (hidden,), inner, code, group),
        qkv=_matrix(next(keys), (outputs,), hidden, code, group),
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _matrix(key: jax.Array, outputs: tuple[int, ...], depth: int, code: Code, group: int | None) -> QuantizedMatrix:
    """Random codes, and scales that make a product about as large as its rows; with factors those of GGUF and NVFP4."""
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


def _dtype() -> jnp.dtype:
    return jnp.dtype(jnp.bfloat16 if on_gpu() else jnp.float32)
