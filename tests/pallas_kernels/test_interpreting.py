"""The tests of kernels would find a race: this kernel has one, if its warpgroups do not wait for each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import interpret
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.mark.parametrize("waits", [True, False])
def test_a_race_is_seen(capsys, waits):
    def body(x, out, shared, is_there):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            shared[...] = x[...]
            plgpu.barrier_arrive(is_there)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _():
            if waits:
                plgpu.barrier_wait(is_there)
            out[...] = shared[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=(plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()),
        num_threads=2,
        thread_name="warpgroup",
    )
    x = jnp.arange(128, dtype=jnp.float32)
    if waits:
        np.testing.assert_array_equal(interpret(capsys, kernel, x), x)
    else:
        with pytest.raises(AssertionError, match="RACE DETECTED"):
            interpret(capsys, kernel, x)
