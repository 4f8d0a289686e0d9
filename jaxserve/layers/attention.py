"""Attention: a block's projections and rotations, and the island in which devices attend over their own kv heads.

The models call an AttentionFn that the runner has bound, so that they know neither pages nor kernels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch
from jaxserve.layers.linear import linear, linear_with_sum
from jaxserve.layers.norm import norm_spec
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.rope import Rotation, half_split_order
from pallas_kernels import paged_attention as decode_kernels
from pallas_kernels.kv_write import HeadNorms, rope_and_write_kv
from pallas_kernels.ragged_prefill_attention import ragged_prefill_attention


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of every token: K and V of [num_kv_heads, head_dim], and how far back it looks."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """A token attends to this many tokens, itself included; None: to all before it."""
    is_latent: bool = False
    """One K for all query heads, whole on every device, with V among its columns: see `layers.latent_attention`."""

    @property
    def value_dim(self) -> int:
        """The size of V: 0 where it is a part of K."""
        return 0 if self.is_latent else self.head_dim


@runtime_checkable
class AttentionFn(Protocol):
    """Normalise and rotate a step's queries and keys, store K and V, then attend over everything stored.

    Returns the output and the changed pages.
    """

    def __call__(
        self,
        qkv: Float[Array, "T K members D"],
        k_pages: Float[Array, "P K S D"],
        v_pages: Float[Array, "P K S D"],
        batch: Batch,
        *,
        rotation: Rotation | None,
        head_norms: HeadNorms | None = None,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " H"] | None = None,
        alibi_slopes: Float[Array, " H"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Float[Array, "P K S D"], Float[Array, "P K S D"]]:
        """`qkv` has for each kv head the queries that attend with it, then its key, then its value. `head_norms` None
        leaves norms to others, `rotation` None positions; `sinks` are logits that join a head's softmax's denominator;
        of `alibi_slopes` a head's slope times (key's position - query's position) is added to its scores.
        """
        ...


def paged_attention(
    qkv: Float[Array, "T K members D"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    batch: Batch,
    *,
    rotation: Rotation | None,
    head_norms: HeadNorms | None = None,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    alibi_slopes: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "P K S D"], Float[Array, "P K S D"]]:
    """The AttentionFn of serving: K and V into their pages, then attention over block tables.

    Rows with one token and rows with more of them have a kernel each. Heads split over a mesh axis stay there: every
    device writes and reads its own kv heads, and nothing is exchanged.
    """

    def on_local_heads(qkv, k_pages, v_pages, rotation, head_norms, sinks, alibi_slopes, batch):
        q, k_pages, v_pages = rope_and_write_kv(
            qkv,
            k_pages,
            v_pages,
            batch.write_index,
            rotation=rotation,
            head_norms=head_norms,
            implementation=batch.kernels,
        )
        out = attend_over_pages(
            q,
            k_pages,
            v_pages,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
        return out, k_pages, v_pages

    sharding = jax.typeof(k_pages).sharding
    if sharding.mesh.empty:
        return on_local_heads(qkv, k_pages, v_pages, rotation, head_norms, sinks, alibi_slopes, batch)
    axis = sharding.spec[1]
    heads, of_heads, whole = PartitionSpec(None, axis, None), PartitionSpec(None, axis, None, None), PartitionSpec()
    if alibi_slopes is not None:  # a constant, so that every device has all of them
        alibi_slopes = jax.sharding.reshard(alibi_slopes, PartitionSpec(axis))
    island = jax.shard_map(
        on_local_heads,
        in_specs=(of_heads, of_heads, of_heads, whole, whole, PartitionSpec(axis), PartitionSpec(axis), whole),
        out_specs=(heads, of_heads, of_heads),
        check_vma=False,  # a kernel call does not say over which axes its outputs vary
    )
    return island(qkv, k_pages, v_pages, rotation, head_norms, sinks, alibi_slopes, batch.same_on_each_device())


def attend_over_pages(
    q: Float[Array, "T H D"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    batch: Batch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    alibi_slopes: Float[Array, " H"] | None = None,
) -> Float[Array, "T H D"]:
    """A step's queries, of one device's heads, over what its rows have in pages, this step's tokens included."""
    num_tokens, num_rows = q.shape[0], batch.seq_lens.shape[0]
    # The rows with one token come first, so that row b is token b.
    decodes = slice(0, min(num_tokens, num_rows))
    is_decode = jnp.arange(decodes.stop) < batch.num_decode_rows
    scores = {
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
    }
    out, _ = decode_kernels.paged_attention(
        q[decodes, None],
        k_pages,
        v_pages,
        block_tables=batch.block_tables[decodes],
        seq_lens=jnp.where(is_decode, batch.seq_lens[decodes], 0),
        room=num_tokens,
        implementation=batch.kernels,
        **scores,
    )
    if num_tokens == 1 or batch.is_decode_only:  # no row has more
        return out[:, 0]
    return ragged_prefill_attention(
        q,
        k_pages,
        v_pages,
        out[:, 0],
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_starts=batch.query_starts,
        first_row=batch.num_decode_rows,
        num_rows=batch.num_rows,
        implementation=batch.kernels,
        **scores,
    )


def attention_specs(
    prefix: str,
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    num_interleaved: int = 0,
    by_kv_head: bool = False,
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    output: str = "o_proj",
) -> Params:
    """Weights of one block; `prefix` names it in the checkpoint, `inputs` and `output` its projections.

    Q, K and V are fused into [K, G + 2, D, E]: kv head k's G query heads, then its key, then its value, so that a
    split over kv heads keeps together what attends together; on more devices than K, each head is there several times
    with a share of its queries (see `params.Layout`). `inputs` names three tensors, or one that has the rows of
    q, k and v in this order or, `by_kv_head`, in ours; of each head of q and k the first `num_interleaved` dimensions
    are reordered for rotations (see `half_split_order`).
    """
    E, H, K, D = hidden_size, num_heads, num_kv_heads, head_dim
    G = H // K
    sizes = (H * D, K * D, K * D) if len(inputs) == 3 else ((H + 2 * K) * D,)
    assert not (by_kv_head and num_interleaved), "no family has both"
    rows = None if by_kv_head else _rows_by_kv_head(H, K, D, num_interleaved)
    specs: Params = {
        "qkv": ParamSpec(
            shape=(K, G + 2, D, E),
            axes=("kv_heads", "members", None, "embed"),
            num_inputs=1,
            source=tuple(f"{prefix}.{name}.weight" for name in inputs),
            source_shapes=tuple((size, E) for size in sizes),
            rows=rows,
            quantize=True,
        ),
        "out": ParamSpec(
            shape=(E, H, D),
            axes=("embed", "heads", None),
            num_inputs=2,
            source=(f"{prefix}.{output}.weight",),
            source_shapes=((E, H * D),),
            quantize=True,
        ),
    }
    if qkv_bias:
        specs["qkv_bias"] = ParamSpec(
            shape=(K, G + 2, D),
            axes=("kv_heads", "members", None),
            source=tuple(f"{prefix}.{name}.bias" for name in inputs),
            source_shapes=tuple((size,) for size in sizes),
            rows=rows,
            init_scale=0.0,
        )
    if out_bias:
        specs["out_bias"] = ParamSpec(shape=(E,), axes=("embed",), source=(f"{prefix}.{output}.bias",), init_scale=0.0)
    if qk_norm:
        specs["q_norm"] = norm_spec(f"{prefix}.q_norm", D)
        specs["k_norm"] = norm_spec(f"{prefix}.k_norm", D)
    return specs


@functools.cache  # one array for all layers
def _rows_by_kv_head(num_heads: int, num_kv_heads: int, head_dim: int, num_interleaved: int) -> np.ndarray:
    """The rows of q, then k, then v, in the order of `attention_specs`: each KV head's queries, its key, its value."""
    rows = np.arange((num_heads + 2 * num_kv_heads) * head_dim, dtype=np.int32).reshape(-1, head_dim)
    q, k, v = np.split(rows, (num_heads, num_heads + num_kv_heads))
    order = half_split_order(head_dim, num_interleaved)
    q, k = q[:, order].reshape(num_kv_heads, -1, head_dim), k[:, order]
    return np.concatenate([q, k[:, None], v[:, None]], axis=1).ravel()


def self_attention(
    params: Params,
    x: Float[Array, "T E"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    *,
    batch: Batch,
    attention: AttentionFn,
    rotation: Rotation | None,
    norm: Callable[[Array, Any], Array] | None = None,
    head_norm_eps: float | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, " H"] | None = None,
    leaves_shares: bool = False,
) -> tuple[Float[Array, "T E"], Float[Array, "P K S D"], Float[Array, "P K S D"]]:
    """One attention block: grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions.

    `params` are the weights of `attention_specs`: q and k go through norms if it has weights among them ("q_norm",
    "k_norm"), biases and "sinks" likewise. These norms are `norm`, or by default RMS norms of each head with a gain
    for all heads and `head_norm_eps`, which kernels have. `rotation` None leaves positions to others; `scale` is by
    default D^-1/2, and `leaves_shares` is that of `linear_with_sum`.
    """
    with jax.named_scope("attention"):
        heads, k_pages, v_pages = attend_heads(
            params,
            linear(x, params["qkv"], params.get("qkv_bias")),
            k_pages,
            v_pages,
            batch=batch,
            attention=attention,
            rotation=rotation,
            norm=norm,
            head_norm_eps=head_norm_eps,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
        )
        y = linear_with_sum(
            heads,
            params["out"],
            params.get("out_bias"),
            kernels=batch.kernels,
            peers=batch.peers,
            leaves_shares=leaves_shares,
        )
        return y, k_pages, v_pages


def attend_heads(
    params: Params,
    qkv: Float[Array, "T K members D"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    *,
    batch: Batch,
    attention: AttentionFn,
    rotation: Rotation | None,
    norm: Callable[[Array, Any], Array] | None = None,
    head_norm_eps: float | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "P K S D"], Float[Array, "P K S D"]]:
    """What stands between the two projections of `self_attention`."""
    D = qkv.shape[-1]
    head_norms = None
    if "q_norm" in params and norm is not None:
        qkv = _norm_heads(qkv, params["q_norm"], params["k_norm"], norm)
    elif "q_norm" in params:
        assert head_norm_eps is not None
        head_norms = HeadNorms(params["q_norm"], params["k_norm"], eps=head_norm_eps)
    return attention(
        qkv,
        k_pages,
        v_pages,
        batch,
        rotation=rotation,
        head_norms=head_norms,
        scale=D**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=params.get("sinks"),
        alibi_slopes=alibi_slopes,
    )


def _norm_heads(
    qkv: Float[Array, "T K members D"], q_norm: Any, k_norm: Any, norm: Callable[[Array, Any], Array]
) -> Float[Array, "T K members D"]:
    """Queries and keys through norms that no kernel has."""
    T, K, members, D = qkv.shape
    q = norm(qkv[:, :, :-2].reshape(T, -1, D), q_norm).reshape(T, K, members - 2, D)
    k = norm(qkv[:, :, -2], k_norm)
    return jnp.concatenate([q, k[:, :, None], qkv[:, :, -1:]], axis=2)
