"""Multi-head latent attention (Liu et al. 2024, arXiv:2405.04434): one small vector per token is the K and V of all
heads.

A token's latent c and a rotated key k that all heads use are stored. Head h has the key [U_h c, k] and the value V_h c,
but neither is ever computed: as q^T (U_h c) = (U_h^T q)^T c, U_h is applied to the query, and V_h to the output of the
attention, in which all heads attend to the stored vectors as they are. Decoding, which is bound by reading, reads least
this way. Chunks of prompts attend in the same way, whether chunks or a prefix hit precede them. Computing K and V of
the whole context for each chunk, as a second path, would save about two thirds of the attention's arithmetic in long
contexts.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.attention import OutputGate, QueryScale
from jaxserve.layers.batch import Batch, LayerStep
from jaxserve.layers.cache import CacheSizes
from jaxserve.layers.context import NO_KERNELS, Kernel, Part, StepContext, result
from jaxserve.layers.linear import Consumer, linear, no_reader, residual_update
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.norm import norm_spec, rms_norm
from jaxserve.layers.params import Params, ParamSpec, matrix_spec
from jaxserve.layers.rope import Rope, YarnScaling, half_split_order
from jaxserve.layers.sharding import platform_of, shard_map
from pallas_kernels import latent_attention as op
from pallas_kernels.kv_write import rotate, write_latents
from pallas_kernels.paging import Bytes, Pages, pool_dtype

LATENT_NORM_EPS = 1e-6
"""The epsilon of the norms of latents, whatever a config specifies for all other norms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """The sizes of one block. A head's query and key have a part that is not rotated ("plain"), and one that
    is, unless there is no rotation at all.
    """

    num_heads: int
    query_rank: int | None
    """Size of the latent that queries are made of; None: they are made of the hidden state."""
    latent_size: int
    plain_size: int
    rotated_size: int
    value_size: int


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Declare one vector for each token, whole on every device."""

    sliding_window = None
    keeps_state = False

    size: int
    """Size of the latent and the rotated key together."""
    dtype: jnp.dtype | None = None
    """A dtype of 8 bits, for which each token has a scale; None: that of activations."""

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> "PagedLatent":
        """Return the shapes of the pools."""
        whole = NamedSharding(mesh, PartitionSpec(None, None, None, None))
        shape = sizes.num_blocks, 1, sizes.block_size, self.size
        scales: Any = None
        stored = None
        if self.dtype is not None:
            dtype, stored = pool_dtype(self.dtype, platform_of(mesh))
            scales = jax.ShapeDtypeStruct((sizes.num_blocks, 1, 1, sizes.block_size), jnp.float32, sharding=whole)
        pool: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        return PagedLatent(pool, scales, stored)

    def describe(self) -> str:
        """Return the size of the vector."""
        return f"a latent of {self.size} dimensions"


class PagedLatent(NamedTuple):
    """The latents of tokens, each followed by its rotated key, in P blocks; donated."""

    c: Float[Array, "P 1 S D"]
    scales: Float[Array, "P 1 1 S"] | None = None
    """The scale of each vector, if they are held in 8 bits."""
    stored: Bytes | None = None
    """Set if the pool holds 8-bit floats as uint8, see `Pages`."""

    @property
    def pages(self) -> Pages:
        """The vectors as keys that are values too."""
        return Pages(self.c, self.c, self.scales, self.stored)

    def attend(
        self,
        q: Float[Array, "T H D"],
        stored: Float[Array, "T D"],
        batch: Batch,
        *,
        latent_size: int,
        scale: float,
        scales: Float[Array, "1 2"] | None = None,
    ) -> tuple[Float[Array, "T H R"], "PagedLatent"]:
        """Write the vectors of a step's tokens into their pages, then attend over block tables: over everything stored.

        `latent_size` R is the size of values, which are the beginning of the keys. `scales` are those of the checkpoint
        for vectors in 8 bits, which have that of keys; None to make one for each token.
        Heads that are split over a mesh axis stay split; pages are whole on every device, and each device writes all of
        them. Raises NotImplementedError for sizes that `batch.kernels` do not support.
        """

        def on_local_heads(
            q: Array, stored: Array, cache: PagedLatent, scales: Array | None, batch: Batch
        ) -> tuple[Array, PagedLatent]:
            tokens = batch.tokens
            splits_heads = tokens is not None and q.shape[1] % tokens.count == 0
            if tokens is not None:
                q, stored = tokens.of_all(q, splits_heads=splits_heads), tokens.gather(stored)
            pages = write_latents(cache.pages, stored, batch.write_index, None if scales is None else scales[0, 0])
            out = op.latent_attention(
                q,
                pages,
                block_tables=batch.block_tables,
                seq_lens=batch.seq_lens,
                query_starts=batch.query_starts,
                num_decode_rows=batch.num_decode_rows,
                num_rows=batch.num_rows,
                latent_size=latent_size,
                scale=scale,
                is_decode_only=batch.is_decode_only,
                implementation="xla" if self.scales is not None else batch.kernels,
            )
            if tokens is not None:
                out = tokens.of_own(out, splits_heads=splits_heads)
            return out, PagedLatent(pages.k, pages.scales, pages.stored)

        context, sharding = batch.context, jax.typeof(q).sharding
        reason = NO_KERNELS if context.kernels == "xla" else None
        if self.scales is not None:
            reason = reason or f"no kernel attends to latents of {self.pages.dtype}"
        context.choose("attention", Part(Kernel.LATENT_ATTENTION) if reason is None else Part(Kernel.XLA, reason))
        makes = result((*q.shape[:2], latent_size), q.dtype, sharding), self
        if sharding.mesh.empty:
            return context.call(on_local_heads, makes, q, stored, self, scales, batch)
        heads, whole = PartitionSpec(None, sharding.spec[1], None), PartitionSpec()
        run = shard_map(on_local_heads, (heads, whole, whole, whole, whole), (heads, whole))
        return context.call(run, makes, q, stored, self, scales, batch.same_on_each_device())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """The latent attention block of a layer, with or without biases of "down" and "out", a factor of queries by
    position, and a gate of each head's output.
    """

    why_not_fused = "the attention is latent"
    reader = no_reader  # "down" is never held as codes

    heads: LatentHeads
    rope: Rope | None
    has_bias: bool = False
    query_scale: QueryScale | None = None
    gate: OutputGate | None = None

    @property
    def cache_spec(self) -> LatentSpec:
        """What the layer keeps of a token: its latent, then the rotated key."""
        return LatentSpec(self.heads.latent_size + self.heads.rotated_size)

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights; `prefix` names the block in the checkpoint.

        The projection of a hidden state to latents is one matrix, "down", whole on every device: its rows are the
        query's latent (if there is one), the latent, and the rotated key. If the checkpoint rotates the pairs (2i, 2i +
        1), its rows are reordered here (see `half_split_order`).
        """
        heads = self.heads
        E, H, N, R, V = hidden_size, heads.num_heads, heads.plain_size, heads.latent_size, heads.value_size
        key_size = N + heads.rotated_size
        order = half_split_order(heads.rotated_size, heads.rotated_size if names.is_interleaved else 0)
        row_of_head = np.arange(H * key_size).reshape(H, key_size)
        query_rows = np.concatenate([row_of_head[:, :N], row_of_head[:, N:][:, order]], axis=1).ravel()
        inputs = {"kv_a_proj_with_mqa": R + heads.rotated_size}
        if heads.query_rank is not None:
            inputs = {"q_a_proj": heads.query_rank} | inputs
        num_down = sum(inputs.values())

        latents, key = np.split(np.arange(num_down), [num_down - heads.rotated_size])
        down_rows = np.concatenate([latents, key[order]])

        def of_heads(rows: slice, size: int) -> ParamSpec:
            return matrix_spec(
                f"{prefix}.kv_b_proj",
                (H, size, R),
                ("heads", None, None),
                num_outputs=(H * (N + V),),
                rows=np.arange(H * (N + V)).reshape(H, N + V)[:, rows].ravel(),
                is_absorbed=True,
            )

        query_source, query_inputs = ("q_proj", E) if heads.query_rank is None else ("q_b_proj", heads.query_rank)
        specs: Params = {
            "down": matrix_spec(
                [f"{prefix}.{name}" for name in inputs],
                (num_down, E),
                (None, "embed"),
                num_outputs=tuple(inputs.values()),
                rows=down_rows,
            ),
            "latent_norm": norm_spec(f"{prefix}.kv_a_layernorm", R),
            "q": matrix_spec(
                f"{prefix}.{query_source}",
                (H, key_size, query_inputs),
                ("heads", None, "embed" if heads.query_rank is None else None),
                rows=query_rows,
                quantize=True,
            ),
            "k_up": of_heads(slice(None, N), N),
            "v_up": of_heads(slice(N, None), V),
            "out": matrix_spec(
                f"{prefix}.{names.out}", (E, H, V), ("embed", "heads", None), num_inputs=2, quantize=True
            ),
        }
        if heads.query_rank is not None:
            specs["q_norm"] = norm_spec(f"{prefix}.q_a_layernorm", heads.query_rank)
        if self.gate is not None:
            assert self.gate.is_per_head, "no family has gates of values"
            specs["gate"] = matrix_spec(f"{prefix}.{names.gate}", (H, E), ("heads", "embed"))
        if self.has_bias:
            specs |= {f"{name}_bias": specs[name].bias for name in ("down", "out")}
        return specs

    def run(self, params: Params, x: Float[Array, "T E"], step: LayerStep, *, consumer: Consumer) -> tuple[Any, Any]:
        """Compute the block; return its update, as `residual_update` does, and the cache after this step."""
        heads, context = self.heads, step.batch.context
        rotation = None if step.rotation is None else step.batch.own(step.rotation)

        def normed(x: Array, name: str) -> Array:
            return context.call(rms_norm, x, x, params[name], LATENT_NORM_EPS)

        def turned(x: Array) -> Array:
            return x if rotation is None else context.call(rotate, x, x, *rotation)

        with jax.named_scope("attention"):
            ends = [heads.query_rank or 0, (heads.query_rank or 0) + heads.latent_size]
            down = linear(x, params["down"], params.get("down_bias"), context=context, name="down")
            query_latent, latent, key = jnp.split(down, ends, axis=1)
            source = x if heads.query_rank is None else normed(query_latent, "q_norm")
            queries = linear(source, params["q"], context=context, name="q")
            plain, rotated = jnp.split(queries, [heads.plain_size], axis=-1)
            q = jnp.concatenate([_by_head("thn,hnr->thr", plain, params, "k_up", context), turned(rotated)], axis=-1)
            if self.query_scale is not None:
                q = context.call(self.query_scale, q, q, step.batch.own(step.batch.positions))
            latent = normed(latent, "latent_norm")
            stored = jnp.concatenate([latent, turned(key[:, None])[:, 0]], axis=-1)
            sizes: dict[str, Any] = {"latent_size": heads.latent_size, "scale": self.score_scale}
            out, cache = step.cache.attend(q, stored, step.batch, **sizes, scales=params.get("kv_scales"))
            values = _by_head("thr,hvr->thv", out, params, "v_up", context)
            if self.gate is not None:
                values = self.gate(values, linear(x, params["gate"], context=context, name="gate"))
            return residual_update(values, params, "out", context, consumer), cache

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        scaling = None if self.rope is None else self.rope.scaling
        sharpness = scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0
        return sharpness * (self.heads.plain_size + self.heads.rotated_size) ** -0.5


def _by_head(
    formula: str, x: Float[Array, "T H inputs"], params: Params, name: str, context: StepContext
) -> Float[Array, "T H outputs"]:
    context.choose(name, Part(Kernel.XLA))
    weight, precision = params[name], jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    outputs = weight.shape[1] if formula.endswith("v") else weight.shape[2]
    makes = result((*x.shape[:2], outputs), x.dtype, jax.typeof(x).sharding)
    return context.call(functools.partial(jnp.einsum, formula, precision=precision), makes, x, weight.array())
