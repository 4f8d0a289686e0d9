"""Sum and norm against float64, in every implementation that runs here; the Hopper kernel compiled for an H200 too."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from interpreting import interpret

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.deviceless import compile_for_h200

EPS = 1e-5


def arrays(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, update = rng.standard_normal((2, *shape))
    return tuple(
        jnp.asarray(a.astype(np.float32)).astype(dtype) for a in (x, 3 * update, rng.standard_normal(shape[1]))
    )


def check(got, x, update, weight):
    total, normed = got
    assert total.dtype == normed.dtype == x.dtype
    np.testing.assert_array_equal(total, x + update)
    wide = np.asarray(total.astype(jnp.float32)).astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * np.asarray(weight.astype(jnp.float32))
    # Half a unit in the last place; XLA may compute the norm from a sum that it has not rounded, which adds as much
    # again.
    rounding = {jnp.bfloat16: 2**-8, jnp.float16: 2**-11, jnp.float32: 2e-6}[x.dtype.type]
    np.testing.assert_allclose(np.asarray(normed.astype(jnp.float32)), want, rtol=2 * rounding, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_xla(dtype):
    case = arrays((5, 96), dtype)
    check(jax.jit(functools.partial(add_rms_norm, eps=EPS))(*case), *case)


# Eight, four, two and one value a load.
@pytest.mark.parametrize(("num_rows", "size"), quick_first([(3, 1024), (1, 1536), (2, 256), (4, 896)]))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sm90(capsys, num_rows, size, dtype):
    case = arrays((num_rows, size), dtype)
    call = jax.jit(functools.partial(add_rms_norm, eps=EPS, implementation="sm90"))
    if jax.default_backend() == "gpu":
        check(call(*case), *case)
        return
    check(interpret(capsys, call, *case), *case)


def test_a_nan_stays_in_its_row():
    x, update, weight = arrays((3, 64), jnp.float32)
    total, normed = add_rms_norm(x.at[1, 7].set(jnp.nan), update, weight, eps=EPS)
    assert jnp.isnan(total).sum() == 1
    assert jnp.isnan(normed).all(axis=1).tolist() == [False, True, False]
    assert jnp.isnan(normed).any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("size", quick_first([896, 4096, 16384]))
def test_on_an_h200_it_is_one_kernel_without_spills(size):
    def layers(x, update, weight):
        for _ in range(6):
            x, update = add_rms_norm(x, update, weight, eps=EPS, implementation="sm90")
        return x, update

    x = jax.ShapeDtypeStruct((16, size), jnp.bfloat16)
    program = compile_for_h200(layers, x, x, jax.ShapeDtypeStruct((size,), jnp.bfloat16))
    assert program.spill_bytes == 0
    assert program.thunks == {"kCommandBuffer": 1}
    assert program.num_launches == 6
    assert len(program.kernels) <= 2  # compiled for the first layer, and for all the others


@pytest.mark.parametrize(("size", "dtype"), [(96, jnp.bfloat16), (16512, jnp.bfloat16), (1024, jnp.float32)])
def test_what_the_kernel_cannot_do(size, dtype):
    x = jnp.zeros((1, size), dtype)
    with pytest.raises(NotImplementedError, match=f"got {size} in {x.dtype}"):
        add_rms_norm(x, x, jnp.zeros(size, dtype), eps=EPS, implementation="sm90")


def test_unknown_implementation():
    x = jnp.zeros((1, 8))
    with pytest.raises(ValueError, match="'sm90'"):
        inspect.unwrap(add_rms_norm)(x, x, jnp.zeros(8), eps=EPS, implementation="triton")
