"""Products of bfloat16 rows and codes on a CPU, with instructions for products of bfloat16 and without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers import codes_by_xla
from jaxserve.quantization.common import values_of
from jaxserve.quantization.scheme import SCHEMES

BFLOAT16 = jnp.dtype(jnp.bfloat16)


@pytest.mark.parametrize("has_narrow_products", [False, True])
@pytest.mark.parametrize("num_rows", [1, 12, 70])
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_are_multiplied_by_rounded_values(monkeypatch, name, num_rows, has_narrow_products):
    """The result in float32 shows that values are rounded to bfloat16, once, and that nothing else is rounded to it."""
    monkeypatch.setattr(codes_by_xla, "HAS_NARROW_PRODUCTS", has_narrow_products)
    monkeypatch.setattr(codes_by_xla, "MANY_ROWS", 0)
    monkeypatch.setattr(codes_by_xla, "TILE", 32 * 256)
    scheme, rng = SCHEMES[name], np.random.default_rng(0)
    parts = scheme.quantize(rng.normal(size=(72, 256)).astype(np.float32))
    x = jnp.asarray(rng.normal(size=(num_rows, 256)), BFLOAT16)

    def multiply(x, rows):
        return codes_by_xla.multiply_codes(x, scheme, rows, dtype=BFLOAT16, output_dtype=jnp.dtype(jnp.float32))

    y = jax.jit(multiply)(x, jax.tree.map(jnp.asarray, parts))
    bits = values_of(scheme, parts).astype(np.float32).view(np.uint32) + np.uint32(2**15)  # ties away from zero
    values = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ values.T, rtol=1e-5, atol=1e-4)
