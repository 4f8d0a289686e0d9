"""Tokens split over the devices along the mesh axis "data": each runs the layers for an equal share of a step's tokens.

Norms, projections and dense feed-forwards need nothing of other shards. Experts get the tokens of all shards
(an all-gather), and send back their sums (a reduce-scatter). Attention exchanges tokens for heads (Jacobs et al. 2023,
arXiv:2309.14509): for all tokens, a device attends with its share of the heads, whose keys and values it keeps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxserve.layers.sharding import DATA, names_of


@dataclasses.dataclass(frozen=True)
class TokenShards:
    """How the T tokens of a step are split: the first shards have ceil(T / count) each, and the last ones are padded.

    Its methods work where the axis "data" is manual, on arrays with an entry for each token.
    """

    count: int
    num_tokens: int

    def own(self, x: Array) -> Array:
        """Return the shard's entries of an array [T, ...] that every shard has."""
        size = -(-self.num_tokens // self.count)
        return jax.lax.dynamic_slice_in_dim(self._padded(x), jax.lax.axis_index(DATA) * size, size)

    def gather(self, x: Array) -> Array:
        """Return the entries of all shards, [T, ...]."""
        return jax.lax.all_gather(x, DATA, tiled=True)[: self.num_tokens]

    def scatter_sum(self, x: Array) -> Array:
        """Return the shard's entries of the sum of the shards' arrays [T, ...]."""
        return jax.lax.psum_scatter(self._padded(x), DATA, tiled=True)

    def of_all(self, x: Array, *, splits_heads: bool) -> Array:
        """Return the heads of all tokens [T, H, ...], of which `x` has those of own tokens: with `splits_heads` the
        shard's equal part of them.
        """
        if not splits_heads:
            return self.gather(x)
        return jax.lax.all_to_all(x, DATA, 1, 0, tiled=True)[: self.num_tokens]

    def of_own(self, x: Array, *, splits_heads: bool) -> Array:
        """Return the heads of own tokens, of which `x` has those of all tokens. Undoes `of_all`."""
        if not splits_heads:
            return self.own(x)
        return jax.lax.all_to_all(self._padded(x), DATA, 0, 1, tiled=True)

    def own_heads(self, x: Array) -> Array:
        """Return the entries of the shard's part of the heads in an array [H, ...] that every shard has."""
        size = len(x) // self.count
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(DATA) * size, size)

    def _padded(self, x: Array) -> Array:
        return jnp.pad(x, [(0, -self.num_tokens % self.count)] + [(0, 0)] * (x.ndim - 1))


def over_shards(run: Callable[..., tuple[Array, Any]], params: dict[str, Any], x: Array, batch: Any, cache: Any) -> Any:
    """Return what `run` makes of these arguments, with each device along "data" running its share of the tokens.

    `run` gets them with x [T, E] and `batch.layer_inputs` of own tokens, everything else of the batch of all tokens,
    and its shards of weights and caches; it returns the stream of own tokens and the cache.
    """
    tokens = TokenShards(jax.typeof(x).sharding.mesh.shape[DATA], len(x))
    padding = (0, -len(x) % tokens.count)
    own = {name: params[name] for name in ("layers", "norm") if name in params}
    split = dataclasses.replace(batch, tokens=tokens)
    of_batch = jax.tree.map(lambda _: PartitionSpec(), split)
    if batch.layer_inputs is not None:
        inputs = jnp.pad(batch.layer_inputs, [(0, 0), padding, (0, 0)])
        split = dataclasses.replace(split, layer_inputs=jax.sharding.reshard(inputs, PartitionSpec(None, DATA)))
        of_batch = dataclasses.replace(of_batch, layer_inputs=PartitionSpec(None, DATA))
    of_cache = jax.tree.map(_manual_spec, cache)

    def on_shard(params: dict[str, Any], x: Array, batch: Any, cache: Any) -> tuple[Array, Any]:
        x, cache = run(params, x, batch, cache)
        with jax.named_scope("residual_stream"):
            return tokens.gather(x), cache

    island = jax.shard_map(
        on_shard,
        in_specs=(jax.tree.map(_manual_spec, own), PartitionSpec(DATA), of_batch, of_cache),
        out_specs=(PartitionSpec(), of_cache),
        axis_names={DATA},
        check_vma=False,  # a kernel call does not say over which axes its outputs vary
    )
    x = jax.sharding.reshard(jnp.pad(x, [padding, (0, 0)]), PartitionSpec(DATA))
    return island(own, x, split, cache)


def _manual_spec(leaf: Any) -> PartitionSpec:
    """Return the part of an array's PartitionSpec that is of the axis "data"."""
    spec = jax.typeof(leaf).sharding.spec
    return PartitionSpec(*(DATA if DATA in names_of([on]) else None for on in spec))
