"""The best experts of a token, and tokens in the order of their experts: what stands around the matmuls of a mixture.

XLA sorts for both. On a GPU that is several kernels, some of them long; comparing all with all is one for a few hundred
values, which fuses with what uses it. On a CPU the comparisons cost more than a sort.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.batch import Kernels

MAX_COMPARISONS = 2**22
"""Of all with all: enough for 256 tokens with 8 of 128 experts. More take XLA minutes to compile."""


def top_k(
    preferences: Float[Array, "T X"], values: Float[Array, "T X"], k: int, *, kernels: Kernels
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """The `values` at the k largest `preferences` of each row and their indices, best first, of equals the first.

    NaN among a row's preferences makes its results meaningless, and no other row's.
    """
    if kernels == "xla" or preferences.size * preferences.shape[1] > MAX_COMPARISONS:
        _, chosen = jax.lax.top_k(preferences, k)
        return jnp.take_along_axis(values, chosen, axis=1), chosen
    index = jnp.arange(preferences.shape[1])
    own, other = preferences[:, :, None], preferences[:, None, :]
    is_before = index[None, None, :] < index[None, :, None]
    rank = jnp.sum((other > own) | ((other == own) & is_before), axis=2, dtype=jnp.int32)
    is_at = rank[:, None, :] == jnp.arange(k)[None, :, None]
    # By sums and not by gathers, which would be kernels of their own.
    chosen = jnp.sum(jnp.where(is_at, index[None, None], 0), axis=2)
    return jnp.sum(jnp.where(is_at, values[:, None], 0), axis=2), chosen


def order_by_group(group: Int[Array, " M"], *, kernels: Kernels) -> tuple[Int[Array, " M"], Int[Array, " M"]]:
    """The entries in the order of their groups, those of a group as they came, and each entry's place in that order."""
    num_entries = group.shape[0]
    entry = jnp.arange(num_entries, dtype=jnp.int32)
    if kernels == "xla" or num_entries**2 > MAX_COMPARISONS:
        order = jnp.argsort(group).astype(jnp.int32)
        return order, jnp.zeros_like(order).at[order].set(entry, unique_indices=True, mode="promise_in_bounds")
    key = group * num_entries + entry  # one comparison: two and their conjunction would be a matrix in memory
    place = jnp.sum(key[None] < key[:, None], axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(place[None] == entry[:, None], entry[None], 0), axis=1), place


def count_groups(group: Int[Array, " M"], num_groups: int, *, kernels: Kernels) -> Int[Array, " X"]:
    """How many entries each of the groups [0, num_groups) has."""
    if kernels == "xla":
        return jnp.zeros(num_groups, jnp.int32).at[group].add(1, mode="drop")
    return jnp.sum(group[None] == jnp.arange(num_groups)[:, None], axis=1, dtype=jnp.int32)
