"""Matmuls of quantized weights: packing and dequantization against their definitions, XLA's against float64, how work
is cut, the Hopper kernel compiled for an H200 that is not there, and run where there is one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import examples, quick_first
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_results import in_float, relative_error, silu

from pallas_kernels.device.codes import codes_per_byte
from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.layer_matmuls import Weights
from pallas_kernels.layer_matmuls.reference import layer_matmuls_reference
from pallas_kernels.quantized_matmuls import (
    QuantizedMatrix,
    quantized_layer_matmuls,
    quantized_matmul,
    why_no_layer,
    why_not,
)
from pallas_kernels.quantized_matmuls.sm90 import Product, cut

EPS = 1e-5
VALUES = {
    "int4": np.arange(-8, 8),
    "uint4": np.arange(16),
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    "fp4": np.array([0, 1 / 16, 8, 12, 4, 6, 2, 3, 0, -1 / 16, -8, -12, -4, -6, -2, -3]) / 12,
    "nf4": np.array(
        [
            *(-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0),
            *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1),
        ]
    ),
}
TOLERANCE = 6e-3
"""Largest error relative to the result's norm: activations between two matmuls are rounded to 8 bits."""
TOLERANCE_OF_Q4_K = 7e-3
"""Rounding its weights, with their minimums, to bfloat16 changes them by 2.4e-3, and a layer's result by 5.1e-3
(computed in float64, 3 and 8 rows).
"""


STORED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn} | dict.fromkeys(VALUES, jnp.uint8)


class Format(NamedTuple):
    """How a matrix is stored; groups of None have all columns."""

    code: str
    group: int | None = None
    scales: str = "float32"
    has_zeros: bool = False
    has_minimums: bool = False
    factors: str | None = None
    factored: int | None = None


FORMATS = {
    "int8": Format("int8"),
    "int8 of 128": Format("int8", 128),
    "fp8": Format("fp8"),
    "fp8 of 128": Format("fp8", 128),
    "fp8 of 384": Format("fp8", 384),
    "int4 of 128": Format("int4", 128, "bfloat16"),
    "int4 of 64": Format("int4", 64, "float16"),
    "int4 of 32": Format("int4", 32, "bfloat16"),
    "uint4": Format("uint4", None, "bfloat16", has_zeros=True),
    "uint4 of 128": Format("uint4", 128, "bfloat16", has_zeros=True),
    "uint4 of 64": Format("uint4", 64, "float16", has_zeros=True),
    "uint4 of 32": Format("uint4", 32, "bfloat16", has_zeros=True),
    "e2m1 of 32": Format("e2m1", 32, "bfloat16"),
    "int8 with zero points": Format("int8", 128, "float16", has_zeros=True),
    "MXFP4": Format("e2m1", 32, "float8_e8m0fnu"),
    "NVFP4": Format("e2m1", 16, "float8_e4m3fn", factors="float32"),
    "NF4": Format("nf4", 64),
    "NF4 of 128": Format("nf4", 128, "float16"),
    "FP4": Format("fp4", 64),
    "Q4_1": Format("uint4", 32, "float16", has_minimums=True),
    "Q5_1": Format("int8", 32, "float16", has_minimums=True),
    "Q8_0": Format("int8", 32, "float16"),
    "Q2_K": Format("uint4", 16, "int8", has_minimums=True, factors="float16", factored=256),
    "Q3_K": Format("int4", 16, "int8", factors="float16", factored=256),
    "Q4_K": Format("uint4", 32, "int8", has_minimums=True, factors="float16", factored=256),
    "Q5_K": Format("int8", 32, "int8", has_minimums=True, factors="float16", factored=256),
    "Q6_K": Format("int8", 16, "int8", factors="float16", factored=256),
    "Q4_K of a shard": Format("uint4", 32, "int8", has_minimums=True, factors="float16", factored=128),
    "Q6_K of a shard": Format("int8", 16, "int8", factors="float16", factored=64),
    "Q4_0 and Q4_1": Format("uint4", 32, "float16", has_zeros=True, has_minimums=True),
}


def make_matrix(outputs, depth, name, seed=0):
    """Return a matrix, and its values in float64 by their definition."""
    rng, form = np.random.default_rng(seed), FORMATS[name]
    groups, larger = ((*outputs, depth // size if size else 1) for size in (form.group, form.factored))
    zeros, factors = None, [None, None]
    if codes_per_byte(form.code) == 2:
        codes = rng.integers(0, 16, (*outputs, depth), np.uint8)
        stored = jnp.asarray(codes[..., ::2] | codes[..., 1::2] << 4)
        values = VALUES[form.code][codes].astype(np.float64)
    else:
        values = rng.standard_normal((*outputs, depth))
        if form.code == "int8":
            values = (
                np.clip(np.round(values * 8 + 16), 0, 31) if form.has_minimums else np.round(values * 30).clip(-128)
            )
        stored = jnp.asarray(values, STORED[form.code])
        values = in_float(stored)
    if form.has_zeros:
        zeros = jnp.asarray(rng.integers(0, 17, groups), form.scales)
        values = values - of_columns(zeros, depth)
    spread = values.std() * depth**0.5

    def scales(size, typical):
        if form.scales == "int8":
            return jnp.asarray(rng.integers(1, 64, size), jnp.int8)
        if form.scales == "float8_e8m0fnu":
            bits = rng.integers(120, 124, size).astype(np.uint8)
            return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e8m0fnu)
        return jnp.asarray(rng.uniform(0.5, 1.5, size) * (1 if form.factors else typical), form.scales)

    if form.factors:
        typical = 32 if form.scales == "int8" else 1
        factors = [jnp.asarray(rng.uniform(0.5, 1.5, larger) / spread / typical * by, form.factors) for by in (1, 8)]
    arrays = [scales(groups, 1 / spread), scales(groups, 8 / spread) if form.has_minimums else None]
    factors = [factor if array is not None else None for factor, array in zip(factors, arrays, strict=True)]
    matrix = QuantizedMatrix(
        codes=stored,
        scales=arrays[0],
        zeros=zeros,
        minimums=arrays[1],
        factors=factors[0],
        minimum_factors=factors[1],
        code=form.code,
    )
    exact = [
        None if array is None else of_columns(array, depth) * (1 if factor is None else of_columns(factor, depth))
        for array, factor in zip(arrays, factors, strict=True)
    ]
    return matrix, values * exact[0] - (0 if exact[1] is None else exact[1])


def of_columns(groups, depth):
    return np.repeat(in_float(groups), depth // groups.shape[-1], axis=-1)


def make_layer(form, depth, hidden, inner, outputs, seed=0):
    shapes = {"o": (hidden,), "gate_up": (2, inner), "down": (hidden,), "qkv": (outputs,)}
    depths = {"o": depth, "gate_up": hidden, "down": inner, "qkv": hidden}
    parts = {
        name: make_matrix(shape, depths[name], form, seed + index)
        for index, (name, shape) in enumerate(shapes.items())
        if shape != (None,)
    }
    weights = Weights(**{name: parts[name][0] if name in parts else None for name in shapes})
    return weights, {name: parts[name][1] if name in parts else None for name in shapes}


def rows(num_rows, depth, dtype=jnp.bfloat16, seed=7):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((num_rows, depth)), dtype)


@pytest.mark.parametrize("outputs", [(64,), (2, 64)])
@pytest.mark.parametrize("form", FORMATS)
def test_a_matrix_dequantized_is_what_its_codes_and_scales_say(form, outputs):
    matrix, want = make_matrix(outputs, 768, form)
    assert matrix.shape == (*outputs, 768)
    assert (matrix.num_outputs, matrix.depth) == (np.prod(outputs), 768)
    np.testing.assert_allclose(matrix.dequantize(), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("form", FORMATS)
def test_xla_matches_the_definition(form):
    x = rows(3, 768, jnp.float32)
    matrix, want = make_matrix((64,), 768, form)
    assert relative_error(quantized_matmul(x, matrix), in_float(x) @ want.T) < 2e-6
    gated, (gate, up) = make_matrix((2, 64), 768, form)
    got = quantized_matmul(x, gated, activation=jax.nn.silu)
    assert relative_error(got, silu(in_float(x) @ gate.T) * (in_float(x) @ up.T)) < 2e-6


@pytest.mark.parametrize("outputs", [64, None])
def test_a_layer_in_xla_matches_the_definition(outputs):
    weights, dense = make_layer("int4 of 128", 128, 128, 128, outputs)
    heads, residual = rows(3, 128, jnp.float32), rows(3, 128, jnp.float32, seed=8)
    gains = (1 + 0.1 * rows(1, 128, jnp.float32)[0],) * 2
    got = quantized_layer_matmuls(heads, residual, weights, gains, activation=jax.nn.silu, eps=EPS)
    want = layer_matmuls_reference(
        *in_float((heads, residual)), **dense, gains=in_float(gains), activation=silu, eps=EPS
    )
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-5


def test_what_does_not_fit_is_refused():
    matrix, _ = make_matrix((64,), 256, "int8")
    gated, _ = make_matrix((2, 64), 256, "int8")
    with pytest.raises(ValueError, match=r"x of shape \(2, 128\) does not fit a weight of 256 columns"):
        quantized_matmul(rows(2, 128), matrix)
    with pytest.raises(ValueError, match="gate and up and an activation go together"):
        quantized_matmul(rows(2, 256), gated)


def shape_of(form, *shape):
    """Return the shapes of a matrix."""
    *outputs, depth = shape
    found = FORMATS[form] if isinstance(form, str) else form

    def of(last, dtype):
        return jax.ShapeDtypeStruct((*outputs, last), jnp.dtype(dtype))

    scales = of(depth // found.group if found.group else 1, found.scales)
    factors = of(depth // found.factored if found.factored else 1, found.factors) if found.factors else None
    return QuantizedMatrix(
        codes=of(depth // codes_per_byte(found.code), STORED[found.code]),
        scales=scales,
        zeros=scales if found.has_zeros else None,
        minimums=scales if found.has_minimums else None,
        factors=factors,
        minimum_factors=factors if found.has_minimums else None,
        code=found.code,
    )


@pytest.mark.parametrize(
    ("x", "matrix", "reason"),
    [
        ((65, 256), ("int8", 64, 256), "1 to 64 rows, got 65"),
        ((0, 256), ("int8", 64, 256), "1 to 64 rows, got 0"),
        ((2, 256), ("int8", 72, 256), "outputs in multiples of 64 and K of 32, at least 128, got 72 and 256"),
        ((2, 200), ("fp8", 64, 200), "outputs in multiples of 64 and K of 32, at least 128, got 64 and 200"),
        ((2, 128), ("MXFP4", 64, 128), "outputs in multiples of 64 and K of 32, at least 256, got 64 and 128"),
        (
            (2, 256),
            (Format("e2m1", 8), 64, 256),
            "scales of all columns, of 16 to 256 that divide these, or of multiples, got 8",
        ),
        (
            (2, 768),
            (Format("fp8", 192), 64, 768),
            "scales of all columns, of 16 to 128 that divide these, or of multiples, got 192",
        ),
        (
            (2, 768),
            (Format("int4", 32, "int8", factors="float16", factored=96), 64, 768),
            "factors of all columns, of parts of 256 or of multiples, got 96",
        ),
        ((2, 512), (Format("uint4", 64), 64, 512), "uint4 with zero points or minimums"),
        ((2, 512), (Format("int4", 64, has_zeros=True), 64, 512), "zero points of uint4 and int8, got int4"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(x, matrix, reason):
    x, matrix = jax.ShapeDtypeStruct(x, jnp.bfloat16), shape_of(*matrix)
    assert why_not(x, matrix) == reason
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(lambda x, w: quantized_matmul(x, w, implementation="sm90"), x, matrix)


def test_the_kernel_wants_rows_of_bfloat16_and_weights_that_it_can_take():
    of = jax.ShapeDtypeStruct
    weights = shapes_of("int4 of 128", 256, 256, 256, 64)
    assert why_not(of((2, 128), jnp.float32), weights.o) == "rows of bfloat16, got float32"
    assert why_no_layer(of((2, 256), jnp.bfloat16), weights) is None
    odd = weights._replace(o=shape_of("int4 of 32", 256, 288))
    assert why_no_layer(of((2, 288), jnp.bfloat16), odd) == "K in multiples of 64, got 288"
    narrow = weights._replace(down=shape_of("int4 of 128", 72, 256))
    assert "got 72 and 256" in (why_no_layer(of((2, 256), jnp.bfloat16), narrow) or "")


@pytest.mark.parametrize("form", FORMATS)
def test_the_kernel_takes_all_formats(form):
    assert why_not(jax.ShapeDtypeStruct((2, 768), jnp.bfloat16), shape_of(form, 64, 768)) is None


@settings(max_examples=examples(100))
@given(blocks=st.integers(1, 300), depth=st.integers(1, 40), form=st.sampled_from(["NVFP4", "int8"]))
def test_every_unit_has_one_thread_block(blocks, depth, form):
    matmul = cut(Product("w", "x", "y", shape_of(form, 64 * blocks, 128 * depth)))
    firsts = [matmul.first_unit(cta) for cta in range(133)]
    assert firsts[0] == 0
    assert firsts[132] == matmul.num_units
    sizes = np.diff(firsts)
    assert sizes.max() - sizes[: matmul.num_ctas].min() <= 1
    owners = np.repeat(np.arange(132), sizes)
    np.testing.assert_array_equal([matmul.owner(unit) for unit in range(matmul.num_units)], owners)


def shapes_of(form, depth, hidden, inner, outputs):
    return Weights(
        o=shape_of(form, hidden, depth),
        gate_up=shape_of(form, 2, inner, hidden),
        down=shape_of(form, hidden, inner),
        qkv=None if outputs is None else shape_of(form, outputs, hidden),
    )


LLAMA_3_8B = (4096, 4096, 14336, 6144)
SMALL = (1024, 1024, 4864, 1152)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "form", "sizes"),
    quick_first(
        [
            (1, "int4 of 128", LLAMA_3_8B),
            (16, "int4 of 32", LLAMA_3_8B),
            (64, "int4 of 128", LLAMA_3_8B),
            (8, "e2m1 of 32", (1024, 1024, 4864, None)),
            (8, "uint4 of 128", LLAMA_3_8B),
            (8, "fp8", LLAMA_3_8B),
            (16, "fp8 of 128", LLAMA_3_8B),
            (64, "fp8 of 128", LLAMA_3_8B),
            (56, "e2m1 of 32", SMALL),
            (64, "uint4 of 32", SMALL),
            (64, "uint4", SMALL),
            (40, "int8", (896, 896, 4864, 1152)),
            *((num_rows, "NVFP4", (1024, 1024, 5440, 1152)) for num_rows in (1, 64)),
            *((num_rows, "MXFP4", (1024, 1024, 5440, 1152)) for num_rows in (16, 64)),
            *((64, form, SMALL) for form in ("Q8_0", "Q4_0 and Q4_1", "Q5_1", "int8 with zero points")),
            *((64, f"Q{bits}_K", SMALL) for bits in (2, 3, 4, 5, 6)),
            *((1, form, SMALL) for form in ("int8 with zero points", "Q2_K")),
            *((16, form, SMALL) for form in ("Q5_1", "Q6_K")),
            *((num_rows, "NF4", SMALL) for num_rows in (1, 16, 32, 64)),
            (64, "FP4", SMALL),
        ]
    ),
)
def test_a_layer_compiles_without_spilling(num_rows, form, sizes):
    of = jax.ShapeDtypeStruct
    x, gain = of((num_rows, sizes[0]), jnp.bfloat16), of((sizes[1],), jnp.bfloat16)
    residual = of((num_rows, sizes[1]), jnp.bfloat16)

    def layer(heads, residual, weights, gains):
        return quantized_layer_matmuls(
            heads, residual, weights, gains, activation=jax.nn.silu, eps=EPS, implementation="sm90"
        )

    executable = compile_for_h200(layer, x, residual, shapes_of(form, *sizes), (gain, gain))
    [kernel] = executable.kernels
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)


@pytest.mark.slow
def test_a_shard_of_odd_size_compiles_without_spilling():
    """Qwen2.5-72B has a feed-forward of 29,568 values, of which one of four devices has 7,392."""
    run = functools.partial(quantized_matmul, implementation="sm90")
    x, weight = jax.ShapeDtypeStruct((8, 7392), jnp.bfloat16), shape_of("int4 of 32", 8192, 7392)
    assert compile_for_h200(run, x, weight).spill_bytes == 0


@pytest.mark.parametrize("form", quick_first(["int4 of 128", "fp8", "Q6_K"]))
def test_a_language_model_head_compiles_without_spilling(form):
    of = jax.ShapeDtypeStruct
    head = shapes_of(form, 256, 4096, 128, 128_256).qkv
    run = functools.partial(quantized_matmul, output_dtype=jnp.float32, implementation="sm90")
    [kernel] = compile_for_h200(run, of((8, 4096), jnp.bfloat16), head).kernels
    assert kernel.spill_bytes == 0


ON_A_GPU = [
    ("int4 of 128", (512, 768, 1536, 320)),
    ("int4 of 32", SMALL),
    ("uint4 of 128", (1024, 1024, 2816, 1536)),
    ("e2m1 of 32", (1024, 1024, 4864, None)),
    ("fp8", (640, 1152, 2944, 320)),
    ("fp8 of 128", (896, 896, 4864, 1152)),
    ("int8", (1024, 1024, 2816, 1536)),
    ("NVFP4", (1024, 1024, 5440, 1152)),
    ("MXFP4", (1088, 1152, 5440, None)),
    ("NF4", SMALL),
    ("FP4", (1088, 1152, 5440, None)),
    ("Q4_K", SMALL),
    ("Q6_K", SMALL),
]


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 16, 17, 40, 64])
@pytest.mark.parametrize(("form", "sizes"), ON_A_GPU)
def test_a_layer_on_a_gpu(form, sizes, num_rows):
    weights, dense = make_layer(form, *sizes)
    heads, residual = rows(num_rows, sizes[0]), rows(num_rows, sizes[1], seed=8)
    gains = (1 + 0.1 * rows(1, sizes[1])[0],) * 2

    def run():
        return quantized_layer_matmuls(
            heads, residual, weights, gains, activation=jax.nn.silu, eps=EPS, implementation="sm90"
        )

    got = run()
    want = layer_matmuls_reference(
        *in_float((heads, residual)), **dense, gains=in_float(gains), activation=silu, eps=EPS
    )
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < (TOLERANCE_OF_Q4_K if form == "Q4_K" else TOLERANCE)
    for _ in range(20):
        for a, b in zip(run(), got, strict=True):
            np.testing.assert_array_equal(in_float(a), in_float(b))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 16, 48])
@pytest.mark.parametrize("depth", [768, 1152, 1056])
@pytest.mark.parametrize("form", FORMATS)
def test_one_matmul_on_a_gpu(form, depth, num_rows):
    """The last block of 4-bit codes has 128 of 1,152 columns, and 32 of 1,056."""
    size = FORMATS[form].factored or FORMATS[form].group or 32
    depth = -(-depth // size) * size
    x = rows(num_rows, depth)
    matrix, want = make_matrix((320,), depth, form)
    got = quantized_matmul(x, matrix, output_dtype=jnp.float32, implementation="sm90")
    assert relative_error(got, in_float(x) @ want.T) < TOLERANCE
