"""The matmuls of a decode step: XLA's against the float64 definition; the Hopper kernel interpreted with race
detection, compiled for an H200 that is not there, and run where there is one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from kernel_results import in_float, relative_error, silu

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.small_matmul import Normed, matmul, matmul_reference, matmul_then_norm, rms_norm_reference
from pallas_kernels.small_matmul.sm90 import Config, Epilogue, matmul_sm90

# Relative to the norm of the result, which is rounded to 8 or 11 bits.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2.5e-3, jnp.float16: 4e-4}
EPS = 1e-5


def arrays(shapes, dtype) -> list[Any]:
    rng = np.random.default_rng(len(shapes))
    return [None if shape is None else jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def check(got, want, factor=1.0):
    assert relative_error(got, want) <= factor * TOLERANCE[got.dtype.type]


def make_case(num_rows, outputs, depth, *, is_gated=False, has_residual=False, dtype=jnp.bfloat16):
    """Return x, weight, residual, and the expected results."""
    of_weight = (2, outputs) if is_gated else (outputs,)
    shapes = [(num_rows, depth), (*of_weight, depth), (num_rows, outputs) if has_residual else None]
    x, weight, residual = arrays(shapes, dtype)
    weight = (weight * depth**-0.5).astype(dtype)
    activation = silu if is_gated else None
    want = matmul_reference(*in_float((x, weight)), residual=in_float(residual), activation=activation)
    return x, weight, {"residual": residual}, want


def run(x, weight, *, is_gated=False, implementation, output_dtype=None):
    activation = jax.nn.silu if is_gated else None
    return matmul(x, weight, activation=activation, output_dtype=output_dtype, implementation=implementation)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("is_gated", [False, True])
def test_xla_matches_the_definition(is_gated, dtype):
    x, weight, _, want = make_case(5, 24, 32, is_gated=is_gated, dtype=dtype)
    got = run(x, weight, is_gated=is_gated, implementation="xla")
    assert got.dtype == dtype
    check(got, want, factor=3)  # XLA rounds after each operation


def check_norm_between(implementation, num_rows, depth, outputs, dtype):
    """Two matmuls with a norm between them."""
    x, first, options, y_want = make_case(num_rows, depth, depth, has_residual=True, dtype=dtype)
    _, second, _, _ = make_case(num_rows, outputs, depth, dtype=dtype)
    [gain] = arrays([(depth,)], jnp.float32)
    residual = 8 * options["residual"]  # without rounding
    y, normed = matmul_then_norm(x, first, residual=residual, gain=gain, eps=EPS, implementation=implementation)
    check(y, y_want + 7 * in_float(options["residual"]))
    want = rms_norm_reference(in_float(y), in_float(gain), EPS) @ in_float(second).T
    for finishing in ("xla", implementation):
        check(matmul(normed, second, implementation=finishing), want, factor=1.5)


def test_norm_between_xla_matmuls():
    check_norm_between("xla", 5, 64, 24, jnp.bfloat16)


def test_an_unfinished_norm_is_finished_by_xla():
    x, gain, weight = arrays([(3, 32), (32,), (8, 32)], jnp.float32)
    squares = jnp.full((64, 8), jnp.nan).at[:3].set(jnp.sum(x * x, axis=1, keepdims=True) / 8)
    got = matmul(Normed(x * gain[None], squares, EPS), weight)
    check(got, rms_norm_reference(in_float(x), in_float(gain), EPS) @ in_float(weight).T)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"weight": (32, 24)}, "does not fit a weight"),
        ({"weight": (2, 24, 32)}, r"weight must be \[N, K\]"),
        ({"activation": jax.nn.silu}, r"weight must be \[2, N, K\]"),
    ],
)
def test_bad_arguments_are_refused(arguments, error):
    shapes: dict[str, Any] = {"x": (5, 32), "weight": (24, 32)} | arguments
    values: dict[str, Any] = {
        name: jnp.zeros(value) if isinstance(value, tuple) else value for name, value in shapes.items()
    }
    with pytest.raises(ValueError, match=error):
        matmul(values.pop("x"), values.pop("weight"), **values)


def test_a_residual_of_other_rows_is_refused():
    x, weight, gain = jnp.zeros((5, 32)), jnp.zeros((24, 32)), jnp.zeros(24)
    with pytest.raises(ValueError, match=r"residual must have shape \(5, 24\)"):
        matmul_then_norm(x, weight, residual=jnp.zeros((4, 24)), gain=gain, eps=EPS)


@pytest.mark.parametrize(
    ("x", "weight", "dtype", "reason"),
    [
        ((65, 64), (64, 64), jnp.bfloat16, "at most 64 rows"),
        ((8, 64), (64, 64), jnp.float32, "bfloat16 or both float16"),
        ((8, 96), (64, 96), jnp.bfloat16, "multiples of 64"),
        ((8, 64), (68, 64), jnp.bfloat16, "multiples of 8"),
        ((8, 64), (56, 64), jnp.bfloat16, "at least 64"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(x, weight, dtype, reason):
    with pytest.raises(NotImplementedError, match=reason):
        matmul(jnp.zeros(x, dtype), jnp.zeros(weight, dtype), implementation="sm90")


INTERPRETED = {
    "plain": ({"num_rows": 8, "outputs": 40, "depth": 256}, Config(outputs=16, block_k=64, stages=2)),
    "gated": (
        {"num_rows": 16, "outputs": 16, "depth": 128, "is_gated": True, "dtype": jnp.float16},
        Config(outputs=16, block_k=128, stages=2),
    ),
}


@pytest.mark.parametrize("case", quick_first(INTERPRETED))
def test_interpreted_without_races(capsys, case):
    problem, config = INTERPRETED[case]
    x, weight, _, want = make_case(**problem)
    activation = jax.nn.silu if problem.get("is_gated") else None
    run = functools.partial(matmul_sm90, config=config, epilogue=Epilogue(activation=activation), interpret=True)
    got, _, _ = interpret(capsys, run, x, weight)
    check(got, want)


def test_interpreted_norm(capsys):
    x, weight, options, want = make_case(8, 32, 64, has_residual=True)
    [gain] = arrays([(32,)], jnp.float32)
    config = Config(outputs=16, block_k=64, stages=2)
    run = functools.partial(matmul_sm90, config=config, epilogue=Epilogue(), interpret=True)
    y, values, squares = interpret(capsys, run, x, weight, **options, gain=gain)
    check(y, want)
    check(values, in_float(y) * in_float(gain))
    np.testing.assert_allclose(np.sum(squares[:8], axis=1), np.sum(in_float(y) ** 2, axis=1), rtol=1e-5)


@functools.cache
def compiled(num_rows, outputs, depth, *, is_gated=False, dtype=jnp.bfloat16, output_dtype=None, num_layers=1):
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def layers(x, weights, residual, gain):
        results = []
        for weight in weights:
            if is_gated or output_dtype:
                activation = jax.nn.gelu if is_gated else None
                normed = Normed(x, jnp.ones((64, 136)), EPS)
                results.append(
                    matmul(normed, weight, activation=activation, output_dtype=output_dtype, implementation="sm90")
                )
            else:
                results.append(
                    matmul_then_norm(x, weight, residual=residual, gain=gain, eps=EPS, implementation="sm90")
                )
        return results

    weight = of(2, outputs, depth) if is_gated else of(outputs, depth)
    return compile_for_h200(layers, of(num_rows, depth), [weight] * num_layers, of(num_rows, outputs), of(outputs))


GATED = {"outputs": 14336, "depth": 4096, "is_gated": True}
LOGITS = {"outputs": 128256, "depth": 4096, "output_dtype": jnp.float32}


# Each with 64 rows, and each kind of results with one, too.
@pytest.mark.parametrize(
    ("num_rows", "case"),
    quick_first(
        [
            (1, {"outputs": 4096, "depth": 4096}),
            (64, {"outputs": 4096, "depth": 4096}),
            (64, {"outputs": 2048, "depth": 8192}),  # its ring has as many steps as it may
            (64, {"outputs": 4856, "depth": 192, "dtype": jnp.float16}),
            (64, {"outputs": 768, "depth": 512}),  # two steps
            (1, GATED),
            (64, GATED),
            (1, LOGITS),
            (64, LOGITS),
            (64, LOGITS | {"outputs": 50264}),  # no multiple of 16
            (64, LOGITS | {"outputs": 18992, "depth": 3584}),  # none of 32
            (64, {"outputs": 65544, "depth": 576, "dtype": jnp.float16}),
        ]
    ),
    ids=str,
)
def test_compiles_without_spilling(num_rows, case):
    [kernel] = compiled(num_rows, **case).kernels
    assert kernel.spill_bytes == 0


@pytest.mark.slow
def test_layers_share_a_kernel():
    one, two = (compiled(8, 4096, 4096, num_layers=num_layers) for num_layers in (1, 2))
    assert two.num_launches == 2 * one.num_launches == 2
    assert len(two.kernels) <= 1


ON_A_GPU = {
    "qkv": {"outputs": 6144, "depth": 4096},
    "o": {"outputs": 4096, "depth": 4096},
    "gate and up": {"outputs": 14336, "depth": 4096, "is_gated": True},
    "down": {"outputs": 4096, "depth": 14336, "dtype": jnp.float16},
    "small": {"outputs": 896, "depth": 896},
    "odd": {"outputs": 4856, "depth": 192},
    "odd, gated": {"outputs": 4856, "depth": 832, "is_gated": True},
    "tiny": {"outputs": 64, "depth": 64},
    "two steps": {"outputs": 768, "depth": 512},  # which the compiler unrolls
    "two steps, gated": {"outputs": 1024, "depth": 512, "is_gated": True},
    "three steps": {"outputs": 768, "depth": 768, "dtype": jnp.float16},
    "many tiles": {"outputs": 65_536, "depth": 576, "dtype": jnp.float16},
}


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 13, 64])
@pytest.mark.parametrize("case", ON_A_GPU)
def test_on_a_gpu(case, num_rows):
    problem = ON_A_GPU[case]
    x, weight, _, want = make_case(num_rows, **problem)
    got, again = (run(x, weight, is_gated=problem.get("is_gated", False), implementation="sm90") for _ in range(2))
    check(got, want)
    np.testing.assert_array_equal(in_float(got), in_float(again))


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [4, 33])
@pytest.mark.parametrize("depth", [64, 4096, 4288])
def test_norm_between_matmuls_on_a_gpu(num_rows, depth):
    check_norm_between("sm90", num_rows, depth, 1000, jnp.bfloat16)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [1, 3, 16, 29, 33, 64])
@pytest.mark.parametrize(("vocab_size", "depth"), [(32_000, 256), (50_264, 4096), (17_000, 576), (1000, 512)])
def test_float32_logits_on_a_gpu(num_rows, vocab_size, depth):
    x, weight, _, want = make_case(num_rows, vocab_size, depth)
    got = run(x, weight, implementation="sm90", output_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    check(got, want)
