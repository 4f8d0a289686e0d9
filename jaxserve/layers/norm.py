"""Normalisation: by root mean square (Zhang and Sennrich 2019, arXiv:1910.07467), layer norm (arXiv:1607.06450)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.activations import scaled
from jaxserve.layers.context import Kernel, Part, StepContext
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.parts import norm_part, update_norm_part
from jaxserve.layers.peers import summed
from jaxserve.layers.quantized import rows_of
from jaxserve.layers.sharding import shard_map
from jaxserve.layers.weight import Weight
from pallas_kernels import add_rms_norm as fused
from pallas_kernels import all_reduce, row_quantization
from pallas_kernels.peers import peer_buffers_spec
from pallas_kernels.row_quantization import QuantizedRows, UnscaledProduct

LAYER_NORM = Part(Kernel.XLA, "no kernel computes layer norms")
NORM_OF_BLOCK = Part(Kernel.XLA, "no kernel computes norms after blocks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """One kind of normalisation.

    Attributes:
        eps: what is added to the variance or the mean square.
        kind: root mean square, or layer norm.
        offset: added to the gains of a checkpoint, as `norm_spec` says.
        has_gain: False if vectors are normalised and nothing else.
        has_bias: True if a layer norm that has a gain has a bias, too.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    has_gain: bool = True
    has_bias: bool = True

    def specs(self, source: str, size: int) -> ParamSpec | Params:
        """Declare the weights for vectors of this size; `source` is the norm's module in the checkpoint."""
        if not self.has_gain:
            return {}
        if self.kind == "rms":
            return norm_spec(source, size, offset=self.offset)
        return layer_norm_specs(source, size, offset=self.offset, bias=self.has_bias)

    def __call__(self, x: Float[Array, "*batch N"], weights: Any) -> Float[Array, "*batch N"]:
        """Normalise the vectors of the last axis with the weights of `specs`."""
        if self.kind == "layer":
            return layer_norm(x, weights, self.eps)
        return rms_norm(x, weights if self.has_gain else None, self.eps)

    def alone(self, x: Float[Array, "T E"], params: Params, name: str, context: StepContext) -> Float[Array, "T E"]:
        """Normalise with the weights of this name, by XLA."""
        context.choose(name, NORM_OF_BLOCK if self.kind == "rms" else LAYER_NORM, is_product=False)
        return context.call(self, x, x, params[name])

    def of_sum(
        self,
        x: Float[Array, "T E"],
        update: Any,
        weights: Any,
        context: StepContext,
        name: str | None = None,
        *,
        reader: Weight | None = None,
    ) -> tuple[Float[Array, "T E"], Any]:
        """Return the sum of a residual stream and an update, and its norm, as `add_rms_norm` does where it can. An
        update of None is nothing to add. `name` is what the record calls the norm.
        """
        if self.kind == "rms" and update is not None:
            return add_rms_norm(x, update, weights, self.eps, context, name, reader=reader)
        total = add_update(x, update, context)
        if self.kind == "layer":
            context.choose(name, LAYER_NORM, is_product=False)
        return total, context.call(self, total, total, weights)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingUpdate:
    """An update of the residual stream that is still to be normalised or scaled: where it is added, so that all of it
    can be one kernel.
    """

    value: Any
    """[T, E], the same on all devices."""
    weights: Any
    """Those of the norm; None if there is no norm."""
    norm: Norm | None = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    """Factor of the update after its norm."""
    name: str | None = dataclasses.field(default=None, metadata={"static": True})
    """What the record calls the norm."""

    def finished(self) -> Float[Array, "T E"]:
        """Return the update as it is added."""
        update = self.value if self.norm is None else self.norm(self.value, self.weights)
        return scaled(update, self.scale)


def add_update(x: Float[Array, "T E"], update: Any, context: StepContext) -> Float[Array, "T E"]:
    """Return the sum of a residual stream and an update: an array, partial sums of devices, an UnscaledProduct, a
    PendingUpdate, whose norm is one kernel with the addition if there is one for such rows, or None if there is nothing
    to add.
    """
    if update is None:
        return x
    if isinstance(update, PendingUpdate):
        norm, part = update.norm, update_norm_part(x, None, kernels=context.kernels)
        if norm is not None:
            context.choose(update.name, part if norm.kind == "rms" else LAYER_NORM, is_product=False)
        if norm is not None and norm.kind == "rms" and part.kernel == Kernel.ADD_RMS_NORM:
            options: dict[str, Any] = {"eps": norm.eps, "update_scale": update.scale, "implementation": context.kernels}
            run = functools.partial(fused.add_normed_update, **options)
            return context.call(_on_each_device, x, run, x, update.value, update.weights)
        update = update.finished()
    if isinstance(update, UnscaledProduct):
        update = update.values()
    return x + summed(update, context)


def norm_spec(source: str, size: int, *, offset: float = 0.0) -> ParamSpec:
    """Declare the gain of one RMS norm; `source` is its module's name in the checkpoint.

    `offset` is added to the checkpoint's values: Gemma and Nemotron store gain - 1. Such gains stay in float32, since a
    narrow type is more precise near 0 than near 1.
    """
    name, dtype = f"{source}.weight", None if offset == 0.0 else jnp.float32
    return ParamSpec(shape=(size,), axes=(None,), source=(name,), offset=offset, dtype=dtype, init_scale=None)


def layer_norm_specs(source: str, size: int, *, offset: float = 0.0, bias: bool = True) -> Params:
    """Gain and bias of one layer norm; `source` is its module's name in the checkpoint, `offset` as in `norm_spec`."""
    specs: Params = {"gain": norm_spec(source, size, offset=offset)}
    if bias:
        specs["bias"] = ParamSpec(shape=(size,), axes=(None,), source=(f"{source}.bias",), init_scale=0.0)
    return specs


def rms_norm(x: Float[Array, "*batch N"], weight: Float[Array, "... N"] | None, eps: float) -> Float[Array, "*batch N"]:
    """Scale the vectors of the last axis to a root mean square of 1, times `weight` if given; computed in float32.

    A weight of [H, N] has one vector for each of the H heads in x [T, H, N].
    """
    with jax.named_scope("norm"):
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        normed = wide * scale if weight is None else wide * scale * _spread(weight, x.ndim)
        return normed.astype(x.dtype)


def add_rms_norm(
    x: Float[Array, "T E"],
    update: Float[Array, "T E"] | UnscaledProduct | PendingUpdate,
    weight: Float[Array, " E"],
    eps: float,
    context: StepContext,
    name: str | None = None,
    *,
    reader: Weight | None = None,
) -> tuple[Float[Array, "T E"], Float[Array, "T E"] | QuantizedRows]:
    """Return the sum and its `rms_norm`, in one kernel if there is one for such rows.

    That kernel also rounds the norm if the weight `reader` alone is multiplied by it, and rounds its rows; otherwise it
    finishes a PendingUpdate. Each device may have a partial sum of `update`, as `linear` leaves it;
    these are added up through `context.peers`.
    """
    kernels = context.kernels
    code = None if reader is None else reader.product(x, context).rounds_to

    def run_fused(x: Array, update: Array, weight: Array, gain: Array | None = None, *, scale: float = 1.0) -> Any:
        options: dict[str, Any] = {"eps": eps, "update_scale": scale, "implementation": kernels}
        return fused.add_rms_norm(x, update, weight, update_gain=gain, **options)

    if isinstance(update, PendingUpdate):
        norm, part = update.norm, update_norm_part(x, code, kernels=kernels)
        if norm is not None:
            context.choose(update.name, part if norm.kind == "rms" else LAYER_NORM, is_product=False)
        is_rms = norm is None or (norm.kind == "rms" and norm.eps == eps)
        if is_rms and part.kernel == Kernel.ADD_RMS_NORM:
            context.choose(name, part, is_product=False)
            run = functools.partial(run_fused, scale=update.scale)
            return context.call(_on_each_device, (x, x), run, x, update.value, weight, update.weights)
        update = update.finished()
    unreduced = frozenset() if isinstance(update, UnscaledProduct) else jax.typeof(update).sharding.spec.unreduced
    part = norm_part(x, code, kernels=kernels, has_partial_sums=bool(unreduced))
    kernel = context.choose(name, part, is_product=False)
    if kernel == Kernel.ALL_REDUCE:
        assert not isinstance(update, UnscaledProduct)
        [axis] = unreduced
        run = functools.partial(all_reduce.all_reduce_add_rms_norm, axis_name=axis, eps=eps, implementation=kernels)
        everywhere, of_device = PartitionSpec(), peer_buffers_spec(jax.typeof(x).sharding.mesh)
        with jax.named_scope("norm"):
            in_specs = everywhere, PartitionSpec(unreduced=unreduced), everywhere, of_device
            return context.call(shard_map(run, in_specs, everywhere), (x, x), x, update, weight, context.peers)
    if kernel == Kernel.ROW_QUANTIZATION:
        assert code is not None
        run = functools.partial(row_quantization.add_rms_norm_and_quantize, code=code, eps=eps, implementation=kernels)
        return context.call(_on_each_device, (x, rows_of(x, code)), run, x, update, weight)
    if isinstance(update, UnscaledProduct):
        update = update.values()
    if kernel == Kernel.XLA:
        total = x + update
        return total, rms_norm(total, weight, eps)
    return context.call(_on_each_device, (x, x), run_fused, x, update, weight)


def _on_each_device(run: Callable[..., Any], x: Array, *others: Any) -> Any:
    if not jax.typeof(x).sharding.mesh.empty:
        run = shard_map(run, PartitionSpec(), PartitionSpec())  # each device has all rows
    with jax.named_scope("norm"):
        return run(x, *others)


def layer_norm(x: Float[Array, "*batch N"], params: Params, eps: float) -> Float[Array, "*batch N"]:
    """Normalize the vectors of the last axis to mean 0 and variance 1, then apply the gain and the bias, if any.

    Computed in float32. A gain of [H, N] has one vector for each of the H heads in x [T, H, N].
    """
    with jax.named_scope("norm"):
        wide = x.astype(jnp.float32)
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
        if "gain" in params:
            y = y * _spread(params["gain"], x.ndim)
        if "bias" in params:
            y = y + _spread(params["bias"], x.ndim)
        return y.astype(x.dtype)


def _spread(weight: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
    return jnp.expand_dims(weight.astype(jnp.float32), tuple(range(ndim - weight.ndim)))
