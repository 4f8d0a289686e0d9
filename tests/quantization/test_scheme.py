"""Codes and their values: rounding, packing, and values against plain definitions."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.layers.codes_by_xla import dequantize
from jaxserve.quantization.scheme import KINDS, SCHEMES, Parts, Scheme, pack


def on_device(parts):
    return Parts(*(None if part is None else jnp.asarray(part) for part in parts))


def dequantized(scheme, parts, dtype=jnp.float32):
    return np.asarray(dequantize(scheme, on_device(parts), jnp.dtype(dtype)))


def draw(shape=(24, 256), seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * rng.uniform(0.001, 3.0, (shape[0], 1))).astype(np.float32)


STEP = {"int8": 1 / 127.5, "int4": 1 / 7.5}


@pytest.mark.parametrize("name", STEP)
def test_integers_are_at_most_half_a_step_off(name):
    scheme, rows = SCHEMES[name], draw()
    got = dequantized(scheme, scheme.quantize(rows))
    groups = np.abs(rows).reshape(24, scheme.num_groups(256), -1)
    step = groups.max(axis=-1, keepdims=True) * STEP[name]
    off = np.abs(got - rows).reshape(groups.shape)
    assert (off <= 0.54 * step).all()  # scales are rounded, too
    assert off.max() > 0.4 * step.min()


def test_fp8_is_at_most_a_sixteenth_off():
    scheme, rows = SCHEMES["fp8"], draw()
    got = dequantized(scheme, scheme.quantize(rows))
    smallest = np.abs(rows).max(axis=1, keepdims=True) / 448 * 2.0**-6
    assert (np.abs(got - rows) <= np.maximum(np.abs(rows) / 16, smallest / 16)).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay(name):
    scheme = SCHEMES[name]
    zero = scheme.quantize(np.zeros((2, 256), np.float32))
    np.testing.assert_array_equal(dequantized(scheme, zero), 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", SCHEMES)
def test_values_that_are_not_finite_are_refused(name, bad):
    rows = draw()
    rows[3, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        SCHEMES[name].quantize(rows)


@pytest.mark.parametrize("scheme", [Scheme(codes="nf4"), Scheme(codes="e2m1"), Scheme(codes="uint4", has_zeros=True)])
def test_codes_that_only_checkpoints_have_are_not_rounded_to(scheme):
    with pytest.raises(ValueError, match="no rounding"):
        scheme.quantize(draw())


VALUES = {
    "int4": np.arange(-8, 8),
    "uint4": np.arange(16),
    "e2m1": np.arange(16).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32),
    "nf4": np.array(KINDS["nf4"].values, np.float32),
}


@pytest.mark.parametrize("codes", VALUES)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_of_four_bits(codes, has_zeros, dtype):
    """The first of two codes is the lower half of their byte."""
    scheme = Scheme(codes=codes, group_size=8, scale_dtype="float16", has_zeros=has_zeros)
    every = np.stack([np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8)[::-1]])
    assert pack(every)[0, 1] == 2 | 3 << 4
    scales = np.array([[0.5, 3.0], [0.125, 7.0]], np.float16)
    zeros = np.array([[1, 2], [3, 15]], np.float16) if has_zeros else None
    got = dequantized(scheme, Parts(pack(every), scales, zeros), dtype)
    shift = 0 if zeros is None else np.repeat(zeros, 8, axis=1)
    want = (VALUES[codes][every].astype(np.float32) - shift) * np.repeat(scales, 8, axis=1).astype(np.float32)
    np.testing.assert_array_equal(got, want.astype(dtype))


@pytest.mark.parametrize(
    ("shape", "num_inputs", "group_size"),
    [
        ((8, 256), 1, 128),
        ((8, 4, 64), 2, 128),
        ((8, 192), 1, 64),
        ((8, 2880), 1, 64),
        ((8, 40), 1, None),
        ((2, 8, 128 * 7), 1, 128),
    ],
)
def test_groups_fit_the_inputs(shape, num_inputs, group_size):
    """A group is as large as divides them; where that is hardly any input, an output has one scale."""
    fitted = SCHEMES["int4"].fitted(shape, num_inputs)
    assert fitted is not None
    assert fitted.group_size == group_size
    assert SCHEMES["int8"].fitted(shape, num_inputs) == SCHEMES["int8"]


def test_an_odd_number_of_inputs_has_no_pairs_of_codes():
    assert SCHEMES["int4"].fitted((8, 255), 1) is None
    assert SCHEMES["int8"].fitted((8, 255), 1) is not None


def test_every_code_of_eight_bits():
    codes = np.arange(256, dtype=np.uint8)
    for name, dtype in (("fp8", ml_dtypes.float8_e4m3fn), ("int8", np.int8)):
        got = dequantized(Scheme(codes=name), Parts(codes.view(dtype)[None], np.ones((1, 1), np.float32)))
        np.testing.assert_array_equal(got[0], codes.view(dtype).astype(np.float32))
