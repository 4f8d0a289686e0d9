"""The gated linear unit: its Hopper kernel interpreted on a CPU with race detection, compiled for an H200 that is not
there, and run where there is one; its form in plain XLA.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from kernel_results import check_rows, in_float, silu

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.gated_linear_unit import gated_linear_unit, why_not
from pallas_kernels.gated_linear_unit.sm90 import Config, gated_linear_unit_sm90, heuristic

# Relative to the norm of the result, which is rounded to 8 or 11 bits.
TOLERANCE = {jnp.bfloat16: 2.5e-3, jnp.float16: 4e-4}


def make_case(*, num_rows, outputs, depth, dtype=jnp.bfloat16):
    """x, weight, and the result for SiLU as it should be."""
    rng = np.random.default_rng(num_rows)
    x = jnp.asarray(rng.standard_normal((num_rows, depth)), dtype)
    weight = jnp.asarray(rng.standard_normal((2, outputs, depth)) * depth**-0.5, dtype)
    gate, up = np.einsum("mk,hnk->hmn", *in_float((x, weight)))
    return x, weight, silu(gate) * up


def check(got, want):
    check_rows(got, want, TOLERANCE[got.dtype.type])


INTERPRETED = {
    # Rows, outputs and bands that end inside a tile; a CTA of a cluster has no rows at all.
    "shared weights": (
        {"num_rows": 300, "outputs": 136, "depth": 320},
        Config(outputs=64, cluster=2, band=2, num_blocks=4),
    ),
    "several pieces": (
        {"num_rows": 130, "outputs": 136, "depth": 128, "dtype": jnp.float16},
        Config(outputs=112, cluster=1, num_blocks=1),
    ),
}


@pytest.mark.parametrize("case", quick_first(INTERPRETED))
def test_interpreted_without_races(capsys, case):
    problem, config = INTERPRETED[case]
    x, weight, want = make_case(**problem)
    run = functools.partial(gated_linear_unit_sm90, activation=jax.nn.silu, config=config, interpret=True)
    check(interpret(capsys, run, x, weight), want)


def test_256_rows_keep_most_multiprocessors_busy():
    tiles = 2 * -(-14_336 // heuristic(256).outputs)
    assert tiles / (-(-tiles // 132) * 132) > 0.95


# Each has tiles of its own.
@pytest.mark.parametrize("num_rows", quick_first([128, 8192]))
def test_compiles_without_spilling(num_rows):
    program = compile_for_h200(
        lambda x, weight: gated_linear_unit(x, weight, activation=jax.nn.silu, implementation="sm90"),
        jax.ShapeDtypeStruct((num_rows, 1024), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 1536, 1024), jnp.bfloat16),
    )
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0
    assert program.num_launches == 1
    assert program.temp_bytes == 0  # no copy of weights


@pytest.mark.parametrize(
    ("x", "weight", "dtype", "reason"),
    [
        ((128, 64), (2, 128, 64), jnp.float32, "bfloat16 or float16"),
        ((127, 64), (2, 128, 64), jnp.float16, "at least 128 rows"),
        ((128, 96), (2, 128, 96), jnp.bfloat16, "multiples of 64"),
        ((128, 64), (2, 132, 64), jnp.bfloat16, "multiples of 8"),
        ((128, 64), (2, 120, 64), jnp.bfloat16, "at least 128"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(x, weight, dtype, reason):
    x, weight = jnp.zeros(x, dtype), jnp.zeros(weight, dtype)
    assert why_not(x, weight) is not None
    with pytest.raises(NotImplementedError, match=reason):
        gated_linear_unit(x, weight, activation=jax.nn.silu, implementation="sm90")


def test_xla():
    x, weight, want = make_case(num_rows=70, outputs=40, depth=24, dtype=jnp.float32)
    np.testing.assert_allclose(gated_linear_unit(x, weight, activation=jax.nn.silu), want, atol=1e-5)


@pytest.mark.parametrize("weight", [(2, 6, 7), (3, 6, 8)])
def test_what_does_not_fit_is_said(weight):
    unchecked = inspect.unwrap(gated_linear_unit)
    with pytest.raises(ValueError, match="does not fit"):
        unchecked(jnp.zeros((4, 8)), jnp.zeros(weight), activation=jax.nn.silu)


ON_A_GPU = {
    "ends inside tiles": {"num_rows": 301, "outputs": 1032, "depth": 320},
    "one tile": {"num_rows": 128, "outputs": 128, "depth": 64},
    "many tiles": {"num_rows": 4099, "outputs": 6144, "depth": 1024},
    "two rounds": {"num_rows": 256, "outputs": 14_336, "depth": 512},
}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case, dtype):
    x, weight, want = make_case(**ON_A_GPU[case], dtype=dtype)
    run = functools.partial(gated_linear_unit, activation=jax.nn.silu, implementation="sm90")
    got, again = (run(x, weight) for _ in range(2))
    check(got, want)
    assert (got == again).all()
