"""The scatter into the pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import write_kv
from pallas_kernels.paging import Pages


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_writes_land_where_they_belong(dtype):
    rng = np.random.default_rng(5)
    shape = (6, 2, 4, 3)
    before = Pages(*(jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2)))
    k, v = (jnp.asarray(rng.standard_normal((5, 2, 3)), jnp.float32) for _ in range(2))
    index = np.array([7, 0, 23, 24, 31], np.int32)  # the last two are padding
    want = list(map(np.array, before[:2]))
    for token, place in enumerate(index[:3]):
        for pages, values in zip(want, (k, v), strict=True):
            pages[place // 4, :, place % 4] = values[token].astype(dtype)
    got = jax.jit(write_kv)(before, k, v, jnp.asarray(index))
    for a, b in zip(got[:2], want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
