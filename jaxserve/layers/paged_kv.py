"""Keys and values in pages: the cache of layers with grouped query heads, and the island in which devices attend over
their own kv heads.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch
from jaxserve.layers.cache import CacheSizes
from jaxserve.layers.context import NO_KERNELS, Kernel, Part, StepContext, result
from jaxserve.layers.rope import Rotation
from jaxserve.layers.sharding import kv_copies, mesh_axis
from pallas_kernels.kv_write import HeadNorms, rope_and_write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paging import Scores, why_not_pages
from pallas_kernels.ragged_prefill_attention import ragged_prefill_attention


class PagedKV(NamedTuple):
    """Pools of P blocks, donated. A (block, head) tile is contiguous, so that a kernel fetches it with one copy."""

    k: Float[Array, "P K S D"]
    v: Float[Array, "P K S D"]

    def attend(
        self,
        qkv: Float[Array, "T K members D"],
        batch: Batch,
        scores: Scores,
        *,
        rotation: Rotation | None,
        head_norms: HeadNorms | None,
    ) -> tuple[Float[Array, "T H D"], "PagedKV"]:
        """Write K and V into their pages, then attend over block tables, as `KeyValueCache` says.

        Heads that are split over a mesh axis stay split: every device writes and reads its own KV heads, and nothing is
        exchanged.
        """

        def on_local_heads(
            qkv: Any, cache: Any, scores: Any, head_norms: Any, rotation: Any, batch: Any
        ) -> tuple[Array, PagedKV]:
            q, *pages = rope_and_write_kv(
                qkv,
                cache.k,
                cache.v,
                batch.write_index,
                rotation=rotation,
                head_norms=head_norms,
                implementation=batch.kernels,
            )
            written = PagedKV(*pages)
            return attend_over_pages(q, written, batch, scores), written

        context = batch.context
        context.choose("attention", self._chosen(qkv.dtype, context))
        T, K, members, D = qkv.shape
        sharding = jax.typeof(self.k).sharding
        if sharding.mesh.empty:
            makes = result((T, K * (members - 2), D), qkv.dtype), self
            return context.call(on_local_heads, makes, qkv, self, scores, head_norms, rotation, batch)
        axis = sharding.spec[1]
        heads, of_heads, whole = PartitionSpec(None, axis, None), PartitionSpec(None, axis, None, None), PartitionSpec()
        if scores.alibi_slopes is not None:  # a constant, so that every device has all of them
            slopes = jax.sharding.reshard(scores.alibi_slopes, PartitionSpec(axis))
            scores = dataclasses.replace(scores, alibi_slopes=slopes)
        island = jax.shard_map(
            on_local_heads,
            in_specs=(of_heads, of_heads, PartitionSpec(axis), whole, whole, whole),
            out_specs=(heads, of_heads),
            check_vma=False,  # a kernel call does not say over which axes its outputs vary
        )
        makes = result((T, K * (members - 2), D), qkv.dtype, NamedSharding(sharding.mesh, heads)), self
        return context.call(island, makes, qkv, self, scores, head_norms, rotation, batch.same_on_each_device())

    def _chosen(self, dtype: Any, context: StepContext) -> Part:
        """Return what attends in a step with activations of `dtype`. With `Kernel.NONE` no engine starts."""
        if context.kernels == "xla":
            return Part(Kernel.XLA, NO_KERNELS)
        if (reason := why_not_pages(dtype, self.k, self.v)) is not None:
            return Part(Kernel.NONE, reason)
        return Part(Kernel.PAGED_ATTENTION if context.is_decode_only else Kernel.RAGGED_ATTENTION)


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """Declare K and V of [num_kv_heads, head_dim] for each token."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """A token attends to this many tokens, itself included; None: to all before it."""

    @property
    def keeps_state(self) -> bool:
        """All that is kept belongs to tokens."""
        return False

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> PagedKV:
        """Return the shapes of the pools. Blocks are whole on every device; KV heads are split over the tensor axis,
        and several devices have the same head if there are more devices than heads.
        """
        num_heads = self.num_kv_heads * kv_copies(self.num_kv_heads, mesh, name="KV cache")
        sharding = NamedSharding(mesh, PartitionSpec(None, mesh_axis("kv_heads", mesh), None, None))
        shape = (sizes.num_blocks, num_heads, sizes.block_size, self.head_dim)
        pool: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return PagedKV(pool, pool)

    def describe(self) -> str:
        """Return the number of heads and their size."""
        return f"KV heads: {self.num_kv_heads} of {self.head_dim}"


def attend_over_pages(q: Float[Array, "T H D"], cache: PagedKV, batch: Batch, scores: Scores) -> Float[Array, "T H D"]:
    """Attend with a step's queries, of one device's heads, over what its rows have in pages, this step's tokens too.

    Rows with one token and rows with more of them have a kernel each, and so have rows with a few columns.
    """
    num_tokens, num_rows = q.shape[0], batch.seq_lens.shape[0]
    if batch.num_columns:
        out, _ = paged_attention(
            q.reshape(num_rows, batch.num_columns, *q.shape[1:]),
            *cache,
            block_tables=batch.block_tables,
            seq_lens=jnp.where(jnp.arange(num_rows) < batch.num_rows, batch.seq_lens, 0),
            scores=scores,
            implementation=batch.kernels,
        )
        return out.reshape(q.shape)
    # The rows with one token come first, so that row b is token b.
    decodes = slice(0, min(num_tokens, num_rows))
    is_decode = jnp.arange(decodes.stop) < batch.num_decode_rows
    out, _ = paged_attention(
        q[decodes, None],
        *cache,
        block_tables=batch.block_tables[decodes],
        seq_lens=jnp.where(is_decode, batch.seq_lens[decodes], 0),
        scores=scores,
        room=num_tokens,
        implementation=batch.kernels,
    )
    if num_tokens == 1 or batch.is_decode_only:  # no row has more
        return out[:, 0]
    return ragged_prefill_attention(
        q,
        *cache,
        out[:, 0],
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_starts=batch.query_starts,
        first_row=batch.num_decode_rows,
        num_rows=batch.num_rows,
        scores=scores,
        implementation=batch.kernels,
    )
