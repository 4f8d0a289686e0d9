"""Attention: a block's projections and rotations, and the island in which devices attend over their own kv heads.

The models call an AttentionFn that the runner has bound, so that they know neither pages nor kernels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

import pallas_kernels.paged_attention as kernels
from jaxserve.layers.batch import Batch
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import norm_spec
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.rope import apply_rope, half_split_order


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """What one layer keeps of every token: K and V of [num_kv_heads, head_dim], and how far back it looks."""

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """A token attends to this many tokens, itself included; None: to all before it."""


@runtime_checkable
class AttentionFn(Protocol):
    """Store a step's K and V, then attend over everything stored. Returns the output and the changed pages."""

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        k_pages: Float[Array, "P K S D"],
        v_pages: Float[Array, "P K S D"],
        batch: Batch,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "T H D"], Float[Array, "P K S D"], Float[Array, "P K S D"]]:
        """Query head h attends with kv head h // (H // K)."""
        ...


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    batch: Batch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: kernels.Implementation = "xla",
) -> tuple[Float[Array, "T H D"], Float[Array, "P K S D"], Float[Array, "P K S D"]]:
    """The AttentionFn of serving: K and V into their pages, then attention over block tables.

    Heads split over a mesh axis stay there: every device writes and reads its own kv heads, and nothing is exchanged.
    """

    def on_local_heads(q, k, v, k_pages, v_pages, batch):
        k_pages, v_pages = kernels.write_kv(k_pages, v_pages, k, v, batch.write_index)
        out = kernels.paged_attention(
            q,
            k_pages,
            v_pages,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            query_starts=batch.query_starts,
            num_decode_rows=batch.num_decode_rows,
            num_rows=batch.num_rows,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            implementation=implementation,
        )
        return out, k_pages, v_pages

    sharding = jax.typeof(k_pages).sharding
    if sharding.mesh.empty:
        return on_local_heads(q, k, v, k_pages, v_pages, batch)
    axis = sharding.spec[1]
    heads, pages = PartitionSpec(None, axis, None), PartitionSpec(None, axis, None, None)
    island = jax.shard_map(
        on_local_heads,
        in_specs=(heads, heads, heads, pages, pages, PartitionSpec()),
        out_specs=(heads, pages, pages),
        check_vma=False,  # a kernel call does not say over which axes its outputs vary
    )
    return island(q, k, v, k_pages, v_pages, batch)


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
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    output: str = "o_proj",
) -> Params:
    """Weights of one block; `prefix` names it in the checkpoint, `inputs` and `output` its projections.

    Q, K and V are fused into [K, G + 2, D, E]: kv head k's G query heads, then its key, then its value, so that a
    split over kv heads keeps together what attends together. `inputs` names three tensors, or one that has the rows of
    q, k and v in this order; of each head of q and k the first `num_interleaved` dimensions are reordered for
    `apply_rope` (see `half_split_order`).
    """
    E, H, K, D = hidden_size, num_heads, num_kv_heads, head_dim
    G = H // K
    rows = (H * D, K * D, K * D) if len(inputs) == 3 else ((H + 2 * K) * D,)
    order = half_split_order(D, num_interleaved)

    def fuse(*tensors: np.ndarray) -> np.ndarray:
        heads = np.concatenate(tensors).reshape(H + 2 * K, D, *tensors[0].shape[1:])
        q, k, v = np.split(heads, (H, H + K))
        q, k = q[:, order], k[:, order]
        return np.concatenate([q.reshape(K, G, *q.shape[1:]), k[:, None], v[:, None]], axis=1)

    specs: Params = {
        "qkv": ParamSpec(
            shape=(K, G + 2, D, E),
            axes=("kv_heads", None, None, "embed"),
            source=tuple(f"{prefix}.{name}.weight" for name in inputs),
            source_shapes=tuple((size, E) for size in rows),
            transform=fuse,
            quantize=True,
        ),
        "out": ParamSpec(
            shape=(E, H, D),
            axes=("embed", "heads", None),
            source=(f"{prefix}.{output}.weight",),
            source_shapes=((E, H * D),),
            transform=lambda out: out.reshape(E, H, D),
            quantize=True,
        ),
    }
    if qkv_bias:
        specs["qkv_bias"] = ParamSpec(
            shape=(K, G + 2, D),
            axes=("kv_heads", None, None),
            source=tuple(f"{prefix}.{name}.bias" for name in inputs),
            source_shapes=tuple((size,) for size in rows),
            transform=fuse,
            init_scale=0.0,
        )
    if out_bias:
        specs["out_bias"] = ParamSpec(shape=(E,), axes=("embed",), source=(f"{prefix}.{output}.bias",), init_scale=0.0)
    if qk_norm:
        specs["q_norm"] = norm_spec(f"{prefix}.q_norm", D)
        specs["k_norm"] = norm_spec(f"{prefix}.k_norm", D)
    return specs


def self_attention(
    params: Params,
    x: Float[Array, "T E"],
    k_pages: Float[Array, "P K S D"],
    v_pages: Float[Array, "P K S D"],
    *,
    batch: Batch,
    attention: AttentionFn,
    rotation: tuple[Float[Array, "T half"], Float[Array, "T half"]] | None,
    norm: Callable[[Array, Any], Array] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "T E"], Float[Array, "P K S D"], Float[Array, "P K S D"]]:
    """One attention block: grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions.

    `params` are the weights of `attention_specs`: q and k go through `norm` if it has weights among them ("q_norm",
    "k_norm"), biases likewise. `rotation` None leaves positions to others; `scale` is by default D^-1/2.
    """
    with jax.named_scope("attention"):
        qkv = linear(x, params["qkv"], params.get("qkv_bias"))
        T, K, group, D = qkv.shape
        q, k, v = qkv[:, :, :-2].reshape(T, K * (group - 2), D), qkv[:, :, -2], qkv[:, :, -1]
        if "q_norm" in params:
            assert norm is not None
            q, k = norm(q, params["q_norm"]), norm(k, params["k_norm"])
        if rotation is not None:
            q, k = apply_rope(q, *rotation), apply_rope(k, *rotation)
        out, k_pages, v_pages = attention(
            q,
            k,
            v,
            k_pages,
            v_pages,
            batch,
            scale=D**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        return linear(out, params["out"], params.get("out_bias")), k_pages, v_pages
