"""Benchmark of the grouped matmul of codes: gate and up, and down, of experts and of a dense layer, beside bfloat16."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device.codes import codes_per_byte
from pallas_kernels.grouped_codes.op import grouped_matmul_of_codes
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.inputs import swiglu
from pallas_kernels.quantized_matmuls import Code, QuantizedMatrix
from pallas_kernels.timing import Row, floor, measure, num_rotations, on_gpu


class _Experts(NamedTuple):
    """The weight of a layer's experts, or of a dense layer as one, and how many of them a token has."""

    name: str
    num_groups: int
    per_token: int
    outputs: int
    depth: int
    is_gated: bool

    @property
    def shape(self) -> tuple[int, ...]:
        halves = (2,) if self.is_gated else ()
        return (self.num_groups, *halves, self.outputs, self.depth)


_QWEN = (
    _Experts("Qwen3-30B-A3B, gate and up", 128, 8, 768, 2048, True),
    _Experts("Qwen3-30B-A3B, down", 128, 8, 2048, 768, False),
)
_GPT_OSS = (
    _Experts("gpt-oss-20b, gate and up", 32, 4, 2880, 2880, True),
    _Experts("gpt-oss-20b, down", 32, 4, 2880, 2880, False),
)
_LLAMA = (
    _Experts("Llama 3 8B, gate and up", 1, 1, 14_336, 4096, True),
    _Experts("Llama 3 8B, down", 1, 1, 4096, 14_336, False),
)
_CASES: tuple[tuple[tuple[_Experts, ...], Code, int | None], ...] = (
    (_GPT_OSS, "e2m1", 32),
    (_QWEN, "fp8", 128),
    (_QWEN, "int4", 128),
    (_QWEN, "int8", None),
    (_LLAMA, "int4", 128),
    (_LLAMA, "int8", None),
)
_IN_LEVELS: dict[str, tuple[Code, int, jnp.dtype, bool]] = {
    "NVFP4": ("e2m1", 16, jnp.dtype(jnp.float8_e4m3fn), False),
    "Q2_K": ("uint4", 16, jnp.dtype(jnp.int8), True),
    "Q3_K": ("int4", 16, jnp.dtype(jnp.int8), False),
    "Q4_K": ("uint4", 32, jnp.dtype(jnp.int8), True),
    "Q5_K": ("int8", 32, jnp.dtype(jnp.int8), True),
    "Q6_K": ("int8", 16, jnp.dtype(jnp.int8), False),
}
"""Formats with scales in two levels: codes, columns of a scale, its type, and whether there are minimums."""
_OF_EXPERTS = ("NVFP4", "Q4_K", "Q6_K")
_TOKENS = (1, 16, 64, 256, 8192)
_DENSE_TOKENS = (96, 128, 256, 512, 2048, 8192)
_TOKENS_IN_LEVELS = (128, 512)


def grouped_codes_rows() -> Iterator[Row]:
    """Yield a row for each weight, format and number of tokens, and one of bfloat16; nothing without a GPU."""
    if not on_gpu():
        return
    for weights, code, group in _CASES:
        for experts in weights:
            codes = _codes(experts, code, group)
            dense = jax.random.normal(jax.random.key(0), experts.shape, jnp.bfloat16)
            for num_tokens in _TOKENS if experts.num_groups > 1 else _DENSE_TOKENS:
                name = f"{num_tokens} of {experts.name}"
                yield _row(f"{name}, {code}", experts, codes, num_tokens)
                yield _row(f"{name}, bfloat16", experts, dense, num_tokens)
    for name, format_ in _IN_LEVELS.items():
        for matrix in _LLAMA:
            codes = _codes_in_levels(matrix, *format_)
            for num_tokens in _TOKENS_IN_LEVELS:
                yield _row(f"{num_tokens} of {matrix.name}, {name}", matrix, codes, num_tokens)
                yield _row(f"{num_tokens} of {matrix.name}, {name}", matrix, codes, num_tokens, by_xla=True)
        for experts in _QWEN if name in _OF_EXPERTS else ():
            codes = _codes_in_levels(experts, *format_)
            for num_tokens in _TOKENS:
                yield _row(f"{num_tokens} of {experts.name}, {name}", experts, codes, num_tokens)


def _multiply_floats(x: jax.Array, weight: QuantizedMatrix, _sizes: jax.Array) -> jax.Array:
    """Multiply by a dense matrix of which XLA makes floats first."""
    y = x @ weight.dequantize().astype(x.dtype).reshape(-1, x.shape[1]).T
    return y if len(weight.shape) == 3 else swiglu(*jnp.split(y, 2, axis=1))


def _row(
    name: str, experts: _Experts, weight: QuantizedMatrix | jax.Array, num_tokens: int, *, by_xla: bool = False
) -> Row:
    num_rows = num_tokens * experts.per_token
    used = experts.num_groups * (1 - (1 - experts.per_token / experts.num_groups) ** num_tokens)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) / experts.num_groups * used
    activation = swiglu if experts.is_gated else None
    if by_xla:
        function = _multiply_floats
    elif isinstance(weight, QuantizedMatrix):
        function = functools.partial(grouped_matmul_of_codes, activation=activation)
    else:
        function = functools.partial(grouped_matmul, activation=activation, implementation="sm90")
    inputs = [
        (
            jax.random.normal(jax.random.key(seed), (num_rows, experts.depth), jnp.bfloat16),
            weight,
            _sizes(experts, num_tokens, seed),
        )
        for seed in range(num_rotations(int(num_bytes)))
    ]
    flops = 2.0 * num_rows * np.prod(experts.shape[1:])
    return Row(
        name,
        "xla" if by_xla else "sm90",
        measure(function, inputs),
        floor(num_bytes=num_bytes, flops=float(flops)),
    )


def _sizes(experts: _Experts, num_tokens: int, seed: int) -> jax.Array:
    """Return how many tokens each expert gets if each token has different ones at random; others for each seed."""
    rng = np.random.default_rng(seed)
    chosen = rng.random((num_tokens, experts.num_groups)).argsort(axis=1)[:, : experts.per_token]
    return jnp.asarray(np.bincount(chosen.ravel(), minlength=experts.num_groups), jnp.int32)


def _codes(experts: _Experts, code: Code, group: int | None) -> QuantizedMatrix:
    """Return random codes."""
    *outputs, depth = experts.shape
    groups = depth // group if group else 1
    bits = jax.random.bits(jax.random.key(1), (*outputs, depth // codes_per_byte(code)), jnp.uint8)
    scales = jnp.full((*outputs, groups), depth**-0.5 / 4, jnp.float8_e8m0fnu if code == "e2m1" else jnp.bfloat16)
    if code == "fp8":
        bits = jax.random.normal(jax.random.key(1), bits.shape).astype(jnp.float8_e4m3fn)
    elif code == "int8":
        bits = jax.lax.bitcast_convert_type(bits, jnp.int8)
    return QuantizedMatrix(codes=bits, scales=scales, code=code)


def _codes_in_levels(
    experts: _Experts, code: Code, group: int, scales: jnp.dtype, has_minimums: bool
) -> QuantizedMatrix:
    """Return random codes with scales of 8 bits, and factors of them: of 256 columns, or of all for floats."""
    *outputs, depth = experts.shape
    ones = jnp.ones((*outputs, depth // group), jnp.float32).astype(scales)
    size = depth // 256 if scales == jnp.int8 else 1
    factors = jnp.full((*outputs, size), depth**-0.5 / 4, jnp.float32)
    return QuantizedMatrix(
        codes=_codes(experts, code, group).codes,
        scales=ones,
        factors=factors,
        minimums=ones if has_minimums else None,
        minimum_factors=factors if has_minimums else None,
        code=code,
    )
