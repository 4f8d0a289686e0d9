"""Decode steps of Llama's relatives on a GPU: four kernels between two attentions, which do little but read weights.

Norms, activations and additions are parts of the matmuls around them. `decoder` goes this way where `supports` says so;
the result is the same up to rounding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.linear import is_split, linear
from jaxserve.layers.mlp import FUSED_ACTIVATIONS
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import Params
from pallas_kernels import small_matmul

AttendHeads = Callable[[Params, Array, Array, Array], tuple[Array, Array, Array]]
"""(weights of the attention, qkv, k_pages, v_pages) -> (output of the heads, k_pages, v_pages)"""

PARTS = {"attention_norm", "mlp_norm", "attention", "mlp"}
ATTENTION_PARTS = {"qkv", "out", "q_norm", "k_norm"}
MLP_PARTS = {"gate_up", "down"}
MIN_ROWS = 16
"""Below, XLA's matmuls are as fast: see `pallas_kernels/NOTES.md`."""


def supports(layers: Sequence[Params], x: Float[Array, "T E"], batch: Batch, *, activation: str) -> bool:
    """Whether the kernels take such layers, as they are and unsplit: and then they are the fastest for so few rows."""
    if (
        x.shape[0] < MIN_ROWS
        or not batch.is_decode_only
        or batch.kernels != "sm90"
        or activation not in FUSED_ACTIVATIONS
    ):
        return False
    # Between two matmuls, values stand times a norm's gain and not yet over their size: too large for float16.
    return x.dtype == jnp.bfloat16 and all(
        layer.keys() == PARTS
        and layer["attention"].keys() <= ATTENTION_PARTS
        and layer["mlp"].keys() == MLP_PARTS
        and not any(map(is_split, jax.tree.leaves(layer)))
        and all(small_matmul.supports(_rows_of(weight, x), weight) for weight in _weights(layer).values())
        for layer in layers
    )


def _rows_of(weight: Float[Array, "..."], x: Float[Array, "T E"]) -> Float[Array, "T K"]:
    return jnp.zeros((x.shape[0], weight.shape[-1]), x.dtype)


def decode_layers(
    params: Params,
    x: Float[Array, "T E"],
    kv_cache: KVCache,
    *,
    attends: Sequence[AttendHeads],
    activation: Callable[[Array], Array],
    eps: float,
    kernels: Kernels,
) -> tuple[Float[Array, "T E"], KVCache]:
    """Hidden states after the final norm, and the cache with this step's keys and values; `attends` has one a layer."""
    layers = params["layers"]
    qkv = linear(rms_norm(x, layers[0]["attention_norm"], eps), layers[0]["attention"]["qkv"])
    result = x
    for index, (layer, following, attend) in enumerate(zip(layers, [*layers[1:], None], attends, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            heads, *pools = attend(layer["attention"], qkv, *kv_cache.of_layer(index))
            x, result = _after_attention(
                heads, x, layer, following, params["norm"], activation=activation, eps=eps, kernels=kernels
            )
        kv_cache = kv_cache.with_layer(index, *pools)
        if following is not None:
            qkv = result.reshape(qkv.shape)
    return result, kv_cache


def _after_attention(
    heads: Float[Array, "T H D"],
    x: Float[Array, "T E"],
    layer: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    *,
    activation: Callable[[Array], Array],
    eps: float,
    kernels: Kernels,
) -> tuple[Float[Array, "T E"], Float[Array, "T N"]]:
    """The residual stream after the layer, and the next layer's qkv: of the last layer, the hidden states."""
    weights = _weights(layer)
    gains = layer["mlp_norm"], final_norm if following is None else following["attention_norm"]
    qkv = None if following is None else _weights(following)["qkv"]

    def run(heads: Array, x: Array, weights: Params, gains: tuple[Array, Array], qkv: Array | None) -> Any:
        multiply = functools.partial(small_matmul.matmul, implementation=kernels)
        multiply_then_norm = functools.partial(small_matmul.matmul_then_norm, eps=eps, implementation=kernels)
        x, normed = multiply_then_norm(heads.reshape(x.shape[0], -1), weights["o"], residual=x, gain=gains[0])
        inner = multiply(normed, weights["gate_up"], activation=activation)
        x, normed = multiply_then_norm(inner, weights["down"], residual=x, gain=gains[1])
        return x, normed.rows() if qkv is None else multiply(normed, qkv)

    if not jax.typeof(x).sharding.mesh.empty:
        everywhere = PartitionSpec()
        run = jax.shard_map(run, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    return run(heads, x, weights, gains, qkv)


def _weights(layer: Params) -> dict[str, Array]:
    """As matrices."""
    attention, mlp = layer["attention"], layer["mlp"]
    hidden_size = attention["out"].shape[0]
    return {
        "qkv": attention["qkv"].reshape(-1, hidden_size),
        "o": attention["out"].reshape(hidden_size, -1),
        "gate_up": mlp["gate_up"],
        "down": mlp["down"],
    }
