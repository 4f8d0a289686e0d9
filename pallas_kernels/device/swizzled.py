"""Arrays in shared memory whose bytes are swizzled, as TMA stores and wgmma reads them."""

from typing import Any, cast

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def tiled(num_columns: int, *, itemsize: int = 2) -> tuple[Any, Any]:
    """Return the transforms of an array of rows for wgmma: tiles of 8 rows of up to 128 bytes, which are swizzled."""
    swizzle = plgpu.find_swizzle(num_columns * itemsize * 8)
    # Any: pyright takes them for abstract classes.
    return cast(Any, plgpu.TilingTransform)((8, swizzle // itemsize)), cast(Any, plgpu.SwizzleTransform)(swizzle)


def views(*shape: int, dtype: Any) -> Any:
    """Return two views of the same bytes: one as wgmma reads them, and one as boxes, which may begin at any row."""
    transforms = tiled(shape[-1], itemsize=jnp.dtype(dtype).itemsize)
    return plgpu.RefUnion(*(plgpu.SMEM(shape, dtype, transforms=each) for each in (transforms, transforms[1:])))
