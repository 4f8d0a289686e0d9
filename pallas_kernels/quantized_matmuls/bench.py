"""Benchmark of the four matmuls of a layer of Llama 3 8B with quantized weights, in one kernel and in XLA's."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.device.codes import Code, codes_per_byte
from pallas_kernels.layer_matmuls.bench import LAYERS, OF_LAYER, compare_layers
from pallas_kernels.quantized_matmuls.matrix import QuantizedMatrix
from pallas_kernels.quantized_matmuls.op import QuantizedWeights, quantized_layer_matmuls
from pallas_kernels.timing import Row, on_gpu

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
    """Yield a row for each format and number of rows; without a GPU, of a small layer in XLA."""
    sizes = (4096, 14336, 6144) if on_gpu() else (256, 1024, 384)
    name = "sm90" if on_gpu() else "xla"
    calls = {name: functools.partial(quantized_layer_matmuls, **OF_LAYER, implementation=name)}
    for format_, (code, group) in _FORMATS.items():
        layers = [random_weights(sizes, code, group, seed) for seed in range(LAYERS)]
        for num_rows in (1, 8, 16, 32, 64) if on_gpu() else (1,):
            case = f"{num_rows} rows, {sizes[0]} x {sizes[1]}, {format_}"
            yield from compare_layers(case, num_rows, sizes[0], layers, calls)


def random_weights(sizes: tuple[int, int, int], code: Code, group: int | None, seed: int) -> QuantizedWeights:
    """Return a layer's weights for sizes of the residual stream, of the MLP's inner rows and of the next qkv."""
    hidden, inner, outputs = sizes
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    return QuantizedWeights(
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
