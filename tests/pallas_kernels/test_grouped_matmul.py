"""Rows in groups, each multiplied by its group's weight: any sizes, and at a cost that follows the rows."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.grouped_matmul import grouped_matmul, grouped_matmul_reference

MULTIPLY = jax.jit(grouped_matmul)
NUM_ROWS, NUM_GROUPS = 150, 6


def random_operands(dtype, *, num_rows=NUM_ROWS):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((num_rows, 36))
    weight = rng.standard_normal((NUM_GROUPS, 20, 36))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@pytest.mark.parametrize(
    "sizes",
    [
        [0] * 6,
        [150, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 150],
        [1, 0, 2, 0, 1, 0],
        [31, 32, 33, 7, 8, 9],
        [0, 63, 0, 65, 0, 22],
        [25] * 6,
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 8e-3)])
def test_equals_the_reference(sizes, dtype, tolerance):
    x, weight = random_operands(dtype)
    want = grouped_matmul_reference(np.asarray(x, np.float64), np.asarray(weight, np.float64), np.array(sizes))
    poisoned = x.at[sum(sizes) :].set(jnp.nan)
    got = MULTIPLY(poisoned, weight, jnp.array(sizes, jnp.int32))
    assert got.dtype == dtype
    rows = slice(sum(sizes))
    np.testing.assert_allclose(np.asarray(got[rows], np.float64), want[rows], rtol=tolerance, atol=tolerance * 20)


def test_bias_and_gate():
    x, _ = random_operands(jnp.float32)
    rng = np.random.default_rng(8)
    weight, bias = rng.standard_normal((NUM_GROUPS, 2, 20, 36)), rng.standard_normal((NUM_GROUPS, 2, 20))
    sizes = np.array([31, 32, 0, 7, 8, 9])
    gate, up = (
        grouped_matmul_reference(np.asarray(x), weight[:, half], sizes)[: sizes.sum()]
        + np.repeat(bias[:, half], sizes, axis=0)
        for half in (0, 1)
    )
    weight, bias = (jnp.asarray(a, jnp.float32) for a in (weight, bias))
    got = grouped_matmul(x, weight, jnp.asarray(sizes), bias=bias, activation=lambda gate, up: gate * (up + 1))
    np.testing.assert_allclose(np.asarray(got)[: sizes.sum()], gate * (up + 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_few_rows(num_rows):
    x, weight = random_operands(jnp.float32, num_rows=num_rows)
    sizes = np.array([0, 0, num_rows, 0, 0, 0])
    want = grouped_matmul_reference(np.asarray(x), np.asarray(weight), sizes)
    got = MULTIPLY(x, weight, jnp.asarray(sizes, jnp.int32))
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        ([0] * 6, []),
        ([0, 0, 4, 0, 0, 0], [8]),
        ([1, 0, 0, 0, 0, 33], [1, 64]),
        ([171, 171, 171, 171, 170, 170], 18 * [64]),
    ],
    ids=str,
)
def test_padding_rows_and_unused_groups_cost_nothing(monkeypatch, sizes, tiles):
    x, weight = random_operands(jnp.float32, num_rows=1024)
    multiplied = []

    def multiply(rows, *args, dot_general=lax.dot_general, **kwargs):
        multiplied.append(len(rows))
        return dot_general(rows, *args, **kwargs)

    with jax.disable_jit(), monkeypatch.context() as patch:
        patch.setattr(lax, "dot_general", multiply)
        grouped_matmul(x, weight, jnp.array(sizes, jnp.int32))
    assert multiplied == tiles


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": jnp.zeros((4, 35))}, "x of shape .4, 35. does not fit a weight of shape .6, 20, 36."),
        ({"group_sizes": jnp.zeros(5, jnp.int32)}, "group_sizes must have 6 entries, one a group, got .5,."),
        ({"weight": jnp.zeros((6, 2, 20, 36))}, r"weight must be \[X, N, K\], got shape"),
        ({"activation": jnp.add}, r"weight must be \[X, 2, N, K\], gate and up, got shape"),
        ({"bias": jnp.zeros((6, 36))}, r"bias must have shape \(6, 20\), got \(6, 36\)"),
        ({"x": jnp.zeros((4, 36), jnp.bfloat16)}, "x and weight must have one dtype, got bfloat16 and float32"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    arguments = {
        "x": jnp.zeros((4, 36)),
        "weight": jnp.zeros((6, 20, 36)),
        "group_sizes": jnp.zeros(6, jnp.int32),
    } | changes
    # Without the checks of types, which tests add and users do not have.
    unchecked = inspect.unwrap(grouped_matmul)
    with pytest.raises(ValueError, match=message):
        unchecked(**arguments)
