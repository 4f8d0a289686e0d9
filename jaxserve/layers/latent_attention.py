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

from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.cache import CacheSizes, LatentCache
from jaxserve.layers.decoder import run_layers, sequential_block
from jaxserve.layers.linear import linear, linear_with_sum
from jaxserve.layers.moe import moe_or_mlp
from jaxserve.layers.norm import add_rms_norm, norm_spec, rms_norm
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.parts import NO_KERNELS, Kernel, Part
from jaxserve.layers.rope import Rotation, YarnScaling, half_split_order, rotations
from jaxserve.layers.weight import Weight
from pallas_kernels import latent_attention as op
from pallas_kernels.kv_write import rotate, write_pages

LATENT_NORM_EPS = 1e-6
"""The epsilon of the norms of latents, whatever a config specifies for all other norms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """The sizes of one block. A head's query and key have a part that is not rotated ("plain"), and one that is."""

    num_heads: int
    query_rank: int | None
    """Size of the latent that queries are made of; None: they are made of the hidden state."""
    latent_size: int
    plain_size: int
    rotated_size: int
    value_size: int

    @property
    def cache_spec(self) -> "LatentSpec":
        """What a layer keeps of a token: its latent, then the rotated key."""
        return LatentSpec(self.latent_size + self.rotated_size)


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """Declare one vector for each token, whole on every device."""

    size: int
    """Size of the latent and the rotated key together."""

    @property
    def sliding_window(self) -> None:
        """A token attends to all tokens before it."""
        return None

    @property
    def keeps_state(self) -> bool:
        """All that is kept belongs to tokens."""
        return False

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> "PagedLatent":
        """Return the shapes of the pools."""
        whole = NamedSharding(mesh, PartitionSpec(None, None, None, None))
        shape = sizes.num_blocks, 1, sizes.block_size, self.size
        pool: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=whole)
        return PagedLatent(pool)

    def describe(self) -> str:
        """Return the size of the vector."""
        return f"a latent of {self.size}"


class PagedLatent(NamedTuple):
    """The latents of tokens, each followed by its rotated key, in P blocks; donated."""

    c: Float[Array, "P 1 S D"]

    def attend(
        self,
        q: Float[Array, "T H D"],
        stored: Float[Array, "T D"],
        batch: Batch,
        *,
        latent_size: int,
        scale: float,
    ) -> tuple[Float[Array, "T H R"], "PagedLatent"]:
        """Write `stored` into its pages, then attend over block tables, as `LatentCache` says.

        Heads that are split over a mesh axis stay split; pages are whole on every device, and each device writes all of
        them. Raises NotImplementedError for sizes that `batch.kernels` do not support.
        """

        def on_local_heads(q: Array, stored: Array, pages: Array, batch: Batch) -> tuple[Array, PagedLatent]:
            pages = write_pages(pages, stored[:, None], batch.write_index)
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
                implementation=batch.kernels,
            )
            return out, PagedLatent(pages)

        sharding = jax.typeof(q).sharding
        if sharding.mesh.empty:
            return on_local_heads(q, stored, self.c, batch)
        heads, whole = PartitionSpec(None, sharding.spec[1], None), PartitionSpec()
        island = jax.shard_map(
            on_local_heads,
            in_specs=(heads, whole, whole, whole),
            out_specs=(heads, whole),
            check_vma=False,  # a kernel call does not say over which axes its outputs vary
        )
        return island(q, stored, self.c, batch.same_on_each_device())

    def attention_part(self, *, dtype: Any, kernels: Kernels, is_decode_only: bool) -> Part:  # noqa: ARG002
        """Return what attends in a step, as `AttendsByKernels` says."""
        return Part(Kernel.XLA, NO_KERNELS) if kernels == "xla" else Part(Kernel.LATENT_ATTENTION)


def latent_attention_specs(prefix: str, config: Any, *, bias: bool, is_interleaved: bool) -> Params:
    """Declare the weights of one block; `prefix` names it in the checkpoint, `config` has `hidden_size` and
    `latent_heads`.

    The projection of a hidden state to latents is one matrix, "down", whole on every device: its rows are the query's
    latent (if there is one), the latent, and the rotated key. `is_interleaved`: the checkpoint rotates the pairs (2i,
    2i + 1), so its rows are reordered here (see `half_split_order`). `bias` adds biases to "down" and "out".
    """
    heads = config.latent_heads
    E, H, N, R, V = config.hidden_size, heads.num_heads, heads.plain_size, heads.latent_size, heads.value_size
    key_size = N + heads.rotated_size
    order = half_split_order(heads.rotated_size, heads.rotated_size if is_interleaved else 0)
    row_of_head = np.arange(H * key_size).reshape(H, key_size)
    query_rows = np.concatenate([row_of_head[:, :N], row_of_head[:, N:][:, order]], axis=1).ravel()
    inputs = {"kv_a_proj_with_mqa": R + heads.rotated_size}
    if heads.query_rank is not None:
        inputs = {"q_a_proj": heads.query_rank} | inputs
    num_down = sum(inputs.values())

    latents, key = np.split(np.arange(num_down), [num_down - heads.rotated_size])
    down_rows = np.concatenate([latents, key[order]])

    def of_heads(rows: slice, size: int) -> ParamSpec:
        return ParamSpec(
            shape=(H, size, R),
            axes=("heads", None, None),
            num_inputs=1,
            source=(f"{prefix}.kv_b_proj.weight",),
            source_shapes=((H * (N + V), R),),
            rows=np.arange(H * (N + V)).reshape(H, N + V)[:, rows].ravel(),
            is_absorbed=True,
        )

    query_source, query_inputs = ("q_proj", E) if heads.query_rank is None else ("q_b_proj", heads.query_rank)
    specs: Params = {
        "down": ParamSpec(
            shape=(num_down, E),
            axes=(None, "embed"),
            num_inputs=1,
            source=tuple(f"{prefix}.{name}.weight" for name in inputs),
            source_shapes=tuple((size, E) for size in inputs.values()),
            rows=down_rows,
        ),
        "latent_norm": norm_spec(f"{prefix}.kv_a_layernorm", R),
        "q": ParamSpec(
            shape=(H, key_size, query_inputs),
            axes=("heads", None, "embed" if heads.query_rank is None else None),
            num_inputs=1,
            source=(f"{prefix}.{query_source}.weight",),
            source_shapes=((H * key_size, query_inputs),),
            rows=query_rows,
            quantize=True,
        ),
        "k_up": of_heads(slice(None, N), N),
        "v_up": of_heads(slice(N, None), V),
        "out": ParamSpec(
            shape=(E, H, V),
            axes=("embed", "heads", None),
            num_inputs=2,
            source=(f"{prefix}.o_proj.weight",),
            source_shapes=((E, H * V),),
            quantize=True,
        ),
    }
    if heads.query_rank is not None:
        specs["q_norm"] = norm_spec(f"{prefix}.q_a_layernorm", heads.query_rank)
    if bias:
        specs["down_bias"] = ParamSpec(
            shape=(num_down,),
            axes=(None,),
            source=tuple(f"{prefix}.{name}.bias" for name in inputs),
            source_shapes=tuple((size,) for size in inputs.values()),
            rows=down_rows,
            init_scale=0.0,
        )
        specs["out_bias"] = ParamSpec(shape=(E,), axes=("embed",), source=(f"{prefix}.o_proj.bias",), init_scale=0.0)
    return specs


def latent_attention(
    params: Params,
    x: Float[Array, "T E"],
    cache: LatentCache,
    *,
    heads: LatentHeads,
    batch: Batch,
    rotation: Rotation,
    scale: float,
) -> tuple[Float[Array, "T E"], LatentCache]:
    """Compute one block with the weights of `latent_attention_specs`; return its output and the updated cache."""
    with jax.named_scope("attention"):
        ends = [heads.query_rank or 0, (heads.query_rank or 0) + heads.latent_size]
        down = linear(x, params["down"], params.get("down_bias"), kernels=batch.kernels)
        query_latent, latent, key = jnp.split(down, ends, axis=1)
        source = x if heads.query_rank is None else rms_norm(query_latent, params["q_norm"], LATENT_NORM_EPS)
        queries = linear(source, params["q"], kernels=batch.kernels)
        plain, rotated = jnp.split(queries, [heads.plain_size], axis=-1)
        q = jnp.concatenate([_by_head("thn,hnr->thr", plain, params["k_up"]), rotate(rotated, *rotation)], axis=-1)
        latent = rms_norm(latent, params["latent_norm"], LATENT_NORM_EPS)
        stored = jnp.concatenate([latent, rotate(key[:, None], *rotation)[:, 0]], axis=-1)
        out, cache = cache.attend(q, stored, batch, latent_size=heads.latent_size, scale=scale)
        values = _by_head("thr,hvr->thv", out, params["v_up"])
        y = linear_with_sum(
            values,
            params["out"],
            params.get("out_bias"),
            kernels=batch.kernels,
            peers=batch.peers,
            leaves_partial_sums=False,
        )
        return y, cache


def _by_head(formula: str, x: Float[Array, "T H inputs"], weight: Weight) -> Float[Array, "T H outputs"]:
    return jnp.einsum(
        formula, x, weight.array(), precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    )


def latent_decoder(
    params: Params, config: Any, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run `layers.decoder.decoder` with latent attention, of a config with `latent_heads` and a `routing`."""
    heads, scaling = config.latent_heads, config.rope.scaling
    sharpness = scaling.score_factor if isinstance(scaling, YarnScaling) else 1.0
    attend = functools.partial(
        latent_attention,
        heads=heads,
        rotation=rotations(config.rope, batch.positions),
        scale=sharpness * (heads.plain_size + heads.rotated_size) ** -0.5,
    )
    norm = functools.partial(rms_norm, eps=config.norm_eps)
    block = functools.partial(
        sequential_block,
        mlp=functools.partial(moe_or_mlp, batch=batch, routing=config.routing, activation=config.activation),
        norm=norm,
        add_norm=functools.partial(add_rms_norm, eps=config.norm_eps, kernels=batch.kernels),
    )
    attends = [functools.partial(attend, batch=batch.of_layer(index)) for index in span]
    blocks = [functools.partial(block, attend=attend) for attend in attends]
    return run_layers(params, x, batch, kv_cache, span, blocks, norm=norm)
