"""Steps of few tokens, as decode steps are, of Llama's relatives on a GPU. A layer of the fewest is one kernel; others
have one kernel between two attentions, or one for each matmul, with two for sums over devices: all do little but read
weights.

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
from jaxserve.layers.launch import cut_launch
from jaxserve.layers.linear import linear_of_few_rows
from jaxserve.layers.mlp import FUSED_ACTIVATIONS
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import Params
from jaxserve.layers.rope import Rotation
from jaxserve.layers.weight import Dense, Weight, partition_specs
from pallas_kernels import all_reduce, layer_matmuls, quantized_matmuls, small_matmul
from pallas_kernels.peers import PeerBuffers, peer_buffers_spec

AttendHeads = Callable[[Params, Array, Array, Array], tuple[Array, Array, Array]]
"""(weights of the attention, qkv, k_pages, v_pages) -> (output of the heads, k_pages, v_pages)"""

Rows = Array | small_matmul.Normed

PARTS = {"attention_norm", "mlp_norm", "attention", "mlp"}
ATTENTION_PARTS = {"qkv", "out", "q_norm", "k_norm"}
MLP_PARTS = {"gate_up", "down"}


def supports(layers: Sequence[Params], x: Float[Array, "T E"], batch: Batch, *, activation: str) -> bool:
    """Whether the kernels take such layers, as they are: and then they are the fastest for so few rows."""
    if batch.kernels != "sm90" or activation not in FUSED_ACTIVATIONS:
        return False
    # Between two matmuls, values stand times a norm's gain and not yet over their size: too large for float16.
    return x.dtype == jnp.bfloat16 and all(
        layer.keys() == PARTS
        and layer["attention"].keys() <= ATTENTION_PARTS
        and layer["mlp"].keys() == MLP_PARTS
        and (_supports_quantized(layer, x) or _supports_plain(layer, x, batch))
        for layer in layers
    )


def _supports_quantized(layer: Params, x: Float[Array, "T E"]) -> bool:
    """Whether one kernel multiplies by all of a layer's weights, whose codes it converts."""
    weights = _weights(layer)
    matrices = _quantized_matrices(weights, weights["qkv"])
    if matrices is None:
        return False
    heads = jax.ShapeDtypeStruct((x.shape[0], matrices.o.depth), x.dtype)
    return quantized_matmuls.why_no_layer(heads, matrices) is None


def _supports_plain(layer: Params, x: Float[Array, "T E"], batch: Batch) -> bool:
    weights = _weights(layer).items()
    return all(_supports_share(name, weight, x) for name, weight in weights) and _supports_sums(layer, x, batch)


def _supports_share(name: str, weight: Weight, x: Float[Array, "T E"]) -> bool:
    if weight.why_not_plain() is not None:
        return False
    matrix = jax.eval_shape(functools.partial(_as_matrix, name), Dense(weight.shard))
    return small_matmul.why_not(jax.ShapeDtypeStruct((x.shape[0], matrix.shape[-1]), x.dtype), matrix) is None


def _supports_sums(layer: Params, x: Float[Array, "T E"], batch: Batch) -> bool:
    """Whether sums of which devices have shares can be added up: see `_after_attention`."""
    weights = _weights(layer)
    if all(weights[name].spec[1] is None for name in ("o", "down")):
        return True
    return all_reduce.why_not(x, batch.peers) is None


def decode_layers(
    params: Params,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    *,
    attends: Sequence[AttendHeads],
    may_be_one_kernel: bool,
    rotation: Rotation | None,
    sliding_windows: Sequence[int | None],
    activation: Callable[[Array], Array],
    eps: float,
) -> tuple[Float[Array, "T E"], KVCache]:
    """Hidden states after the final norm, and the cache with this step's keys and values; `attends` has one a layer.

    `may_be_one_kernel` says that `attends` are those of serving, in whose place a kernel of whole layers may attend;
    `rotation` and `sliding_windows`, which `attends` know, too, say in which layers one can.
    """
    layers = params["layers"]
    y = rms_norm(x, layers[0]["attention_norm"], eps)
    y = linear_of_few_rows(y, layers[0]["attention"]["qkv"], kernels=batch.kernels)
    for index, (layer, following, attend) in enumerate(zip(layers, [*layers[1:], None], attends, strict=True)):
        after = {"layer": layer, "following": following, "final_norm": params["norm"]}
        after |= {"activation": activation, "eps": eps}
        own, pools = batch.of_layer(index), kv_cache.of_layer(index)
        with jax.named_scope(f"layer_{index}"):
            if (
                may_be_one_kernel
                and rotation is not None
                and _is_one_kernel(y, pools, own, layer, following, rotation, sliding_windows[index])
            ):
                x, y, *pools = _whole_layer(y, pools, x, own, rotation, **after)
            else:
                heads, *pools = attend(layer["attention"], y, *pools)
                x, y = _after_attention(heads, x, **after, kernels=batch.kernels, peers=batch.peers)
            x = cut_launch(x, batch, index=index, num_layers=len(layers))
        kv_cache = kv_cache.with_layer(index, *pools)
    return y, kv_cache


def _is_one_kernel(
    qkv: Float[Array, "T K members D"],
    pools: tuple[Array, Array],
    batch: Batch,
    layer: Params,
    following: Params | None,
    rotation: Rotation,
    sliding_window: int | None,
) -> bool:
    """Whether the layer needs nothing that the kernel of whole layers has not."""
    if not batch.is_decode_only or sliding_window is not None or layer["attention"].keys() != {"qkv", "out"}:
        return False
    if any(_spec(pools[0])) or any(weight.why_not_plain() for weight in _weights(layer).values()):
        return False
    matrices = _as_matrices(_weights(layer), None if following is None else _weights(following)["qkv"])
    return layer_matmuls.why_not_attention(qkv, pools[0], matrices, half=rotation[0].shape[1]) is None


def _whole_layer(
    qkv: Float[Array, "T K members D"],
    pools: tuple[Array, Array],
    x: Float[Array, "T E"],
    batch: Batch,
    rotation: Rotation,
    *,
    layer: Params,
    following: Params | None,
    final_norm: Float[Array, " E"],
    activation: Callable[[Array], Array],
    eps: float,
) -> tuple[Array, Array, Array, Array]:
    """What `_after_attention` gives, and the changed pools."""
    next_qkv = None if following is None else _weights(following)["qkv"]
    gains = layer["mlp_norm"], final_norm if following is None else following["attention_norm"]
    of_rows = {
        "rotation": rotation,
        "write_index": batch.write_index,
        "block_tables": batch.block_tables,
        "seq_lens": batch.seq_lens,
    }

    def run(
        qkv: Array, pools: tuple[Array, Array], x: Array, weights: Any, gains: tuple[Array, Array], of_rows: Any
    ) -> Any:
        return layer_matmuls.decode_layer(
            qkv,
            *pools,
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
    x, y, *changed = run(qkv, pools, x, _as_matrices(_weights(layer), next_qkv), gains, of_rows)
    return x, y if next_qkv is None else y.reshape(len(x), *next_qkv.shape[:-1]), *changed


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
    peers: PeerBuffers | None,
) -> tuple[Float[Array, "T E"], Float[Array, "T N"] | Float[Array, "T K members D"]]:
    """The residual stream after the layer, and the next layer's qkv: of the last layer, the hidden states.

    Each device multiplies by its share of the weights; what the shares of one sum give is added up before its norm.
    """
    weights = _weights(layer)
    qkv = None if following is None else _weights(following)["qkv"]
    gains = layer["mlp_norm"], final_norm if following is None else following["attention_norm"]
    axes = {name: weights[name].spec[1] for name in ("o", "down")}
    is_quantized = _quantized_matrices(weights, qkv) is not None

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
            matrix = _as_matrix(name, weight)
            return small_matmul.matmul(rows, matrix, activation=activation, implementation=kernels)

        def multiply_then_norm(rows: Array, name: str, x: Array, gain: Array) -> tuple[Array, Rows]:
            weight, norm = weights[name], {"eps": eps, "implementation": kernels}
            if axes[name] is None:
                return small_matmul.matmul_then_norm(rows, _as_matrix(name, weight), residual=x, gain=gain, **norm)
            part = multiply(rows, name, weight)
            return all_reduce.all_reduce_add_rms_norm(x, part, gain, peers, axis_name=axes[name], **norm)

        heads = heads.reshape(len(heads), -1)
        if is_quantized:
            quantized = _quantized_matrices(weights, qkv)
            assert quantized is not None
            x, y = quantized_matmuls.quantized_layer_matmuls(
                heads, x, quantized, gains, activation=activation, eps=eps, implementation=kernels
            )
            return x, y if qkv is None else y.reshape(len(x), *qkv.shape[:-1])
        matrices = _as_matrices(weights, qkv)
        if all(axis is None for axis in axes.values()) and layer_matmuls.why_not(heads, matrices) is None:
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


def _weights(layer: Params) -> dict[str, Weight]:
    attention, mlp = layer["attention"], layer["mlp"]
    return {"qkv": attention["qkv"], "o": attention["out"], "gate_up": mlp["gate_up"], "down": mlp["down"]}


def _quantized_matrices(weights: dict[str, Weight], qkv: Weight | None) -> quantized_matmuls.QuantizedWeights | None:
    """Of a layer, and the next one's qkv; None if a weight is plain, or devices have shards of one."""
    if any(weight.is_split for weight in weights.values()):
        return None
    o = weights["o"].quantized_matrix(weights["o"].ndim - 1)
    gate_up, down = (weights[name].quantized_matrix(1) for name in ("gate_up", "down"))
    following = None if qkv is None else qkv.quantized_matrix(1)
    if o is None or gate_up is None or down is None or (following is None) != (qkv is None):
        return None
    return quantized_matmuls.QuantizedWeights(o, gate_up, down, following)


def _as_matrices(weights: dict[str, Weight], qkv: Weight | None) -> layer_matmuls.Weights:
    """Of a layer, and the next one's qkv."""
    matrices = (_as_matrix(name, weights[name]) for name in ("o", "gate_up", "down"))
    return layer_matmuls.Weights(*matrices, qkv=None if qkv is None else _as_matrix("qkv", qkv))


def _as_matrix(name: str, weight: Weight) -> Float[Array, "... N K"]:
    """As `small_matmul` takes a weight, or a share of it."""
    match name:
        case "qkv":
            return weight.array().reshape(-1, weight.shape[-1])
        case "o":
            return weight.array().reshape(weight.shape[0], -1)
        case _:
            return weight.array()


def _spec(x: Array) -> PartitionSpec:
    return jax.typeof(x).sharding.spec
