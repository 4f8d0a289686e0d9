"""What is reported of a compilation for an H200 without one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.deviceless import compile_for_h200

POOL = jax.ShapeDtypeStruct((64, 8, 16, 128), jnp.bfloat16)


def write(pool):
    return pool.at[3].set(jnp.ones((), pool.dtype))


def test_copy_of_a_pool_is_seen():
    assert not compile_for_h200(write, POOL, donate_argnums=(0,)).copies_of(POOL.shape)
    assert len(compile_for_h200(write, POOL).copies_of(POOL.shape)) == 1


def test_many_kernels_are_one_command_buffer():
    def chain(x, w):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x

    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    program = compile_for_h200(chain, x, w)
    assert program.thunks == {"kCommandBuffer": 1}
    assert program.num_launches >= 6


@pytest.mark.parametrize(("values_per_thread", "spills"), [(8, False), (320, True)])
def test_spilled_registers_are_seen(values_per_thread, spills):
    """A thread has at most 255 registers: 320 values that are all needed once their sum is known do not fit."""
    size = 128 * values_per_thread

    def body(x, out):
        values = plgpu.load(x, layout=plgpu.Layout.WG_STRIDED((size,), 4))
        out[...] = values * jnp.full((size,), jnp.sum(values))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        grid=(1,),
        grid_names=("i",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    program = compile_for_h200(kernel, jax.ShapeDtypeStruct((size,), jnp.float32))
    [resources] = program.kernels
    assert (resources.spill_bytes > 0) == spills
    assert 0 < resources.num_registers <= 255


ROWS, GAIN = jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
FLAT = jax.ShapeDtypeStruct((5 * 4608,), jnp.bfloat16)


def normed(x, update, gain):
    return add_rms_norm(x, update.reshape(x.shape), gain, eps=1e-5, implementation="sm90")


def read_at(place):
    return lambda x, flat, gain: normed(x, flat[place : place + 4096], gain)


def written_at(place):
    def run(x, flat, gain):
        total, y = normed(x, x, gain)
        return total, flat.at[place : place + 4096].set(y.reshape(-1))

    return run


def read_in_turns(stride):
    def run(x, flat, gain):
        def turn(index, x):
            return normed(x, jax.lax.dynamic_slice_in_dim(flat, index * stride, 4096), gain)[0]

        return jax.lax.fori_loop(0, 5, turn, x)

    return run


@pytest.mark.parametrize("kind", [read_at, written_at, read_in_turns])
@pytest.mark.parametrize(("place", "is_refused"), [(4096 + 128, False), (4096 + 8, True)])
def test_parts_of_arrays_that_kernels_would_refuse(kind, place, is_refused):
    """Kernels have slices of whole multiples of 256 bytes in place, wherever these begin."""
    compiled = functools.partial(compile_for_h200, kind(place), ROWS, FLAT, GAIN)
    if not is_refused:
        assert "dynamic-slice-fusion" in compiled().compiled.as_text()
        return
    with pytest.raises(RuntimeError, match="no multiple of 256 bytes"):
        compiled()
