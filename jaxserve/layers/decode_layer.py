"""Steps of few tokens, as decode steps are, of Llama's relatives on a GPU. A layer of the fewest is one kernel; others
have one kernel between two attentions, or one for each matmul, with two for sums over devices: all do little but read
weights.

Norms, activations and additions are parts of the matmuls around them. `decoder` goes this way where `paths` has chosen
it; the result is the same up to rounding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.alike import Alike
from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.launch import cut_launch
from jaxserve.layers.linear import linear_of_few_rows
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.paged_kv import PagedKV
from jaxserve.layers.params import Params
from jaxserve.layers.paths import Kind, as_matrix, matrices_of, quantized_matrices
from jaxserve.layers.rope import Rotation
from jaxserve.layers.sharding import partition_specs
from jaxserve.layers.weight import Weight
from pallas_kernels import all_reduce, layer_matmuls, quantized_matmuls, small_matmul
from pallas_kernels.peers import PeerBuffers, peer_buffers_spec

AttendHeads = Callable[[Params, Array, Any], tuple[Array, Any]]
"""(weights of the attention, qkv, LayerCache) -> (output of the heads, LayerCache)"""

Rows = Array | small_matmul.Normed


def decode_layers(
    params: Params,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    span: range,
    *,
    kinds: Sequence[Kind],
    attends: Sequence[AttendHeads],
    rotation: Rotation | None,
    activation: Callable[[Array], Array],
    eps: float,
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: return the residual stream after them, or hidden states after the final norm, and the cache.

    `kinds` says how each layer runs, `attends` how it attends; `rotation`, which `attends` know too, is for layers that
    are one kernel.
    """
    layers, call = params["layers"], Alike()
    y = rms_norm(x, layers[span.start]["attention_norm"], eps)
    y = linear_of_few_rows(y, layers[span.start]["attention"]["qkv"], kernels=batch.kernels)
    for index, kind, attend in zip(span, kinds, attends, strict=True):
        layer = functools.partial(
            _decode_layer,
            kind=kind,
            attend=attend,
            batch=batch.of_layer(index),
            rotation=rotation,
            activation=activation,
            eps=eps,
        )
        following = layers[index + 1] if index + 1 in span else None
        with jax.named_scope(f"layer_{index}"):
            x, y, cache = call(layer, x, y, kv_cache.of_layer(index), layers[index], following, params["norm"])
            x = cut_launch(x, batch, index=index, num_layers=len(layers))
        kv_cache = kv_cache.with_layer(index, cache)
    return y if span.stop == len(layers) else x, kv_cache


def _decode_layer(
    x: Float[Array, "T E"],
    qkv: Float[Array, "T K members D"],
    cache: Any,
    layer: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    *,
    kind: Kind,
    attend: AttendHeads,
    batch: Batch,
    rotation: Rotation | None,
    activation: Callable[[Array], Array],
    eps: float,
) -> tuple[Array, Array, Any]:
    """Run one layer from its queries, keys and values before their bias. Return the results of `_after_attention` and
    the updated cache.
    """
    after = {"layer": layer, "following": following, "final_norm": final_norm, "activation": activation, "eps": eps}
    if "qkv_bias" in layer["attention"]:
        qkv = qkv + layer["attention"]["qkv_bias"][None]
    if kind == Kind.LAYER:
        assert rotation is not None
        return _whole_layer(qkv, cache, x, batch, rotation, **after)
    heads, cache = attend(layer["attention"], qkv, cache)
    return *_after_attention(heads, x, kind, **after, kernels=batch.kernels, peers=batch.peers), cache


def _whole_layer(
    qkv: Float[Array, "T K members D"],
    cache: PagedKV,
    x: Float[Array, "T E"],
    batch: Batch,
    rotation: Rotation,
    *,
    layer: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    activation: Callable[[Array], Array],
    eps: float,
) -> tuple[Array, Array, PagedKV]:
    """Return what `_after_attention` does, and the cache after this step."""
    next_qkv = None if following is None else matrices_of(following)["qkv"]
    gains = layer["mlp_norm"], final_norm if following is None else following["attention_norm"]
    of_rows = {
        "rotation": rotation,
        "write_index": batch.write_index,
        "block_tables": batch.block_tables,
        "seq_lens": batch.seq_lens,
    }

    def run(qkv: Array, cache: PagedKV, x: Array, weights: Any, gains: tuple[Array, Array], of_rows: Any) -> Any:
        return layer_matmuls.decode_layer(
            qkv,
            *cache,
            x,
            weights,
            gains,
            **of_rows,
            scale=qkv.shape[-1] ** -0.5,
            activation=activation,
            eps=eps,
            implementation=batch.kernels,
        )

    if not jax.typeof(x).sharding.mesh.empty:  # of one device, or the same on each
        everywhere = PartitionSpec()
        run = jax.shard_map(run, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    x, y, *pages = run(qkv, cache, x, _as_matrices(matrices_of(layer), next_qkv), gains, of_rows)
    return x, y if next_qkv is None else y.reshape(len(x), *next_qkv.shape[:-1]), PagedKV(*pages)


def _after_attention(
    heads: Float[Array, "T H D"],
    x: Float[Array, "T E"],
    kind: Kind,
    layer: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    *,
    activation: Callable[[Array], Array],
    eps: float,
    kernels: Kernels,
    peers: PeerBuffers | None,
) -> tuple[Float[Array, "T E"], Float[Array, "T N"] | Float[Array, "T K members D"]]:
    """Return the residual stream after the layer, and the next layer's qkv, or the hidden states after the last layer.

    Each device multiplies by its shard of the weights; partial sums are added up before the norm that follows.
    """
    weights = matrices_of(layer)
    qkv = None if following is None else matrices_of(following)["qkv"]
    gains = layer["mlp_norm"], final_norm if following is None else following["attention_norm"]
    axes = {name: weights[name].spec[1] for name in ("o", "down")}

    def run(
        heads: Array,
        x: Array,
        weights: Params,
        gains: tuple[Array, Array],
        qkv: Weight | None,
        peers: PeerBuffers | None,
    ) -> Any:
        def multiply(
            rows: Rows, name: str, weight: Weight, activation: Callable[[Array], Array] | None = None
        ) -> Array:
            if kind == Kind.MATMULS_OF_CODES:
                codes = weight.quantized_matrix(weight.ndim - 1 if name == "o" else 1)
                assert codes is not None
                assert isinstance(rows, Array)
                return quantized_matmuls.quantized_matmul(rows, codes, activation=activation, implementation=kernels)
            matrix = as_matrix(name, weight.array())
            return small_matmul.matmul(rows, matrix, activation=activation, implementation=kernels)

        def multiply_then_norm(rows: Array, name: str, x: Array, gain: Array) -> tuple[Array, Rows]:
            weight, norm = weights[name], {"eps": eps, "implementation": kernels}
            if axes[name] is None:
                return small_matmul.matmul_then_norm(
                    rows, as_matrix(name, weight.array()), residual=x, gain=gain, **norm
                )
            part = multiply(rows, name, weight)
            return all_reduce.all_reduce_add_rms_norm(x, part, gain, peers, axis_name=axes[name], **norm)

        heads = heads.reshape(len(heads), -1)
        if kind == Kind.CODES:
            quantized = quantized_matrices(weights, qkv)
            assert quantized is not None
            x, y = quantized_matmuls.quantized_layer_matmuls(
                heads, x, quantized, gains, activation=activation, eps=eps, implementation=kernels
            )
            return x, y if qkv is None else y.reshape(len(x), *qkv.shape[:-1])
        if kind == Kind.BETWEEN:
            matrices = _as_matrices(weights, qkv)
            x, y = layer_matmuls.layer_matmuls(
                heads, x, matrices, gains, activation=activation, eps=eps, implementation=kernels
            )
            return x, y if qkv is None else y.reshape(len(x), *qkv.shape[:-1])
        x, normed = multiply_then_norm(heads, "o", x, gains[0])
        inner = multiply(normed, "gate_up", weights["gate_up"], activation)
        x, normed = multiply_then_norm(inner, "down", x, gains[1])
        if qkv is not None:
            return x, multiply(normed, "qkv", qkv).reshape(len(x), *qkv.shape[:-1])
        return x, normed.rows() if isinstance(normed, small_matmul.Normed) else normed

    mesh = jax.typeof(x).sharding.mesh
    if not mesh.empty:
        everywhere = PartitionSpec()
        run = jax.shard_map(
            run,
            in_specs=(
                _spec(heads),
                everywhere,
                partition_specs(weights),
                everywhere,
                partition_specs(qkv),
                peer_buffers_spec(mesh),
            ),
            out_specs=(everywhere, everywhere if qkv is None else PartitionSpec(None, *qkv.spec[:-1])),
            check_vma=False,  # a kernel call does not say over which axes its outputs vary
        )
    return run(heads, x, weights, gains, qkv, peers)


def _as_matrices(weights: dict[str, Weight], qkv: Weight | None) -> layer_matmuls.Weights:
    """Return the matrices of a layer, and of the next one's qkv."""
    matrices = (as_matrix(name, weights[name].array()) for name in ("o", "gate_up", "down"))
    return layer_matmuls.Weights(*matrices, qkv=None if qkv is None else as_matrix("qkv", qkv.array()))


def _spec(x: Array) -> PartitionSpec:
    return jax.typeof(x).sharding.spec
