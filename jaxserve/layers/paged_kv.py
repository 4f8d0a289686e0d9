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
from jaxserve.layers.chunked_rows import cut_rows
from jaxserve.layers.context import NO_KERNELS, Kernel, Kernels, Part, StepContext, result
from jaxserve.layers.sharding import DATA, kv_copies, mesh_axes, names_of, num_shards, platform_of, shard_map
from pallas_kernels.kv_write import HeadNorms, rope_and_write_kv, why_not_written
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paging import MAX_HEAD_DIM, Pages, Scores, pool_dtype, why_not_pages, why_not_prompts
from pallas_kernels.ragged_prefill_attention import ragged_prefill_attention
from pallas_kernels.row_quantization import UnscaledProduct


class Attends(NamedTuple):
    """What attends with rows of one token or of columns, and writes, and what attends with longer rows, of prompts."""

    rows: Kernels
    prompts: Kernels


class PagedKV(Pages):
    """Pools of P blocks, donated."""

    def attend(
        self,
        qkv: Float[Array, "T K members D"] | UnscaledProduct,
        batch: Batch,
        scores: Scores,
        *,
        rotation: tuple[Float[Array, "N half"], Float[Array, "N half"]] | None,
        head_norms: HeadNorms | None,
        chunk_size: int | None = None,
        scales: Float[Array, "K 2"] | None = None,
    ) -> tuple[Float[Array, "T H D"], "PagedKV"]:
        """Normalise and rotate a step's queries and keys, write K and V into their pages, then attend over block
        tables: over everything stored.

        `qkv` has for each KV head the queries that attend with it, then its key, then its value; it may be
        a product that is not yet scaled if tokens are not split. `head_norms` None
        leaves norms to others, `rotation` None positions. With `chunk_size` a token attends to tokens of its chunk of
        the text alone. `scales` are those of the checkpoint for keys and values in 8 bits, None to make one for each
        token.

        Heads that are split over a mesh axis stay split: every device writes and reads its own KV heads, and nothing is
        exchanged, but for tokens that are split over "data": `rotation` is that of all N tokens of the step.
        """

        def on_local_heads(
            qkv: Any, cache: Any, scores: Any, scales: Any, head_norms: Any, rotation: Any, batch: Any
        ) -> tuple[Array, PagedKV]:
            tokens = batch.tokens
            if tokens is not None:
                qkv = tokens.of_all(qkv, splits_heads=splits_heads)
                if splits_heads:
                    scales, scores = jax.tree.map(tokens.own_heads, (scales, scores))
            q, pages = rope_and_write_kv(
                qkv,
                cache,
                batch.write_index,
                rotation=rotation,
                head_norms=head_norms,
                scales=scales,
                implementation=attends.rows if scales is None else "xla",
            )
            if chunk_size is not None:
                batch = cut_rows(batch, chunk_size=chunk_size, block_size=self.k.shape[2])
            out = attend_over_pages(q, pages, batch, scores, attends)
            return out if tokens is None else tokens.of_own(out, splits_heads=splits_heads), PagedKV(*pages)

        context = batch.context
        T, K, members, D = qkv.shape
        splits_heads = self.k.shape[1] < K
        half = D // 2 if rotation is None else rotation[0].shape[1]
        attends = self._choose(qkv, batch, num_queries=members - 2, half=half)
        sharding = jax.typeof(self.k).sharding
        if sharding.mesh.empty:
            makes = result((T, K * (members - 2), D), qkv.dtype), self
            return context.call(on_local_heads, makes, qkv, self, scores, scales, head_norms, rotation, batch)
        axis = sharding.spec[1]
        heads, of_heads, whole = PartitionSpec(None, axis, None), PartitionSpec(None, axis, None, None), PartitionSpec()
        scores, of_qkv = _over_heads(scores, axis), of_heads
        if isinstance(qkv, UnscaledProduct):
            of_outputs = PartitionSpec(axis, None, None)
            of_qkv = dataclasses.replace(qkv, sums=of_heads, row_scales=whole, output_scales=of_outputs)
        in_specs = of_qkv, of_heads, PartitionSpec(axis), PartitionSpec(axis), whole, whole, whole
        run = shard_map(on_local_heads, in_specs, (heads, of_heads))
        makes = result((T, K * (members - 2), D), qkv.dtype, NamedSharding(sharding.mesh, heads)), self
        batch = batch.same_on_each_device()
        return context.call(run, makes, qkv, self, scores, scales, head_norms, rotation, batch)

    def read(
        self, q: Float[Array, "T H D"], batch: Batch, scores: Scores, *, num_kv_heads: int
    ) -> Float[Array, "T H D"]:
        """Attend with normalised and rotated queries over what another layer has stored, this step's tokens too."""

        def on_local_heads(q: Any, cache: Any, scores: Any, batch: Any) -> Array:
            tokens = batch.tokens
            if tokens is not None:
                q = tokens.of_all(q, splits_heads=splits_heads)
                if splits_heads:
                    scores = jax.tree.map(tokens.own_heads, scores)
            out = attend_over_pages(q, cache, batch, scores, attends)
            return out if tokens is None else tokens.of_own(out, splits_heads=splits_heads)

        splits_heads = self.k.shape[1] < num_kv_heads
        attends = self._choose(q, batch, num_queries=q.shape[1] // num_kv_heads, half=q.shape[2] // 2)
        axis = jax.typeof(self.k).sharding.spec[1]
        if jax.typeof(self.k).sharding.mesh.empty:
            return batch.context.call(on_local_heads, q, q, self, scores, batch)
        heads, of_pages = PartitionSpec(None, axis, None), PartitionSpec(None, axis, None, None)
        run = shard_map(on_local_heads, (heads, of_pages, PartitionSpec(axis), PartitionSpec()), heads)
        return batch.context.call(run, q, q, self, _over_heads(scores, axis), batch.same_on_each_device())

    def _choose(self, x: Array | UnscaledProduct, batch: Batch, *, num_queries: int, half: int) -> Attends:
        """Choose what attends with activations like `x` and `num_queries` a KV head, and record it."""
        context, num_columns = batch.context, max(1, batch.num_columns)
        why_not = self._why_not(x.dtype, num_queries=num_columns * num_queries, half=half)
        has_prompts = not (batch.is_decode_only or batch.num_columns)
        in_prompts = why_not_prompts(x.dtype, self) if has_prompts else None
        context.choose("attention", self._chosen(why_not, in_prompts, context))

        def unless(reason: str | None) -> Kernels:
            return "xla" if reason and self._may_be_xla else context.kernels

        return Attends(unless(why_not), unless(why_not or in_prompts))

    @property
    def _may_be_xla(self) -> bool:
        """True for pages of 8 bits and for large heads, as in Gemma 4: XLA attends where no kernel does."""
        return self.scales is not None or self.k.shape[-1] > MAX_HEAD_DIM

    def _why_not(self, dtype: Any, *, num_queries: int, half: int) -> str | None:
        """Return why no kernel attends or writes with activations of `dtype`, `num_queries` a decoding row and KV head,
        and `half` rotated pairs a head.
        """
        reason = why_not_pages(dtype, self, num_queries=num_queries)
        return reason or why_not_written(self.k.shape[-1], half, has_scales=self.scales is not None)

    def _chosen(self, why_not: str | None, in_prompts: str | None, context: StepContext) -> Part:
        """Return what attends in a step, and writes, by the reasons why no kernel does in rows and in prompts. With
        `Kernel.NONE` no engine starts.
        """
        if context.kernels == "xla":
            return Part(Kernel.XLA, NO_KERNELS)
        if why_not is not None:
            return Part(Kernel.XLA if self._may_be_xla else Kernel.NONE, why_not)
        if in_prompts is not None:
            return Part(Kernel.PAGED_ATTENTION_AND_XLA, in_prompts)
        return Part(Kernel.PAGED_ATTENTION if context.is_decode_only else Kernel.RAGGED_ATTENTION)


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """Declare K and V of [num_kv_heads, head_dim] for each token."""

    keeps_state = False

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """A token attends to this many tokens, itself included; None: to all before it."""
    dtype: jnp.dtype | None = None
    """A dtype of 8 bits, for which each token and head has scales; None: that of activations."""
    source: int | None = None
    """The earlier layer whose keys and values this one reads, without any of its own; None: it has its own."""

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> PagedKV:
        """Return the shapes of the pools. Blocks are whole on every device; KV heads are split over the tensor axis,
        and several devices have the same head if there are more devices than heads. Along "data" devices have a part
        each of the heads of their place along "tensor", if these divide, and otherwise all of them.
        """
        num_heads = self.num_kv_heads * kv_copies(self.num_kv_heads, mesh, name="KV cache")
        on = mesh_axes("kv_heads", mesh)
        shards = mesh.shape.get(DATA, 1)
        if shards > 1 and num_heads // num_shards(on, mesh) % shards == 0:
            on = (DATA, *names_of([on]))
        sharding = NamedSharding(mesh, PartitionSpec(None, on, None, None))
        shape = (sizes.num_blocks, num_heads, sizes.block_size, self.head_dim)
        scales: Any = None
        stored = None
        if self.dtype is not None:
            dtype, stored = pool_dtype(self.dtype, platform_of(mesh))
            of_heads = sizes.num_blocks, num_heads, 2, sizes.block_size
            scales = jax.ShapeDtypeStruct(of_heads, jnp.float32, sharding=sharding)
        pool: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return PagedKV(pool, pool, scales, stored)

    def describe(self) -> str:
        """Return the number of heads and their size."""
        heads = f"{self.num_kv_heads} KV head{'' if self.num_kv_heads == 1 else 's'} of {self.head_dim} dimensions"
        return heads if self.source is None else f"{heads} of earlier layers"


def _over_heads(scores: Scores, axis: Any) -> Scores:
    """Return the scores with slopes, a constant of which every device has all, split over the axis of heads."""
    if scores.alibi_slopes is None:
        return scores
    slopes = jax.sharding.reshard(scores.alibi_slopes, PartitionSpec(axis))
    return dataclasses.replace(scores, alibi_slopes=slopes)


def attend_over_pages(
    q: Float[Array, "T H D"], pages: Pages, batch: Batch, scores: Scores, attends: Attends
) -> Float[Array, "T H D"]:
    """Attend with a step's queries, of one device's heads, over what its rows have in pages, this step's tokens too.

    Rows with one token and rows with more of them have a kernel each, and so have rows with a few columns.
    """
    num_tokens, num_rows = q.shape[0], batch.seq_lens.shape[0]
    if batch.num_columns:
        out, _ = paged_attention(
            q.reshape(num_rows, batch.num_columns, *q.shape[1:]),
            pages,
            block_tables=batch.block_tables,
            seq_lens=jnp.where(jnp.arange(num_rows) < batch.num_rows, batch.seq_lens, 0),
            scores=scores,
            implementation=attends.rows,
        )
        return out.reshape(q.shape)
    # The rows with one token come first, so that row b is token b.
    decodes = slice(0, min(num_tokens, num_rows))
    is_decode = jnp.arange(decodes.stop) < batch.num_decode_rows
    out, _ = paged_attention(
        q[decodes, None],
        pages,
        block_tables=batch.block_tables[decodes],
        seq_lens=jnp.where(is_decode, batch.seq_lens[decodes], 0),
        scores=scores,
        room=num_tokens,
        implementation=attends.rows,
    )
    if num_tokens == 1 or batch.is_decode_only:  # no row has more
        return out[:, 0]
    return ragged_prefill_attention(
        q,
        pages,
        out[:, 0],
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_starts=batch.query_starts,
        first_row=batch.num_decode_rows,
        num_rows=batch.num_rows,
        scores=scores,
        implementation=attends.prompts,
    )
