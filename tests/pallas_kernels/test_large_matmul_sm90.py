"""The Hopper kernel of the large matmul: interpreted on a CPU with race detection, compiled for an H200 that is not
there, and run where there is one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import interpret

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.hopper import SHARED_MEMORY
from pallas_kernels.large_matmul import large_matmul, supports
from pallas_kernels.large_matmul.sm90 import Config, heuristic, large_matmul_sm90

# Of the norm of the result, which is rounded to 8 or 11 bits.
TOLERANCE = {jnp.bfloat16: 2.5e-3, jnp.float16: 4e-4}


def make_case(*, num_rows, outputs, depth, is_gated=False, dtype=jnp.bfloat16):
    """x, weight, activation, and the result as it should be."""
    rng = np.random.default_rng(num_rows)
    of_weight = (2, outputs) if is_gated else (outputs,)
    x = jnp.asarray(rng.standard_normal((num_rows, depth)), dtype)
    weight = jnp.asarray(rng.standard_normal((*of_weight, depth)) * depth**-0.5, dtype)
    exact_x, exact_weight = (np.asarray(a.astype(jnp.float32), np.float64) for a in (x, weight))
    want = np.einsum("mk,...nk->...mn", exact_x, exact_weight)
    if is_gated:
        gate, up = want
        want = gate / (1 + np.exp(-gate)) * up
    return x, weight, jax.nn.silu if is_gated else None, want


def check(got, want):
    got, dtype = np.asarray(got.astype(jnp.float32)), got.dtype.type
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= TOLERANCE[dtype] * np.linalg.norm(want)
    size = np.linalg.norm(want, axis=1)
    assert (np.linalg.norm(got - want, axis=1) <= 3 * TOLERANCE[dtype] * size).all()


INTERPRETED = {
    # Rows, outputs and bands that end inside a tile; a block of a cluster has no rows at all.
    "shared weights": (
        {"num_rows": 300, "outputs": 136, "depth": 320, "is_gated": True},
        Config(rows=128, outputs=64, stages=2, cluster=2, band=2, lead=1, num_blocks=4),
    ),
    "several pieces": (
        {"num_rows": 65, "outputs": 136, "depth": 128, "dtype": jnp.float16},
        Config(rows=256, outputs=112, stages=3, band=8, num_blocks=1),
    ),
}


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_without_races(capsys, case):
    problem, config = INTERPRETED[case]
    x, weight, activation, want = make_case(**problem)
    run = functools.partial(large_matmul_sm90, activation=activation, config=config, interpret=True)
    check(interpret(capsys, run, x, weight), want)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_rows", [64, 65, 256, 500, 2048, 8192])
@pytest.mark.parametrize("outputs", [64, 72, 4096, 6144, 14_336])
def test_every_config_fits(outputs, num_rows, is_gated):
    config = heuristic(num_rows, outputs, is_gated=is_gated)
    assert config.slots(is_gated=is_gated) >= 1
    assert config.shared_memory(is_gated=is_gated) <= SHARED_MEMORY
    assert config.stages >= 4


def test_256_rows_keep_most_multiprocessors_busy():
    config = heuristic(256, 14_336, is_gated=True)
    tiles = 256 // config.rows * -(-14_336 // config.outputs)
    assert tiles / (-(-tiles // 132) * 132) > 0.95


@pytest.mark.parametrize("num_rows", [128, 8192])
@pytest.mark.parametrize("is_gated", [False, True])
def test_compiles_without_spilling(num_rows, is_gated):
    activation = jax.nn.silu if is_gated else None
    shapes = [(num_rows, 1024), (2, 1536, 1024) if is_gated else (1536, 1024)]
    program = compile_for_h200(
        lambda x, weight: large_matmul(x, weight, activation=activation, implementation="sm90"),
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
    )
    [kernel] = program.kernels
    assert kernel.spill_bytes == 0
    assert program.num_launches == 1
    assert program.temp_bytes == 0  # no copy of weights


@pytest.mark.parametrize(
    ("x", "weight", "dtype", "reason"),
    [
        ((128, 64), (64, 64), jnp.float32, "bfloat16 or float16"),
        ((63, 64), (64, 64), jnp.bfloat16, "at least 64 rows"),
        ((128, 96), (64, 96), jnp.bfloat16, "multiples of 64"),
        ((128, 64), (68, 64), jnp.bfloat16, "multiples of 8"),
        ((128, 64), (56, 64), jnp.bfloat16, "at least 64"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(x, weight, dtype, reason):
    x, weight = jnp.zeros(x, dtype), jnp.zeros(weight, dtype)
    assert not supports(x, weight)
    with pytest.raises(NotImplementedError, match=reason):
        large_matmul(x, weight, implementation="sm90")


@pytest.mark.parametrize("is_gated", [False, True])
def test_xla(is_gated):
    x, weight, activation, want = make_case(num_rows=70, outputs=40, depth=24, is_gated=is_gated, dtype=jnp.float32)
    got = large_matmul(x, weight, activation=activation)
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "weight", "options", "reason"),
    [
        ((4, 8), (2, 6, 8), {}, r"must be \[N, K\]"),
        ((4, 8), (6, 8), {"activation": jax.nn.silu}, "gate and up"),
        ((4, 8), (6, 7), {}, "does not fit"),
    ],
)
def test_what_does_not_fit_is_said(x, weight, options, reason):
    with pytest.raises(ValueError, match=reason):
        large_matmul(jnp.zeros(x), jnp.zeros(weight), **options)


ON_A_GPU = {
    "ends inside tiles": {"num_rows": 301, "outputs": 1032, "depth": 320},
    "fewer rows than a tile": {"num_rows": 65, "outputs": 72, "depth": 64},
    "many tiles": {"num_rows": 4099, "outputs": 6144, "depth": 1024},
    "two rounds": {"num_rows": 256, "outputs": 14_336, "depth": 512},
}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case, is_gated, dtype):
    x, weight, activation, want = make_case(**ON_A_GPU[case], is_gated=is_gated, dtype=dtype)
    run = functools.partial(large_matmul, activation=activation, implementation="sm90")
    got, again = (run(x, weight) for _ in range(2))
    check(got, want)
    assert (got == again).all()
