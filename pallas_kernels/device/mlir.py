"""Short names for what inlined Mosaic GPU code says again and again."""

from collections.abc import Callable
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.jax_internals import arith, ir, vector

REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT((128,))
"""Type of a number that all threads of a warpgroup have, see `splat`."""


def inline(run: Callable[..., Any], *arg_types: Any, out: Any = None) -> Callable[..., Any]:
    """Return a function for Pallas kernels that is `run`, which makes operations of MLIR."""
    return cast(Any, plgpu.inline_mgpu)(arg_types=arg_types, return_type=out)(run)


def splat(value: Any) -> Any:
    """Return an integer as an argument of type SCALAR."""
    return jnp.full((128,), value, jnp.int32)


def value_of(scalar: Any) -> Any:
    """Return the value of an argument of type SCALAR."""
    [value] = scalar.registers.flat
    return value


def elements_of(values: Any, number: int) -> list[Any]:
    """Return the first elements of a vector."""
    return [vector.extract(values, [], [i]) for i in range(number)]


def vector_of(values: list[Any]) -> Any:
    """Return a vector of these values."""
    return vector.from_elements(ir.VectorType.get((len(values),), values[0].type), values)


def strided(registers: list[Any], layout: Any) -> Any:
    """Return the array of integers of which a thread has these vectors, in a layout WG_STRIDED."""
    array = np.empty(len(registers), dtype=object)
    array[:] = registers
    return mgpu.FragmentedArray(_registers=array, _layout=layout.to_mgpu(), _is_signed=True)


def thread() -> Any:
    """Return the index of the thread in its warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), const_i32(128))


def const_i32(value: int) -> Any:
    """Return a constant of 32 bits."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def const_index(value: int) -> Any:
    """Return a constant index."""
    return arith.constant(ir.IndexType.get(), value)


def as_index(value: Any) -> Any:
    """Return an integer as an index."""
    return arith.index_cast(ir.IndexType.get(), value)
