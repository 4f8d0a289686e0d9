"""Rows and weights of 8 bits: XLA's matmul against float64, the Hopper kernel compiled for an H200
that is not there, and run where there is one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from kernel_results import in_float, relative_error, silu

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.quantized_matmuls import QuantizedMatrix
from pallas_kernels.row_quantization import CODES, quantize_rows
from pallas_kernels.scaled_matmul import best_implementation, gated_matmul_and_quantize, scaled_matmul, why_not
from pallas_kernels.scaled_matmul.sm90 import Config, scaled_matmul_sm90

TOLERANCE = 3e-3
"""Largest error relative to the norm of the result, which is rounded to 8 bits."""


def make_matrix(outputs, depth, code, group=None):
    rng = np.random.default_rng(depth)
    values = rng.standard_normal((*outputs, depth)).astype(np.float32)
    codes = jnp.asarray(values if code == "fp8" else np.round(values * 30), CODES[code])
    scales = rng.uniform(0.5, 1.5, (*outputs, depth // group if group else 1)) / (1 if code == "fp8" else 30)
    return QuantizedMatrix(codes=codes, scales=jnp.asarray(scales * depth**-0.5, jnp.float32), code=code)


def shape_of(outputs, depth, code, group=None):
    of = jax.ShapeDtypeStruct
    scales = of((*outputs, depth // group if group else 1), jnp.float32)
    return QuantizedMatrix(codes=of((*outputs, depth), CODES[code]), scales=scales, code=code)


def want(rows, weight):
    """The product of rounded rows and a matrix in float64, gate and up with SiLU."""
    values = in_float(rows.codes) * in_float(rows.scales)[:, None]
    y = np.einsum("mk,...k->...m", values, np.asarray(weight.dequantize(), np.float64))
    if weight.is_gated:
        gate, up = np.moveaxis(y, 0, 1)[:, 0], np.moveaxis(y, 0, 1)[:, 1]
        y = silu(gate) * up
    return y.T


@pytest.mark.parametrize("outputs", [(256,), (2, 256)])
@pytest.mark.parametrize("code", ["fp8", "int8"])
def test_xla_matches_the_definition(code, outputs):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((70, 256)), jnp.bfloat16)
    weight, rows = make_matrix(outputs, 256, code), quantize_rows(x, code)
    got = scaled_matmul(rows, weight, activation=jax.nn.silu if len(outputs) == 2 else None)
    wanted = want(rows, weight)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, wanted) <= 2 * TOLERANCE  # rounded twice


@pytest.mark.parametrize("code", ["fp8", "int8"])
def test_what_is_gated_is_rounded_as_the_result_is(code):
    x = quantize_rows(jnp.asarray(np.random.default_rng(1).standard_normal((70, 256)), jnp.float32), code)
    weight = make_matrix((2, 256), 256, code)
    got = gated_matmul_and_quantize(x, weight, code, activation=jax.nn.silu)
    wanted = quantize_rows(scaled_matmul(x, weight, activation=jax.nn.silu), code)
    np.testing.assert_array_equal(got.codes, wanted.codes)
    np.testing.assert_array_equal(got.scales, wanted.scales)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (shape_of((256,), 256, "fp8"), None),
        (shape_of((256,), 256, "fp8", 128), None),
        (shape_of((256,), 256, "int8"), None),
        (shape_of((256,), 256, "fp8", 64), "multiples of 128, got 64"),
        (shape_of((256,), 256, "int8", 128), "int8 with a scale for each output"),
        (shape_of((264,), 256, "fp8", 128), "multiples of 16"),
        (shape_of((264,), 264, "fp8"), None),
        (
            dataclasses.replace(shape_of((256,), 256, "int8"), minimums=shape_of((256,), 256, "int8").scales),
            "scales alone",
        ),
        (
            dataclasses.replace(shape_of((256,), 256, "int8"), zeros=shape_of((256,), 256, "int8").scales),
            "scales alone",
        ),
    ],
)
def test_what_cannot_be_multiplied_is_said(weight, reason):
    found = why_not(weight)
    assert found is None if reason is None else reason in found


def test_weights_with_one_fp8_scale_an_output_are_left_to_cublas():
    assert best_implementation(shape_of((256,), 256, "fp8")) == "xla"
    assert best_implementation(shape_of((256,), 256, "fp8", 128)) == "sm90"
    assert best_implementation(shape_of((2, 256), 256, "int8")) == "sm90"
    assert best_implementation(shape_of((100,), 256, "int8")) == "xla"


@pytest.mark.parametrize(
    ("weight", "error"),
    [
        (make_matrix((256,), 256, "fp8", 128), "one scale an output"),
        (make_matrix((2, 256), 256, "fp8"), "go together"),
        (make_matrix((256,), 128, "fp8"), "does not fit"),
        (make_matrix((256,), 256, "int8"), "codes of float8_e4m3fn"),
    ],
)
def test_what_does_not_fit_is_refused(weight, error):
    with pytest.raises((ValueError, NotImplementedError), match=error):
        scaled_matmul(quantize_rows(jnp.ones((70, 256), jnp.bfloat16), "fp8"), weight)


# Each has tiles of its own.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "outputs", "code", "group"),
    quick_first(
        [
            (8192, (2, 1536), "fp8", 128),
            (256, (2, 1536), "int8", None),
            (8192, (1536,), "fp8", None),
            (1024, (5120,), "fp8", 128),
            (8192, (4096,), "fp8", 128),
        ]
    ),
)
def test_compiles_without_spilling(num_rows, outputs, code, group):
    x, scales = jax.ShapeDtypeStruct((num_rows, 1024), CODES[code]), jax.ShapeDtypeStruct((num_rows,), jnp.float32)

    def run(x, scales, weight):
        return scaled_matmul_sm90(x, scales, weight, activation=jax.nn.silu if len(outputs) == 2 else None)

    [kernel] = compile_for_h200(run, x, scales, shape_of(outputs, 1024, code, group)).kernels
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("num_rows", "outputs", "code", "group", "config"),
    [
        (300, (2, 320), "fp8", None, Config(outputs=96, cluster=2)),
        (300, (2, 320), "fp8", 128, None),
        (300, (2, 320), "fp8", 256, Config(outputs=64, cluster=1)),
        (1000, (528,), "fp8", None, None),
        (300, (2, 320), "int8", None, None),
        (1000, (528,), "int8", None, Config(outputs=64, cluster=1)),
    ],
)
def test_matches_the_definition_on_a_gpu(num_rows, outputs, code, group, config):
    x = jnp.asarray(np.random.default_rng(2).standard_normal((num_rows, 1024)), jnp.bfloat16)
    weight, rows = make_matrix(outputs, 1024, code, group), quantize_rows(x, code)
    activation = jax.nn.silu if len(outputs) == 2 else None
    got = scaled_matmul_sm90(rows.codes, rows.scales, weight, activation=activation, config=config)
    assert relative_error(got, want(rows, weight)) <= TOLERANCE


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_sums_of_many_products_lose_nothing_on_a_gpu():
    """Without promotion those of as many positive products are 20% too small."""
    x = jnp.abs(jnp.asarray(np.random.default_rng(3).standard_normal((256, 14_336)), jnp.bfloat16))
    weight = make_matrix((512,), 14_336, "fp8")
    weight = QuantizedMatrix(codes=jnp.abs(weight.codes), scales=weight.scales, code="fp8")
    for implementation in ("xla", "sm90"):
        rows = quantize_rows(x, "fp8")
        got = scaled_matmul(rows, weight, implementation=implementation)
        assert relative_error(got, want(rows, weight)) <= TOLERANCE
