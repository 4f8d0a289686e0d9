"""`grouped_matmul` in XLA: a loop over the tiles of the used experts on a CPU, `lax.ragged_dot_general` elsewhere."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

TILES = (1, 8, 64)
"""Rows that one turn of the loop multiplies."""
FEWEST_ROWS = (1, 2, 32)
"""Minimum remaining rows of a group for which an iteration processes each of the TILES; the largest one is used.

On two cores with weights of 1024 x 1024 in float32 an iteration of 8 rows takes 0.4 ms, as does one of 1 row, since it
is bound by reading the weight; one of 64 rows takes 2.2 ms.
"""


def grouped_matmul_xla(
    x: Float[Array, "M K"],
    weight: Float[Array, "X *halves N K"],
    group_sizes: Int[Array, " X"],
    *,
    bias: Float[Array, "X *halves N"] | None,
    activation: Callable[[Array, Array], Array] | None,
) -> Float[Array, "M N"]:
    """See `grouped_matmul`."""
    num_groups, depth = weight.shape[0], weight.shape[-1]
    # ragged_dot is dense over the groups on a CPU; the loop only has the iterations that the rows need, counted on the
    # device.
    matrices = weight.reshape(num_groups, -1, depth)
    y = lax.platform_dependent(x, matrices, group_sizes, cpu=_loop, default=ragged_dot)
    return finished(y, group_sizes, bias=bias, activation=activation)


def finished(
    y: Float[Array, "M HN"],
    group_sizes: Int[Array, " X"],
    *,
    bias: Float[Array, "X *halves N"] | None,
    activation: Callable[[Array, Array], Array] | None,
) -> Float[Array, "M N"]:
    """Add the bias of each row's group to products, and apply the activation to their halves."""
    if bias is not None:
        num_groups = len(group_sizes)
        of_row = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(y)), side="right")
        y += bias.reshape(num_groups, -1)[jnp.minimum(of_row, num_groups - 1)].astype(y.dtype)
    return y if activation is None else activation(*jnp.split(y, 2, axis=1))


def _precision(x: Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def ragged_dot(
    x: Float[Array, "M K"], weight: Float[Array, "X N K"], group_sizes: Int[Array, " X"]
) -> Float[Array, "M N"]:
    """Run XLA's own operation, which multiplies every row by every group's weight on a CPU."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return lax.ragged_dot_general(
        x, weight, group_sizes, numbers, precision=_precision(x), preferred_element_type=x.dtype
    )


def _loop(x: Array, weight: Array, group_sizes: Array) -> Array:
    def multiply(rows: Array, group: Array) -> Array:
        matrix = lax.dynamic_index_in_dim(weight, group, keepdims=False)
        return lax.dot_general(
            rows, matrix, (((1,), (1,)), ((), ())), precision=_precision(x), preferred_element_type=x.dtype
        )

    return multiply_used_groups(x, group_sizes, multiply, num_outputs=weight.shape[1])


def multiply_used_groups(
    x: Float[Array, "M K"],
    group_sizes: Int[Array, " X"],
    multiply: Callable[[Array, Array], Array],
    *,
    num_outputs: int,
) -> Float[Array, "M N"]:
    """Return `multiply(rows, group)`, [rows, N], for the rows of each group, a few of them at a time.

    It is called for groups that have rows only, whatever form their matrices have.
    """
    num_rows = x.shape[0]
    ends = jnp.cumsum(group_sizes)
    # A tile may run past its group: groups are processed in order, and the next one overwrites the wrong rows.
    x = jnp.pad(x, ((0, TILES[-1]), (0, 0)))

    def multiply_tile(tile: int, y: Array, row: Array, group: Array) -> Array:
        product = multiply(lax.dynamic_slice_in_dim(x, row, tile), group)
        return lax.dynamic_update_slice_in_dim(y, product, row, axis=0)

    branches = [functools.partial(multiply_tile, tile) for tile in TILES]
    tiles, fewest_rows = jnp.array(TILES), jnp.array(FEWEST_ROWS)

    def turn(state: tuple[Array, Array]) -> tuple[Array, Array]:
        row, y = state
        group = jnp.searchsorted(ends, row, side="right")
        rows_left = ends[group] - row
        choice = jnp.sum(rows_left >= fewest_rows) - 1
        y = lax.switch(choice, branches, y, row, group)
        return row + jnp.minimum(tiles[choice], rows_left), y

    y = jnp.zeros((num_rows + TILES[-1], num_outputs), x.dtype)
    _, y = lax.while_loop(lambda state: state[0] < ends[-1], turn, (jnp.zeros((), ends.dtype), y))
    return y[:num_rows]
