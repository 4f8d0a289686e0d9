"""Feed-forward blocks: gated as in Llama and its relatives (Shazeer 2020, arXiv:2002.05202), plain as in GPT."""

import dataclasses
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS, FUSED_ACTIVATIONS, Gate, gate_of, why_not_activation
from jaxserve.layers.batch import Batch
from jaxserve.layers.context import PLAIN, StepContext, result
from jaxserve.layers.linear import Consumer, linear, residual_update
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.params import Params, ParamSpec, matrix_spec
from jaxserve.layers.quantized import rows_of
from jaxserve.layers.weight import Use, Weight
from pallas_kernels.row_quantization import QuantizedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class XIELU:
    """xIELU (Huang and Schlag 2024, arXiv:2411.13010), whose slopes are weights: a parabola above 0, below it an
    exponential. Each layer has its own numbers, which no kernel takes.
    """

    def specs(self, prefix: str) -> Params:
        """Declare the weights, in float32; `prefix` names the activation's module in the checkpoint."""
        shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        return {
            name: ParamSpec(
                shape=(1,),
                axes=(None,),
                dtype=np.float32,
                source=(f"{prefix}.{name}",),
                source_shapes=(shape,),
                init_scale=0.0,
            )
            for name, shape in shapes.items()
        }

    def __call__(self, x: Array, weights: Params) -> Array:
        """Return the activations of x, computed in float32."""
        wide, beta = x.astype(jnp.float32), weights["beta"][0]
        above = jax.nn.softplus(weights["alpha_p"][0])
        below = beta + jax.nn.softplus(weights["alpha_n"][0])
        decayed = jnp.expm1(jnp.minimum(wide, weights["eps"][0])) - wide
        return (jnp.where(wide > 0, above * wide * wide, below * decayed) + beta * wide).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward:
    """A feed-forward block of a layer.

    Attributes:
        size: F, the number of its inner values.
        activation: as for `gate_of`; without a gate a key of ACTIVATIONS, or an XIELU.
        is_gated: down(activation(gate(x)) * up(x)); otherwise down(activation(up(x))).
        has_bias: both matrices have biases.
        sparsity: the fraction of a token's gates that `gaussian_top_k` makes 0 before the activation; 0.0 leaves all.
    """

    size: int
    activation: str | Gate | XIELU
    is_gated: bool = True
    has_bias: bool = False
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for a sparsity without gates."""
        if self.sparsity and not self.is_gated:
            raise ValueError(f"sparsity {self.sparsity} is of gates, and there are none")

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights: gate and up fused into [2, F, E], or up [F, E], then down [E, F].

        `prefix` names the block in the checkpoint, `names` its tensors: gate and up, or one tensor of both.
        """
        E, F = hidden_size, self.size
        inputs, name = (names.gate_up, "gate_up") if self.is_gated else ((names.up,), "up")
        outputs = (2, F) if self.is_gated else (F,)
        axes = (None, "ffn") if self.is_gated else ("ffn",)
        modules = [f"{prefix}.{module}" for module in inputs]
        specs: Params = {
            name: matrix_spec(modules, (*outputs, E), (*axes, "embed"), quantize=True),
            "down": matrix_spec(f"{prefix}.{names.down}", (E, F), ("embed", "ffn"), quantize=True),
        }
        if self.has_bias:
            specs |= {f"{each}_bias": specs[each].bias for each in (name, "down")}
        if isinstance(self.activation, XIELU):
            specs["activation"] = self.activation.specs(f"{prefix}.{names.activation}")
        return specs

    def reader(self, params: Params) -> Weight | None:
        """Return the only weight that is multiplied by the block's input as it is; None if there is none."""
        return params.get("gate_up")

    def run(self, params: Params, x: Any, batch: Batch, *, consumer: Consumer) -> Any:
        """Compute the block; the result is that of `residual_update`."""
        if not self.is_gated:
            return mlp(params, x, self.activation, batch.context, consumer)
        assert not isinstance(self.activation, XIELU)
        return gated_mlp(params, x, self.activation, batch.context, consumer, sparsity=self.sparsity)

    @property
    def why_not_fused(self) -> str | None:
        """Why no kernel of a whole layer has this block, or None if some do."""
        if not self.is_gated:
            return "the feed-forward has no gate"
        if self.has_bias:
            return "the feed-forward has biases"
        if self.sparsity:
            return "the feed-forward has sparse gates"
        if isinstance(self.activation, str) and self.activation in FUSED_ACTIVATIONS:
            return None
        return None if isinstance(self.activation, XIELU) else why_not_activation(self.activation)


def gated_mlp(
    params: Params,
    x: Float[Array, "T E"] | QuantizedRows,
    activation: str | Gate,
    context: StepContext = PLAIN,
    consumer: Consumer = "stream",
    *,
    sparsity: float = 0.0,
) -> Any:
    """down(activation(gate(x)) * up(x)), in two matmuls; `activation` is as `gate_of` takes it.

    The first includes the activation where a kernel does for such rows and weights; none does with a `sparsity`, which
    is that of a FeedForward. `consumer` is that of `residual_update`, as is the result.
    """
    with jax.named_scope("mlp"):
        inner = _gated_linear_unit(params, x, activation, context, sparsity)
        return residual_update(inner, params, "down", context, consumer)


def _gated_linear_unit(
    params: Params,
    x: Float[Array, "T E"] | QuantizedRows,
    activation: str | Gate,
    context: StepContext,
    sparsity: float,
) -> Float[Array, "T F"] | QuantizedRows:
    """Return the input of `params["down"]`: as codes if it rounds its rows to some, and a kernel gives them."""
    weight, bias = params["gate_up"], params.get("gate_up_bias")
    if sparsity:  # which needs all gates of a token, where kernels have tiles of them
        gate_up = linear(x, weight, bias, context=context, name="gate_up")
        return gate_of(activation)(gaussian_top_k(gate_up[:, 0], sparsity), gate_up[:, 1])
    product = weight.product(x, context, Use(activation, has_bias=bias is not None))
    context.choose("gate_up", product.part)
    if product.part.reason is not None:
        gate_up = linear(x, weight, bias, context=context)
        return gate_of(activation)(gate_up[:, 0], gate_up[:, 1])
    out_spec = PartitionSpec() if weight.mesh.empty else PartitionSpec(None, weight.spec[1])
    makes = result((len(x), weight.shape[1]), x.dtype, NamedSharding(weight.mesh, out_spec))
    if product.rounds_to is None:
        return context.call(product.run, makes, x)
    code = params["down"].product(makes, context).rounds_to
    return context.call(product.run, makes if code is None else rows_of(makes, code), x, code)


def gaussian_top_k(x: Float[Array, "T F"], sparsity: float) -> Float[Array, "T F"]:
    """Return by how much each value exceeds a quantile of its row, 0 if it does not: the quantile of `sparsity` of a
    normal distribution with the row's mean and variance. Computed in float32.
    """
    wide = x.astype(jnp.float32)
    mean, deviation = (of_row(wide, axis=-1, keepdims=True) for of_row in (jnp.mean, jnp.std))
    cutoff = mean + deviation * statistics.NormalDist().inv_cdf(sparsity)
    return jax.nn.relu(wide - cutoff).astype(x.dtype)


def mlp(
    params: Params,
    x: Float[Array, "T E"],
    activation: str | Gate | XIELU,
    context: StepContext = PLAIN,
    consumer: Consumer = "stream",
) -> Any:
    """down(activation(up(x))); `activation` is a key of ACTIVATIONS or an XIELU, the rest is as for `gated_mlp`."""
    assert isinstance(activation, str | XIELU)
    with jax.named_scope("mlp"):
        inner = linear(x, params["up"], params.get("up_bias"), context=context, name="up")
        is_learned = isinstance(activation, XIELU)
        inner = activation(inner, params["activation"]) if is_learned else ACTIVATIONS[activation](inner)
        return residual_update(inner, params, "down", context, consumer)
