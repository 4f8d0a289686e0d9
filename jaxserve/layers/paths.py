"""Which kernels run the layers of a step, as data: chosen by what a layer consists of, with the reason why it has no
faster path.

A decode step of Llama and similar models does little but read weights, so norms, activations and additions are fused
into the matmuls around them, and with few rows a whole layer is one kernel. What the kernels do not support runs
unfused: `parts` chooses a kernel for each operation.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.layers.attention import Attention
from jaxserve.layers.context import NO_KERNELS, StepContext
from jaxserve.layers.layer import Layer
from jaxserve.layers.paged_kv import PagedKV
from jaxserve.layers.params import Params
from jaxserve.layers.rope import frequencies
from jaxserve.layers.sharding import DATA
from jaxserve.layers.weight import Weight
from pallas_kernels import all_reduce, layer_matmuls, quantized_matmuls, small_matmul


class Kind(enum.StrEnum):
    """How a layer runs, fastest first."""

    LAYER = "one kernel a layer"
    CODES = "one kernel on packed weights between two attentions"
    BETWEEN = "one kernel between two attentions"
    MATMULS_OF_CODES = "a kernel on packed weights for each matmul"
    MATMULS = "a kernel for each matmul"
    UNFUSED = "unfused"


class Path(NamedTuple):
    """How a layer runs, and why not in a faster way that `Kind` has for such weights."""

    kind: Kind
    reason: str | None = None
    passes_on_qkv: bool = False
    """The layer computes the qkv of the next one, which is fused too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A layer with its weights and its LayerCache, which are arrays or their shapes, with shardings."""

    layer: Layer
    weights: Params
    cache: Any

    @functools.cached_property
    def key(self) -> object:
        """What is equal for layers of which everything said here is the same."""
        leaves, structure = jax.tree.flatten([self.weights, self.cache])
        return self.layer, structure, *map(jax.typeof, leaves)


def choose(layers: Sequence[LayerShape], x: Any, context: StepContext) -> list[Path]:
    """Return the path of each of consecutive layers for rows [T, E], an array or its shape. A fused one computes the
    qkv of the next if that is fused too.
    """
    paths: list[Path] = []
    known: dict[object, Path] = {}
    following = None
    for layer in reversed(layers):
        key = layer.key, None if following is None else following.key
        if key not in known:
            known[key] = _path(layer, following, x, context)
        paths.append(known[key])
        following = None if known[key].kind == Kind.UNFUSED else layer
    return paths[::-1]


def _path(layer: LayerShape, following: LayerShape | None, x: Any, context: StepContext) -> Path:
    """Return the path of a layer; `following` is the next one if that is fused."""
    if following is not None and following.layer.norm == layer.layer.norm:
        qkv = following.weights["attention"]["qkv"]
        if why_not_fused(layer, qkv, x, context) is None:
            return _fused(layer, qkv, x, context)
    reason = why_not_fused(layer, None, x, context)
    return _fused(layer, None, x, context) if reason is None else Path(Kind.UNFUSED, reason)


def _fused(layer: LayerShape, qkv: Weight | None, x: Any, context: StepContext) -> Path:
    passes_on = qkv is not None
    if _is_quantized(layer):
        sums = _why_sums_between(layer)
        return Path(Kind.CODES if sums is None else Kind.MATMULS_OF_CODES, sums, passes_on)
    whole = _why_not_one_kernel(layer, qkv, x, context)
    if whole is None:
        return Path(Kind.LAYER, None, passes_on)
    between = _why_not_between(layer, qkv, x)
    return Path(Kind.BETWEEN, whole, passes_on) if between is None else Path(Kind.MATMULS, between, passes_on)


def why_not_fused(layer: LayerShape, qkv: Weight | None, x: Any, context: StepContext) -> str | None:
    """Return why the layer's matmuls cannot be fused with the operations around them, or None if they can.

    `qkv` is the weight of the next layer that is multiplied with them, if there is one.
    """
    if context.kernels != "sm90":
        return NO_KERNELS
    if (reason := layer.layer.why_not_fused) is not None:
        return reason
    if any(weight.mesh.shape.get(DATA, 1) > 1 for weight in matrices_of(layer.weights).values()):
        return "tokens are split over devices"
    # Between two matmuls, values are multiplied by a norm's gain and not yet divided by their root mean square: too
    # large for float16.
    if x.dtype != jnp.bfloat16:
        return f"what stands between two matmuls needs bfloat16, got {x.dtype}"
    weights = matrices_of(layer.weights)
    if _is_quantized(layer):
        return _why_not_codes(layer, qkv, x, context)
    if qkv is not None and (reason := qkv.stored_as) is not None:
        return f"the next qkv: {reason}"
    for name, weight in weights.items():
        if (reason := weight.stored_as or _why_not_matmul(name, weight, x)) is not None:
            return f"{name}: {reason}"
    return _why_no_sums(layer, x, context)


def _why_no_sums(layer: LayerShape, x: Any, context: StepContext) -> str | None:
    """Return why devices cannot add up what they have of the layer's matmuls as its kernels do, or None if they can."""
    if _why_sums_between(layer) is None:
        return None
    return all_reduce.why_not(x, context.peers)


def _why_sums_between(layer: LayerShape) -> str | None:
    """Return a reason against one kernel for several matmuls if devices have partial sums of some, or None."""
    weights = matrices_of(layer.weights)
    is_summed = any(weights[name].spec[1] is not None for name in ("o", "down"))
    return "devices add up partial sums between matmuls" if is_summed else None


def _is_quantized(layer: LayerShape) -> bool:
    """Return true if every matrix of the layer is quantized."""
    return all(weight.stored_as is not None for weight in matrices_of(layer.weights).values())


def _why_not_codes(layer: LayerShape, qkv: Weight | None, x: Any, context: StepContext) -> str | None:
    """Return why kernels do not convert the codes of all weights of the layer, or None if they do."""
    weights = matrices_of(layer.weights)
    num_rows = x.shape[0]
    inputs = {name: weight.shape[1 if name == "o" else -1 :] for name, weight in weights.items()}
    rows = {name: jax.ShapeDtypeStruct((num_rows, *shape), x.dtype) for name, shape in inputs.items()}
    if any(weight.product(rows[name], context).rounds_to for name, weight in weights.items()):
        return f"{num_rows} rows are rounded to 8 bits"
    shards = {name: weight.on_one_device() for name, weight in weights.items()}
    matrices = jax.eval_shape(quantized_matrices, shards, None if qkv is None else qkv.on_one_device())
    if matrices is None:
        kinds = {weight.stored_as for weight in (*weights.values(), *([] if qkv is None else [qkv]))}
        return "no kernel converts what all weights hold: " + "; ".join(sorted(map(str, kinds)))
    heads = jax.ShapeDtypeStruct((num_rows, matrices.o.depth), x.dtype)
    if _why_sums_between(layer) is None:
        return quantized_matmuls.why_no_layer(heads, matrices)
    reasons = (quantized_matmuls.why_not(heads, matrix) for matrix in matrices if matrix is not None)
    return next((reason for reason in reasons if reason), None) or _why_no_sums(layer, x, context)


def quantized_matrices(weights: dict[str, Weight], qkv: Weight | None) -> layer_matmuls.Weights | None:
    """Return a device's weights of a layer and the next one's qkv as kernels take codes; None if they do not."""
    o = weights["o"].quantized_matrix(weights["o"].ndim - 1)
    gate_up, down = (weights[name].quantized_matrix(1) for name in ("gate_up", "down"))
    following = None if qkv is None else qkv.quantized_matrix(1)
    if o is None or gate_up is None or down is None or (following is None) != (qkv is None):
        return None
    return layer_matmuls.Weights(o, gate_up, down, following)


def _why_not_matmul(name: str, weight: Weight, x: Any) -> str | None:
    matrix = as_matrix(name, weight.shard)
    return small_matmul.why_not(jax.ShapeDtypeStruct((x.shape[0], matrix.shape[-1]), x.dtype), matrix)


def _why_not_between(layer: LayerShape, qkv: Weight | None, x: Any) -> str | None:
    """Return why the matmuls between two attentions are not one kernel, or None if they are."""
    if (reason := _why_sums_between(layer)) is not None:
        return reason
    matrices = _shapes_of_matrices(layer, qkv)
    heads = jax.ShapeDtypeStruct((x.shape[0], matrices.o.shape[-1]), x.dtype)
    return layer_matmuls.why_not(heads, matrices)


def _why_not_one_kernel(layer: LayerShape, qkv: Weight | None, x: Any, context: StepContext) -> str | None:
    """Return why the layer and its attention are not one kernel, or None if they are."""
    if not context.is_decode_only:
        return "some rows may have several tokens"
    if not isinstance(layer.cache, PagedKV):
        return "keys and values are not in pages"
    attention = layer.layer.mixer
    if not isinstance(attention, Attention):
        return "the layer does not attend to keys and values"
    if (reason := attention.why_not_in_kernel) is not None:
        return reason
    if any(axis is not None for axis in jax.typeof(layer.cache.k).sharding.spec):
        return "devices have heads of their own"
    assert attention.rope is not None
    heads = jax.ShapeDtypeStruct((x.shape[0], *layer.weights["attention"]["qkv"].shape[:-1]), x.dtype)
    half = len(frequencies(attention.rope))
    return layer_matmuls.why_not_attention(heads, layer.cache, _shapes_of_matrices(layer, qkv), half=half)


def matrices_of(layer: Params) -> dict[str, Weight]:
    """Return the four weights of a layer that tokens are multiplied by."""
    attention, mlp = layer["attention"], layer["mlp"]
    return {"qkv": attention["qkv"], "o": attention["out"], "gate_up": mlp["gate_up"], "down": mlp["down"]}


def _shapes_of_matrices(layer: LayerShape, qkv: Weight | None) -> layer_matmuls.Weights:
    weights = matrices_of(layer.weights)
    o, gate_up, down = (as_matrix(name, weights[name].shard) for name in ("o", "gate_up", "down"))
    return layer_matmuls.Weights(o, gate_up, down, None if qkv is None else as_matrix("qkv", qkv.shard))


def as_matrix(name: str, weight: Any) -> Any:
    """Return an array, or its shape, as `small_matmul` takes this weight or a shard of it."""
    match name:
        case "qkv":
            shape = (math.prod(weight.shape[:-1]), weight.shape[-1])
        case "o":
            shape = (weight.shape[0], math.prod(weight.shape[1:]))
        case _:
            return weight
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, weight.dtype)
    return weight.reshape(shape)
