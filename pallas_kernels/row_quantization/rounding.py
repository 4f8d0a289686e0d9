"""Rows of 8-bit codes, and how values are rounded to them: the same arithmetic in XLA and in kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device.codes import Code

CODES = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
"""Types of the codes that rows are rounded to."""
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Magnitude of the largest code, which the largest value of a row becomes."""
SMALLEST_SCALE = 1e-12
"""Scale of a row of zeros."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedRows:
    """Rows rounded to 8 bits: codes times the scale of their row."""

    codes: Any
    """[M, K] of a type in CODES."""
    scales: Any
    """[M], float32."""
    dtype: Any = dataclasses.field(metadata={"static": True})
    """Type of the values before they were rounded."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the rows."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]


def scale_of(largest: Any, code: Code) -> Any:
    """Return the scale of a row whose largest magnitude this is."""
    return jnp.maximum(largest * (1 / LARGEST[code]), SMALLEST_SCALE)


def codes_of(values: Any, scale: Any, code: Code) -> Any:
    """Return the codes of float32 values; `scale` has as many axes as they have, or none."""
    scaled = values * (1 / scale)
    return (scaled if code == "fp8" else jnp.round(scaled)).astype(CODES[code])
