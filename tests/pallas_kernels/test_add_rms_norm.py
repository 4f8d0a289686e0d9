"""Sum and norm against float64, in every implementation that runs here; the Hopper kernel compiled for an H200 too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret
from kernel_results import in_float

from pallas_kernels.add_rms_norm import add_normed_update, add_rms_norm
from pallas_kernels.deviceless import compile_for_h200

EPS = 1e-5
ROUNDING = {jnp.bfloat16: 2**-8, jnp.float16: 2**-11, jnp.float32: 2e-6}
"""Half a unit in the last place. XLA may compute a norm from a value that it has not rounded, which adds as much."""


def arrays(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, update = rng.standard_normal((2, *shape))
    return tuple(
        jnp.asarray(a.astype(np.float32)).astype(dtype) for a in (x, 3 * update, rng.standard_normal(shape[1]))
    )


def gain_of(weight):
    """Return another gain of the same size, in float32 as Gemma has it."""
    return 2 - weight.astype(jnp.float32)[::-1]


def norm_of(wide, weight):
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * in_float(weight)


def add(x, update, weight, **options):
    """Call the operation: without a weight, that which has no norm of the sum."""
    if weight is None:
        return add_normed_update(x, update, eps=EPS, **options), None
    return add_rms_norm(x, update, weight, eps=EPS, **options)


def check(got, x, update, weight, *, update_gain=None, update_scale=1.0):
    total, normed = got
    rounding = ROUNDING[x.dtype.type]
    assert total.dtype == x.dtype
    if update_gain is None and update_scale == 1.0:
        np.testing.assert_array_equal(total, x + update)
    else:
        added = in_float(update) if update_gain is None else norm_of(in_float(update), update_gain)
        added = added * update_scale
        want = in_float(x) + added
        # Each of up to three results is rounded.
        error = np.abs(in_float(total) - want) / (np.abs(added) * 2 + np.abs(want))
        assert error.max() < rounding
    if weight is None:
        assert normed is None
        return
    assert normed.dtype == x.dtype
    want = norm_of(in_float(total), weight)
    np.testing.assert_allclose(in_float(normed), want, rtol=2 * rounding, atol=1e-6)


def case_of(shape, dtype, updates):
    """Return arrays and options of a call: with a norm of the sum, unless the update is the last."""
    x, update, weight = arrays(shape, dtype)
    options = {}
    if "normalised" in updates:
        options["update_gain"] = gain_of(weight)
    if "scaled" in updates:
        options["update_scale"] = 0.22
    return (x, update, None if "last" in updates else weight), options


UPDATES = ["normalised", "normalised, last", "scaled", "normalised and scaled", "normalised and scaled, last"]


@pytest.mark.parametrize("updates", ["as they are", *UPDATES])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_xla(dtype, updates):
    case, options = case_of((5, 96), dtype, updates)
    call = jax.jit(add, static_argnames="update_scale")
    check(call(*case, **options), *case, **options)


# Eight, four, two and one value a load, and rows of two overlapping parts.
@pytest.mark.parametrize(
    ("num_rows", "size"), quick_first([(3, 1024), (2, 2880), (1, 1536), (2, 256), (4, 896), (2, 136)], 2)
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sm90(capsys, num_rows, size, dtype):
    check_sm90(capsys, *case_of((num_rows, size), dtype, "as they are"))


# Gemma 3 4B, Gemma 2 9B, OLMo 2 7B, and rows whose gains are not held.
@pytest.mark.parametrize("size", quick_first([2560, 2880, 3584, 4096, 8192]))
@pytest.mark.parametrize("updates", quick_first(UPDATES, 2))
def test_sm90_with_updates_to_normalise(capsys, size, updates):
    check_sm90(capsys, *case_of((2, size), jnp.bfloat16, updates))


def check_sm90(capsys, case, options):
    call = jax.jit(functools.partial(add, implementation="sm90"), static_argnames="update_scale")
    if jax.default_backend() == "gpu":
        check(call(*case, **options), *case, **options)
        return
    check(interpret(capsys, call, *case, **options), *case, **options)


def test_a_nan_stays_in_its_row():
    x, update, weight = arrays((3, 64), jnp.float32)
    total, normed = add_rms_norm(x.at[1, 7].set(jnp.nan), update, weight, eps=EPS)
    assert jnp.isnan(total).sum() == 1
    assert jnp.isnan(normed).all(axis=1).tolist() == [False, True, False]
    assert jnp.isnan(normed).any(axis=1).tolist() == [False, True, False]


def compiled_layers(size, *, gain_dtype=None, has_weight=True):
    """Compile six calls for an H200; their updates are normalised if there is a `gain_dtype`."""

    def layers(x, update, weight, gain):
        normed = None
        for _ in range(6):
            x, normed = add(x, update, weight, update_gain=gain, implementation="sm90")
            update = update if normed is None else normed
        return x, normed

    x, weight = jax.ShapeDtypeStruct((16, size), jnp.bfloat16), jax.ShapeDtypeStruct((size,), jnp.bfloat16)
    gain = None if gain_dtype is None else weight.update(dtype=gain_dtype)
    return compile_for_h200(layers, x, x, (gain or weight) if has_weight else None, gain)


def check_program(program):
    assert program.spill_bytes == 0
    assert program.thunks == {"kCommandBuffer": 1}
    assert program.num_launches == 6
    assert len(program.kernels) <= 2  # compiled for the first layer, and for all the others


@pytest.mark.parametrize("size", quick_first([896, 2880, 4096, 16376, 16384], 2))
def test_on_an_h200_it_is_one_kernel_without_spills(size):
    check_program(compiled_layers(size))


@pytest.mark.parametrize(
    ("size", "gain_dtype", "has_weight"),
    quick_first(
        [
            (2560, jnp.float32, True),
            (4096, jnp.bfloat16, False),
            (2880, jnp.float32, True),
            (3584, jnp.float32, True),
            (4096, jnp.bfloat16, True),
            (6144, jnp.float32, True),
            (16384, jnp.float32, True),
            (16384, jnp.float32, False),
        ]
    ),
)
def test_on_an_h200_it_normalises_updates_without_spills(size, gain_dtype, has_weight):
    check_program(compiled_layers(size, gain_dtype=gain_dtype, has_weight=has_weight))


@pytest.mark.parametrize(
    ("size", "dtype"), [(96, jnp.bfloat16), (1020, jnp.bfloat16), (16512, jnp.bfloat16), (1024, jnp.float32)]
)
def test_what_the_kernel_cannot_do(size, dtype):
    x = jnp.zeros((1, size), dtype)
    with pytest.raises(NotImplementedError, match=f"got {size} in {x.dtype}"):
        add_rms_norm(x, x, x[0], eps=EPS, implementation="sm90")
    with pytest.raises(NotImplementedError, match=f"got {size} in {x.dtype}"):
        add_normed_update(x, x, x[0], eps=EPS, implementation="sm90")
