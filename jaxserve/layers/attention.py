"""Attention blocks with grouped query heads: projections, norms of heads and rotations. The attention itself is done by
the layer's cache, see `layers.cache`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch
from jaxserve.layers.cache import KeyValueCache
from jaxserve.layers.linear import linear, linear_with_sum
from jaxserve.layers.norm import norm_spec
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.rope import Rotation, half_split_order
from pallas_kernels.kv_write import HeadNorms
from pallas_kernels.paging import Scores
from pallas_kernels.row_quantization import QuantizedRows


def attention_specs(
    prefix: str,
    config: Any,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    num_interleaved: int = 0,
    by_kv_head: bool = False,
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    output: str = "o_proj",
) -> Params:
    """Declare the weights of one block; `prefix` names it in the checkpoint, `inputs` and `output` its projections.

    Q, K and V are fused into [K, G + 2, D, E]: KV head k's G query heads, then its key, then its value, so that a split
    over KV heads keeps together what attends together; on more devices than K, several devices have a copy of each head
    with a part of its queries (see `params.Layout`). `inputs` names three tensors, or one that has the rows of q, k and
    v in this order or, `by_kv_head`, in ours; of each head of q and k the first `num_interleaved` dimensions are
    reordered for rotations (see `half_split_order`). `config` has `hidden_size`, `head_dim` and the numbers of heads.
    """
    E, H, K, D = config.hidden_size, config.num_heads, num_kv_heads_of(config), config.head_dim
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


def num_kv_heads_of(config: Any) -> int:
    """Return the number of KV heads, by default as many as query heads."""
    return getattr(config, "num_kv_heads", config.num_heads)


@functools.cache  # one array for all layers
def _rows_by_kv_head(num_heads: int, num_kv_heads: int, head_dim: int, num_interleaved: int) -> np.ndarray:
    """Return the rows of q, then k, then v, in the order of `attention_specs`: each KV head's queries, its key, its
    value.
    """
    rows = np.arange((num_heads + 2 * num_kv_heads) * head_dim, dtype=np.int32).reshape(-1, head_dim)
    q, k, v = np.split(rows, (num_heads, num_heads + num_kv_heads))
    order = half_split_order(head_dim, num_interleaved)
    q, k = q[:, order].reshape(num_kv_heads, -1, head_dim), k[:, order]
    return np.concatenate([q, k[:, None], v[:, None]], axis=1).ravel()


def self_attention(
    params: Params,
    x: Float[Array, "T E"] | QuantizedRows,
    cache: KeyValueCache,
    *,
    batch: Batch,
    rotation: Rotation | None,
    norm: Callable[[Array, Any], Array] | None = None,
    head_norm_eps: float | None = None,
    scores: Scores | None = None,
    leaves_partial_sums: bool = False,
    leaves_scales: bool = False,
) -> tuple[Any, KeyValueCache]:
    """Compute one attention block: grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary
    positions.

    `params` are the weights of `attention_specs`: q and k are normalised if there are weights for it ("q_norm",
    "k_norm"); biases and "sinks" likewise. These norms are `norm`, or by default RMS norms of each head with one gain
    for all heads and `head_norm_eps`, which kernels support. With `rotation` None positions are encoded elsewhere;
    `scores` are by default scaled by D^-1/2, and `leaves_partial_sums` and `leaves_scales` are those of
    `linear_with_sum`, as is the first result, the output. The second is the cache after this step.
    """
    with jax.named_scope("attention"):
        heads, cache = attend_heads(
            params,
            linear(x, params["qkv"], params.get("qkv_bias"), kernels=batch.kernels),
            cache,
            batch=batch,
            rotation=rotation,
            norm=norm,
            head_norm_eps=head_norm_eps,
            scores=scores,
        )
        y = linear_with_sum(
            heads,
            params["out"],
            params.get("out_bias"),
            kernels=batch.kernels,
            peers=batch.peers,
            leaves_partial_sums=leaves_partial_sums,
            leaves_scales=leaves_scales,
        )
        return y, cache


def attend_heads(
    params: Params,
    qkv: Float[Array, "T K members D"],
    cache: KeyValueCache,
    *,
    batch: Batch,
    rotation: Rotation | None,
    norm: Callable[[Array, Any], Array] | None = None,
    head_norm_eps: float | None = None,
    scores: Scores | None = None,
) -> tuple[Float[Array, "T H D"], KeyValueCache]:
    """Compute what is between the two projections of `self_attention`."""
    head_norms = None
    if "q_norm" in params and norm is not None:
        qkv = _norm_heads(qkv, params["q_norm"], params["k_norm"], norm)
    elif "q_norm" in params:
        assert head_norm_eps is not None
        head_norms = HeadNorms(params["q_norm"], params["k_norm"], eps=head_norm_eps)
    scores = Scores(scale=qkv.shape[-1] ** -0.5) if scores is None else scores
    scores = dataclasses.replace(scores, sinks=params.get("sinks"))
    return cache.attend(qkv, batch, scores, rotation=rotation, head_norms=head_norms)


def _norm_heads(
    qkv: Float[Array, "T K members D"], q_norm: Any, k_norm: Any, norm: Callable[[Array, Any], Array]
) -> Float[Array, "T K members D"]:
    """Normalise queries and keys with norms that no kernel supports."""
    T, K, members, D = qkv.shape
    q = norm(qkv[:, :, :-2].reshape(T, -1, D), q_norm).reshape(T, K, members - 2, D)
    k = norm(qkv[:, :, -2], k_norm)
    return jnp.concatenate([q, k[:, :, None], qkv[:, :, -1:]], axis=2)
