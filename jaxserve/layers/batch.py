"""The two pytrees that a model's forward pass reads besides its weights: the Batch of one step and the KVCache.

Both are made in `execution` and live here because models and layers, below it, take them as arguments. Their fields
are not checked at run time: jax rebuilds a pytree with leaves of other kinds too (shapes, shardings, placeholders).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.layers.context import ExpertLoads, Kernels, Record, StepContext
from jaxserve.layers.rope import Rotation
from jaxserve.layers.token_shards import TokenShards
from pallas_kernels.peers import PeerBuffers

Launch = Literal["at once", "in parts", "in programs"]
"""How a forward pass is launched: as one command buffer, as several, or as two programs of which the second has
several.
"""


class LayerStep(NamedTuple):
    """What a layer is given of a step, besides its rows."""

    batch: "Batch"
    cache: Any
    """The LayerCache before the step."""
    rotation: Rotation | None
    """That of the mixer's `rope`."""


class Tables(NamedTuple):
    """The fields `write_index` and `block_tables` of a Batch, for the layers of one KV group."""

    write_index: Int[Array, " T"]
    block_tables: Int[Array, "B N"]


@no_type_check
@flax.struct.dataclass
class Batch:
    """The device arrays of one step: T tokens of B requests, ragged, padded to the step's bucket.

    Row b owns the tokens [query_starts[b], query_starts[b + 1]); the rows with one token come first and are
    `num_decode_rows` many, then the others, up to `num_rows`; rows from there on are padding, with no tokens and
    sequence length 0. Tokens past query_starts[num_rows] are padding with position 0 and `write_index` out of range.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    write_index: Int[Array, " T"]
    """Where a token's K and V go: block * block_size + offset; unique, and >= num_blocks * block_size for padding."""
    query_starts: Int[Array, " B+1"]
    seq_lens: Int[Array, " B"]
    """Context length of each row, the tokens of this step included."""
    block_tables: Int[Array, "B N"]
    """Block ids of each row; entries past its length are 0 and never attended to."""
    slots: Int[Array, " B"]
    """Slot of each row's request, where layers keep states; padding rows have the number of slots, out of range.

    A slot still holds the state of an earlier request, or of the same request before it was preempted, when a row
    begins a sequence: when `seq_lens` is its number of tokens in this step.
    """
    num_decode_rows: Int[Array, ""]
    num_rows: Int[Array, ""]
    is_decode_only: bool = flax.struct.field(pytree_node=False, default=False)
    """Static: no row has more than one token, and there are as many rows as tokens, so that row b is token b. A step
    compiled for that leaves out everything that longer rows need. With blocks of more than one token, no row attends to
    a position that another row of the step writes, so a layer may write and attend in any order.
    """
    num_columns: int = flax.struct.field(pytree_node=False, default=0)
    """Static: if not 0, each row has so many tokens, one row after the other, but padding rows at the end, which have
    none. Those behind a row's drafts are padding, too: they write at most into the row's last block and are at
    positions up to `num_columns` - 1 behind the sequence, for which there are entries in the block tables.
    """
    kernels: Kernels = flax.struct.field(pytree_node=False, default="xla")
    """Static: what layers run where they have a choice."""
    launch: Launch = flax.struct.field(pytree_node=False, default="at once")
    """Static: see `layers.launch`."""
    peers: PeerBuffers | None = None
    """The buffers through which kernels add up the devices' partial sums; None if there are none, or if XLA adds them
    up.
    """
    groups: tuple[Tables, ...] = ()
    """For a model with several KV groups: the `write_index` and `block_tables` of each group; the fields of these names
    are None then.
    """
    group_of_layer: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    """Static: the group of each layer, if there are several."""
    layer_inputs: Array | None = None
    """Where tokens have an embedding for each layer [L, T, P]; that of one layer [T, P] in the Batch of a layer."""

    record: Record | None = flax.struct.field(pytree_node=False, default=None)
    """Static: see `StepContext`."""
    loads: ExpertLoads | None = flax.struct.field(pytree_node=False, default=None)
    """Static: see `StepContext`."""
    tokens: TokenShards | None = flax.struct.field(pytree_node=False, default=None)
    """Static: see `StepContext`. The fields are those of all tokens, but `layer_inputs`."""

    @property
    def context(self) -> StepContext:
        """What the parts of layers are given of the step."""
        return StepContext(
            self.kernels, self.peers, self.is_decode_only, self.record, loads=self.loads, tokens=self.tokens
        )

    def own(self, x: Any) -> Any:
        """Return the entries of the device's tokens in arrays [T, ...] of all tokens."""
        return x if self.tokens is None else jax.tree.map(self.tokens.own, x)

    def of_layer(self, index: int) -> "Batch":
        """Return the Batch of this layer, with the block tables of its KV group."""
        own = self if self.layer_inputs is None else dataclasses.replace(self, layer_inputs=self.layer_inputs[index])
        if not self.groups:
            return own
        tables = self.groups[self.group_of_layer[index]]
        return dataclasses.replace(own, **tables._asdict(), groups=(), group_of_layer=())

    def same_on_each_device(self) -> "Batch":
        """Return the Batch without what differs between devices."""
        return dataclasses.replace(self, peers=None, loads=None, layer_inputs=None)


@no_type_check
@flax.struct.dataclass
class KVCache:
    """What the layers of a model keep, in pools that are a LayerCache each (see `layers.cache`); donated.

    Each layer has a pool for itself, or has one in common with layers of other KV groups, which use other blocks of it.
    """

    pools: tuple[Any, ...]
    num_blocks: int = flax.struct.field(pytree_node=False)
    """Static: number of blocks in each pool."""
    block_size: int = flax.struct.field(pytree_node=False)
    """Static: number of tokens in a block."""
    pool_of_layer: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    """Static: the pool of each layer; empty: each has its own."""
    expert_loads: Int[Array, "L X"] | None = None
    """How many tokens each expert of each layer has had, modulo 2**32; None: they are not counted."""

    def of_layer(self, index: int) -> Any:
        """Return the LayerCache of this layer."""
        return self.pools[self.pool_of_layer[index] if self.pool_of_layer else index]

    def with_layer(self, index: int, cache: Any) -> "KVCache":
        """Return the cache with another LayerCache for this layer."""
        pool = self.pool_of_layer[index] if self.pool_of_layer else index
        return dataclasses.replace(self, pools=(*self.pools[:pool], cache, *self.pools[pool + 1 :]))

    def with_loads(self, counts: Mapping[int, Int[Array, " X"]]) -> "KVCache":
        """Return the cache with the tokens that the experts of some layers had in a step added."""
        if self.expert_loads is None or not counts:
            return self
        sharding = jax.typeof(self.expert_loads).sharding
        none = jnp.zeros_like(next(iter(counts.values())))
        rows = jnp.stack([counts.get(index, none) for index in range(len(self.expert_loads))])
        if not sharding.mesh.empty:
            rows = jax.sharding.reshard(rows, sharding)  # of no effect if the counters lie as the experts do
        return dataclasses.replace(self, expert_loads=self.expert_loads + rows)
