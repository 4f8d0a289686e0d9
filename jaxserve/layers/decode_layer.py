"""Fused decode for Llama-like layers: norms, activations and additions are parts of the matmuls around them.

Three paths, fastest first: one kernel a layer, its attention included; one kernel between two attentions; and a kernel
for each matmul, where devices add up partial sums in between. `paths` chooses; the result is the same up to rounding.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS
from jaxserve.layers.attention import Attention
from jaxserve.layers.batch import LayerStep
from jaxserve.layers.context import Kernel, Part, StepContext, result
from jaxserve.layers.layer import Layer
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.paged_kv import PagedKV
from jaxserve.layers.params import Params
from jaxserve.layers.paths import Kind, as_matrix, matrices_of, quantized_matrices
from jaxserve.layers.sharding import partition_specs, shard_map
from jaxserve.layers.weight import Weight, output_sharding
from pallas_kernels import all_reduce, layer_matmuls, quantized_matmuls, small_matmul
from pallas_kernels.peers import peer_buffers_spec

Rows = Array | small_matmul.Normed


def run_fused_layer(
    layer: Layer,
    kind: Kind,
    params: Params,
    x: Float[Array, "T E"],
    qkv: Float[Array, "T K members D"],
    step: LayerStep,
    next_qkv: Weight | None,
    next_gain: Float[Array, " E"],
) -> tuple[Array, Array, Any]:
    """Run one layer from its queries, keys and values before their bias.

    Returns the residual stream after it, the stream's norm with `next_gain` or, if there is a `next_qkv`, the product
    of that norm and this weight, and the updated cache.
    """
    attention, feed_forward = layer.mixer, layer.feed_forward
    assert isinstance(attention, Attention)
    assert isinstance(feed_forward, FeedForward)
    assert isinstance(feed_forward.activation, str)
    after: dict[str, Any] = {
        "weights": matrices_of(params),
        "next_qkv": next_qkv,
        "gains": (params["mlp_norm"], next_gain),
        "activation": ACTIVATIONS[feed_forward.activation],
        "eps": layer.norm.eps,
    }
    if "qkv_bias" in params["attention"]:
        qkv = qkv + params["attention"]["qkv_bias"][None]
    if kind == Kind.LAYER:
        makes = *_made(x, next_qkv), step.cache
        run = functools.partial(_whole_layer, scale=attention.score_scale, **after)
        return step.batch.context.call(run, makes, qkv, x, step)
    heads, cache = attention.attend(params["attention"], qkv, step)
    return *_after_attention(heads, x, kind, **after, context=step.batch.context), cache


def _whole_layer(
    qkv: Float[Array, "T K members D"],
    x: Float[Array, "T E"],
    step: LayerStep,
    *,
    weights: dict[str, Weight],
    next_qkv: Weight | None,
    gains: tuple[Array, Array],
    scale: float,
    activation: Callable[[Array], Array],
    eps: float,
) -> tuple[Array, Array, PagedKV]:
    """Return what `_after_attention` does, and the cache after this step."""
    batch, cache, rotation = step
    of_rows = {
        "rotation": rotation,
        "write_index": batch.write_index,
        "block_tables": batch.block_tables,
        "seq_lens": batch.seq_lens,
    }

    def run(qkv: Array, cache: PagedKV, x: Array, weights: Any, gains: tuple[Array, Array], of_rows: Any) -> Any:
        return layer_matmuls.decode_layer(
            qkv,
            cache,
            x,
            weights,
            gains,
            **of_rows,
            scale=scale,
            activation=activation,
            eps=eps,
            implementation=batch.kernels,
        )

    if not jax.typeof(x).sharding.mesh.empty:  # of one device, or the same on each
        run = shard_map(run, PartitionSpec(), PartitionSpec())
    x, y, pages = run(qkv, cache, x, _as_matrices(weights, next_qkv), gains, of_rows)
    return x, y if next_qkv is None else y.reshape(len(x), *next_qkv.shape[:-1]), PagedKV(*pages)


class _Operands(NamedTuple):
    """What the matmuls after an attention take: on all devices together, on one, or their partition specs."""

    heads: Any
    """What queries attended to [T, H, D], or [T, H x D] for the kernels."""
    x: Any
    """The residual stream [T, E]."""
    weights: Any
    gains: Any
    """The gains of the norms after the output of the attention and after the layer."""
    next_qkv: Any
    peers: Any
    """Buffers for sums over devices; None on one."""


def _after_attention(
    heads: Float[Array, "T H D"],
    x: Float[Array, "T E"],
    kind: Kind,
    *,
    weights: dict[str, Weight],
    next_qkv: Weight | None,
    gains: tuple[Array, Array],
    activation: Callable[[Array], Array],
    eps: float,
    context: StepContext,
) -> tuple[Float[Array, "T E"], Float[Array, "T N"] | Float[Array, "T K members D"]]:
    """Return the residual stream after the layer, and its norm or the next layer's qkv.

    Each device multiplies by its shard of the weights; partial sums are added up before the norm that follows.
    """
    axes = {name: weights[name].spec[1] for name in ("o", "down")}
    if any(axis is not None for axis in axes.values()):
        context.choose("sums over devices", Part(Kernel.ALL_REDUCE), is_product=False)
    options = {"activation": activation, "eps": eps, "implementation": context.kernels}
    match kind:
        case Kind.CODES:
            multiply = functools.partial(_one_kernel_on_codes, **options)
        case Kind.BETWEEN:
            multiply = functools.partial(_one_kernel, **options)
        case _:
            is_quantized = kind == Kind.MATMULS_OF_CODES
            multiply = functools.partial(_kernel_each, is_quantized=is_quantized, axes=axes, **options)

    def run(of_device: _Operands) -> tuple[Array, Array]:
        heads, qkv = of_device.heads, of_device.next_qkv
        x, y = multiply(of_device._replace(heads=heads.reshape(len(heads), -1)))
        return x, y if qkv is None else y.reshape(len(x), *qkv.shape[:-1])

    mesh = jax.typeof(x).sharding.mesh
    if not mesh.empty:
        everywhere = PartitionSpec()
        specs = _Operands(
            heads=jax.typeof(heads).sharding.spec,
            x=everywhere,
            weights=partition_specs(weights),
            gains=everywhere,
            next_qkv=partition_specs(next_qkv),
            peers=peer_buffers_spec(mesh),
        )
        of_qkv = everywhere if next_qkv is None else PartitionSpec(None, *next_qkv.spec[:-1])
        run = shard_map(run, (specs,), (everywhere, of_qkv))
    operands = _Operands(heads, x, weights, gains, next_qkv, context.peers)
    return context.call(run, _made(x, next_qkv), operands)


def _one_kernel_on_codes(operands: _Operands, **options: Any) -> tuple[Array, Array]:
    """Run `Kind.CODES`."""
    matrices = quantized_matrices(operands.weights, operands.next_qkv)
    assert matrices is not None
    return quantized_matmuls.quantized_layer_matmuls(operands.heads, operands.x, matrices, operands.gains, **options)


def _one_kernel(operands: _Operands, **options: Any) -> tuple[Array, Array]:
    """Run `Kind.BETWEEN`."""
    matrices = _as_matrices(operands.weights, operands.next_qkv)
    return layer_matmuls.layer_matmuls(operands.heads, operands.x, matrices, operands.gains, **options)


def _kernel_each(
    operands: _Operands,
    *,
    is_quantized: bool,
    axes: dict[str, Any],
    activation: Callable[[Array], Array],
    eps: float,
    implementation: Any,
) -> tuple[Array, Array]:
    """Run `Kind.MATMULS_OF_CODES` if the weights are quantized, else `Kind.MATMULS`. `axes` are the mesh axes over
    which devices add up the products of `o` and `down`, None if each has all of it.
    """
    heads, x, weights, (mlp_gain, next_gain), next_qkv, peers = operands

    def multiply(rows: Rows, name: str, weight: Weight, **options: Any) -> Array:
        if not is_quantized:
            matrix = as_matrix(name, weight.array())
            return small_matmul.matmul(rows, matrix, implementation=implementation, **options)
        matrix = weight.quantized_matrix(weight.ndim - 1 if name == "o" else 1)
        assert matrix is not None
        assert isinstance(rows, Array)
        return quantized_matmuls.quantized_matmul(rows, matrix, implementation=implementation, **options)

    def add_and_norm(rows: Array, name: str, x: Array, gain: Array) -> tuple[Array, Rows]:
        """Return x plus the product, on all devices together, and its norm."""
        options = {"eps": eps, "implementation": implementation}
        if axes[name] is None:
            matrix = as_matrix(name, weights[name].array())
            return small_matmul.matmul_then_norm(rows, matrix, residual=x, gain=gain, **options)
        part = multiply(rows, name, weights[name])
        return all_reduce.all_reduce_add_rms_norm(x, part, gain, peers, axis_name=axes[name], **options)

    x, normed = add_and_norm(heads, "o", x, mlp_gain)
    inner = multiply(normed, "gate_up", weights["gate_up"], activation=activation)
    x, normed = add_and_norm(inner, "down", x, next_gain)
    if next_qkv is not None:
        return x, multiply(normed, "qkv", next_qkv)
    return x, normed.rows() if isinstance(normed, small_matmul.Normed) else normed


def _made(x: Array, next_qkv: Weight | None) -> tuple[Array, Any]:
    """Return the types of the residual stream and of what stands after it."""
    if next_qkv is None:
        return x, x
    sharding = output_sharding(next_qkv.sharding, next_qkv.ndim - 1)
    return x, result((len(x), *next_qkv.shape[:-1]), x.dtype, sharding)


def _as_matrices(weights: dict[str, Weight], qkv: Weight | None) -> layer_matmuls.Weights:
    """Return the matrices of a layer, and of the next one's qkv."""
    matrices = (as_matrix(name, weights[name].array()) for name in ("o", "gate_up", "down"))
    return layer_matmuls.Weights(*matrices, qkv=None if qkv is None else as_matrix("qkv", qkv.array()))
