"""Rounding of rows to 8 bits, alone, after a norm and after a gate: XLA against NumPy, the Hopper kernels against XLA,
interpreted, compiled for an H200 that is not there, and run where there is one.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.row_quantization import (
    QuantizedRows,
    UnscaledProduct,
    add_rms_norm_and_quantize,
    gate_and_quantize,
    quantize_rows,
    sm90,
    why_not,
    why_not_gated,
)

EPS = 1e-5
LARGEST = {"fp8": np.float32(448), "int8": np.float32(127)}


def rows(shape, dtype=jnp.bfloat16, seed=0):
    """Rows of very different sizes; one of zeros if there are more than two."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, (shape[0], 1))
    x[2:3] = 0
    return jnp.asarray(x, dtype)


def definition(x, code):
    """Codes and scales by NumPy, of 16 or 32 bits."""
    values = np.asarray(x.astype(jnp.float32))
    scales = np.maximum(np.abs(values).max(axis=1) * np.float32(1 / LARGEST[code]), np.float32(1e-12))
    scaled = values * (np.float32(1) / scales)[:, None]
    return (scaled.astype(ml_dtypes.float8_e4m3fn) if code == "fp8" else np.rint(scaled).astype(np.int8)), scales


def check(got, codes, scales, *, flips=0.0):
    """Compare with codes and scales; a share `flips` of both may differ, codes by one and scales by a bfloat16's step.

    Reciprocals and activations of a GPU are not correctly rounded, so that what is halfway between two codes, or before
    that between two bfloat16s, may become either.
    """
    assert (got.codes.dtype, got.scales.dtype) == (codes.dtype, jnp.float32)
    np.testing.assert_allclose(got.scales, scales, rtol=2**-7 if flips else 0)
    is_same = np.isclose(got.scales, scales, rtol=1e-6, atol=0)
    assert is_same.mean() >= 1 - flips
    ours, theirs = (np.asarray(x).view(np.int8)[is_same].astype(np.int32) for x in (got.codes, codes))
    # Codes of neighbours differ by 1, and zero has two codes of 8 bits.
    differs = (ours != theirs) & ~((ours | theirs) == -128)
    if differs.mean() > flips or (np.abs(ours - theirs)[differs] > 1).any():
        places = np.argwhere(differs)
        found = "; ".join(f"{place}: {ours[*place]}, not {theirs[*place]}" for place in places[:8].tolist())
        columns = np.flatnonzero(differs.any(axis=0))[:16].tolist()
        pytest.fail(
            f"{differs.mean():.4%} of codes differ, by up to {np.abs(ours - theirs)[differs].max()}, in "
            f"{differs.any(axis=1).sum()} of {len(ours)} rows, first in columns {columns}: {found}"
        )


def product_of(num_rows, num_outputs, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    sums = jnp.asarray(rng.standard_normal((num_rows, num_outputs)) * 50, jnp.bfloat16)
    row_scales = jnp.asarray(rng.uniform(0.01, 0.1, num_rows), jnp.float32)
    output_scales = jnp.asarray(rng.uniform(0.5, 2, num_outputs), jnp.float32)
    return UnscaledProduct(
        sums=sums.astype(dtype), row_scales=row_scales, output_scales=output_scales, dtype=jnp.dtype(dtype)
    )


@pytest.mark.parametrize("code", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_xla_matches_numpy(code, dtype):
    x = rows((5, 300), dtype)
    got = jax.jit(functools.partial(quantize_rows, code=code))(x)
    assert (got.shape, got.ndim, len(got), got.dtype) == ((5, 300), 2, 5, dtype)
    check(got, *definition(x, code))


@pytest.mark.parametrize("code", ["fp8", "int8"])
def test_values_are_within_half_a_step_of_their_codes(code):
    x = rows((5, 64))
    got, step = quantize_rows(x, code), {"fp8": 32 / 448, "int8": 1 / 127}[code] / 2
    values = np.asarray(x.astype(jnp.float32))
    rounded, largest = np.asarray(got.codes, np.float32) * np.asarray(got.scales)[:, None], np.abs(values).max(axis=1)
    assert (np.abs(rounded - values) <= largest[:, None] * step * 1.00001).all()
    np.testing.assert_allclose(np.abs(rounded).max(axis=1), largest, rtol=1e-6)


def test_a_nan_stays_in_its_row():
    scales = quantize_rows(rows((3, 64)).at[1, 7].set(jnp.nan), "fp8").scales
    assert jnp.isnan(scales).tolist() == [False, True, False]


# One, two, four and eight values a load.
@pytest.mark.parametrize(("num_rows", "size"), quick_first([(4, 1024), (1, 1536), (3, 256), (2, 896)]))
@pytest.mark.parametrize("code", ["fp8", "int8"])
def test_rounding(capsys, num_rows, size, code):
    x = rows((num_rows, size))
    call = functools.partial(sm90.quantize_rows, code=code, interpret=True)
    codes, scales = interpret(capsys, call, x)
    check(QuantizedRows(codes=codes, scales=scales, dtype=x.dtype), *definition(x, code))


@pytest.mark.parametrize("code", quick_first(["fp8", "int8"]))
@pytest.mark.parametrize("is_scaled", [True, False])
def test_addition_norm_and_rounding(capsys, code, is_scaled):
    x, gain = rows((4, 512), seed=1), rows((1, 512), seed=3)[0]
    product = product_of(4, 512, seed=2)
    update = product.values() if is_scaled else product
    fused = functools.partial(sm90.add_rms_norm_and_quantize, code=code, eps=EPS, interpret=True)
    total, codes, scales = interpret(capsys, fused, x, update, gain)
    norm = functools.partial(add_rms_norm, eps=EPS, implementation="sm90")
    wanted_total, normed = interpret(capsys, norm, x, product.values(), gain)
    np.testing.assert_array_equal(total, wanted_total)
    check(QuantizedRows(codes=codes, scales=scales, dtype=x.dtype), *definition(normed, code))


def test_addition_norm_and_rounding_by_xla():
    x, gain = rows((4, 96), seed=1), rows((1, 96), seed=3)[0]
    product = product_of(4, 96, seed=2)
    total, got = add_rms_norm_and_quantize(x, product, gain, "int8", eps=EPS)
    wanted_total, normed = add_rms_norm(x, product.values(), gain, eps=EPS)
    np.testing.assert_array_equal(total, wanted_total)
    check(got, *definition(normed, "int8"))


# A block takes several rows, and then keeps the scales of outputs, or one; four, two warpgroups and one.
@pytest.mark.parametrize(
    ("num_rows", "size", "num_blocks"), quick_first([(2, 1024, 1), (5, 1024, 2), (4, 512, 1), (3, 256, 1)])
)
@pytest.mark.parametrize("code", ["fp8", "int8"])
def test_gate_and_rounding(capsys, num_rows, size, num_blocks, code):
    """Blocks are as few as given if more than two rows come to each."""
    product, of_gate = product_of(num_rows, 2 * size), {"code": code, "activation": jax.nn.silu}
    call = functools.partial(sm90.gate_and_quantize, **of_gate, num_blocks=num_blocks, interpret=True)
    codes, scales = interpret(capsys, call, product)
    wanted = gate_and_quantize(product, **of_gate)
    got = QuantizedRows(codes=codes, scales=scales, dtype=wanted.dtype)
    check(got, np.asarray(wanted.codes), wanted.scales)


def gated_in_float64(product):
    y = np.asarray(product.sums.astype(jnp.float32), np.float64)
    y = y * np.asarray(product.row_scales)[:, None] * np.asarray(product.output_scales)
    gate, up = np.split(y, 2, axis=1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def test_gate_matches_float64():
    product = product_of(6, 640, jnp.float32)
    got = gate_and_quantize(product, "int8", activation=jax.nn.silu)
    wanted = gated_in_float64(product)
    steps = np.asarray(got.codes, np.float64) - wanted / np.asarray(got.scales, np.float64)[:, None]
    assert np.abs(steps).max() <= 0.5001


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def shape_of_product(num_rows, num_outputs, dtype=jnp.bfloat16):
    row_scales, output_scales = (shape(size, dtype=jnp.float32) for size in (num_rows, num_outputs))
    sums = shape(num_rows, num_outputs, dtype=dtype)
    return UnscaledProduct(sums=sums, row_scales=row_scales, output_scales=output_scales, dtype=jnp.dtype(dtype))


ADD_NORM = functools.partial(add_rms_norm_and_quantize, eps=EPS)
GATE = functools.partial(gate_and_quantize, activation=jax.nn.silu)


# Operation, arrays, and the most registers that its kernel may use.
FOR_AN_H200 = [
    (quantize_rows, [shape(256, 16_384)], 168),
    (ADD_NORM, [shape(64, 8192), shape_of_product(64, 8192), shape(8192)], 168),
    (GATE, [shape_of_product(512, 2 * 18_944)], 255),
    (quantize_rows, [shape(256, 4096)], 64),
    (quantize_rows, [shape(256, 14_336)], 128),
    (quantize_rows, [shape(256, 896)], 64),
    (ADD_NORM, [shape(256, 4096), shape(256, 4096), shape(4096)], 64),
    (ADD_NORM, [shape(256, 4096), shape_of_product(256, 4096), shape(4096)], 96),
    (ADD_NORM, [shape(256, 896), shape_of_product(256, 896), shape(896)], 64),
    (GATE, [shape_of_product(512, 2 * 14_336)], 128),
    (GATE, [shape_of_product(64, 2 * 14_336)], 128),
    (GATE, [shape_of_product(512, 2 * 28_672)], 128),
    (GATE, [shape_of_product(64, 2 * 18_944)], 255),
    (GATE, [shape_of_product(512, 2 * 11_008)], 255),
]


# In int8 those that may use most registers.
@pytest.mark.parametrize(
    ("operation", "arrays", "most_registers", "code"),
    quick_first([*((*case, "fp8") for case in FOR_AN_H200), *((*case, "int8") for case in FOR_AN_H200[:3])]),
)
def test_on_an_h200_nothing_spills(operation, arrays, most_registers, code):
    run = functools.partial(operation, code=code, implementation="sm90")
    [kernel] = compile_for_h200(lambda *arrays: run(*arrays), *arrays).kernels
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert kernel.num_registers <= most_registers


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("code", ["fp8", "int8"])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 4096), (64, 14_336), (1000, 4096), (300, 1536), (300, 896)])
def test_on_a_gpu(num_rows, size, code):
    x, gain = rows((num_rows, size), seed=1), rows((1, size), seed=3)[0]
    call = functools.partial(quantize_rows, code=code, implementation="sm90")
    # Where a row's largest value is 127 times a power of two, many of its values are halfway between two integers.
    check(jax.jit(call)(x), *definition(x, code), flips=1e-4 if code == "fp8" else 1e-2)

    product = product_of(num_rows, size, seed=2)
    for update in (product.values(), product):
        call = functools.partial(ADD_NORM, code=code, implementation="sm90")
        total, got = jax.jit(call)(x, update, gain)
        np.testing.assert_array_equal(total, x + product.values())
        wide = np.asarray(total.astype(jnp.float32), np.float64)
        normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * np.asarray(gain.astype(jnp.float32))
        # What is halfway between two values of 16 bits may become either, too.
        check(got, *definition(jnp.asarray(normed, jnp.bfloat16), code), flips=1e-2)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("code", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("num_rows", "size"),
    [(1, 14_336), (64, 14_336), (133, 14_336), (1000, 14_336), (300, 28_672), (300, 18_944), (300, 11_008)],
)
def test_gate_on_a_gpu(num_rows, size, code):
    product = product_of(num_rows, 2 * size)
    got = jax.jit(functools.partial(GATE, code=code, implementation="sm90"))(product)
    check(got, *definition(jnp.asarray(gated_in_float64(product), jnp.bfloat16), code), flips=1e-2)


@pytest.mark.parametrize(
    ("size", "dtype", "is_taken"),
    [
        (14_336, jnp.bfloat16, True),
        (28_672, jnp.bfloat16, True),
        (11_008, jnp.float16, True),
        (29_184, jnp.bfloat16, False),
        (384, jnp.bfloat16, False),
        (1024, jnp.float32, False),
    ],
)
def test_what_the_gated_kernel_takes(size, dtype, is_taken):
    product = shape_of_product(1, 2 * size, dtype)
    assert (why_not_gated(product) is None) == is_taken
    if not is_taken:
        with pytest.raises(NotImplementedError, match=f"got {size} in {jnp.dtype(dtype)}"):
            jax.eval_shape(functools.partial(GATE, code="fp8", implementation="sm90"), product)


def test_what_the_kernels_of_rows_cannot_do():
    x = jnp.zeros((1, 96), jnp.bfloat16)
    assert why_not(96, x.dtype) is not None
    with pytest.raises(NotImplementedError, match="got 96 in bfloat16"):
        quantize_rows(x, "fp8", implementation="sm90")
    with pytest.raises(NotImplementedError, match="got 96 in bfloat16"):
        add_rms_norm_and_quantize(x, x, x[0], "fp8", eps=EPS, implementation="sm90")
    wide = jnp.zeros((1, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="one dtype"):
        add_rms_norm_and_quantize(wide, wide.astype(jnp.float16), wide[0], "fp8", eps=EPS, implementation="sm90")
