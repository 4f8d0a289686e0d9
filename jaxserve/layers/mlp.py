"""Feed-forward blocks: gated as in Llama and its relatives (Shazeer 2020, arXiv:2002.05202), plain as in GPT."""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS, FUSED_ACTIVATIONS, XIELU, Gate, gate_of
from jaxserve.layers.batch import Batch
from jaxserve.layers.context import PLAIN, Kernel, StepContext, result
from jaxserve.layers.linear import Consumer, gated_linear_of_codes, linear, residual_update
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.parts import KERNELS_OF_CODES, gate_up_part, why_not_activation
from jaxserve.layers.rounded import gated_linear_unit_of_rounded, rows_of
from jaxserve.layers.weight import Weight
from pallas_kernels import gated_linear_unit as fused
from pallas_kernels.row_quantization import QuantizedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward:
    """A feed-forward block of a layer.

    Attributes:
        size: F, the number of its inner values.
        activation: as for `gate_of`; without a gate a key of ACTIVATIONS, or an XIELU.
        is_gated: down(activation(gate(x)) * up(x)); otherwise down(activation(up(x))).
        has_bias: both matrices have biases.
    """

    size: int
    activation: str | Gate | XIELU
    is_gated: bool = True
    has_bias: bool = False

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights: gate and up fused into [2, F, E], or up [F, E], then down [E, F].

        `prefix` names the block in the checkpoint, `names` its tensors: gate and up, or one tensor of both.
        """
        E, F = hidden_size, self.size
        inputs, name = (names.gate_up, "gate_up") if self.is_gated else ((names.up,), "up")
        outputs = (2, F) if self.is_gated else (F,)
        axes = (None, "ffn") if self.is_gated else ("ffn",)
        rows = math.prod(outputs) // len(inputs)
        specs: Params = {
            name: ParamSpec(
                shape=(*outputs, E),
                axes=(*axes, "embed"),
                num_inputs=1,
                source=tuple(f"{prefix}.{tensor}.weight" for tensor in inputs),
                source_shapes=((rows, E),) * len(inputs),
                quantize=True,
            ),
            "down": ParamSpec(
                shape=(E, F),
                axes=("embed", "ffn"),
                num_inputs=1,
                source=(f"{prefix}.{names.down}.weight",),
                quantize=True,
            ),
        }
        if self.has_bias:
            specs[f"{name}_bias"] = ParamSpec(
                shape=outputs,
                axes=axes,
                source=tuple(f"{prefix}.{tensor}.bias" for tensor in inputs),
                source_shapes=((rows,),) * len(inputs),
                init_scale=0.0,
            )
            specs["down_bias"] = ParamSpec(
                shape=(E,), axes=("embed",), source=(f"{prefix}.{names.down}.bias",), init_scale=0.0
            )
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
        return gated_mlp(params, x, self.activation, batch.context, consumer)

    @property
    def why_not_fused(self) -> str | None:
        """Why no kernel of a whole layer has this block, or None if some do."""
        if not self.is_gated:
            return "the feed-forward has no gate"
        if self.has_bias:
            return "the feed-forward has biases"
        if isinstance(self.activation, str) and self.activation in FUSED_ACTIVATIONS:
            return None
        return None if isinstance(self.activation, XIELU) else why_not_activation(self.activation)


def gated_mlp(
    params: Params,
    x: Float[Array, "T E"] | QuantizedRows,
    activation: str | Gate,
    context: StepContext = PLAIN,
    consumer: Consumer = "stream",
) -> Any:
    """down(activation(gate(x)) * up(x)), in two matmuls; `activation` is as `gate_of` takes it.

    The first includes the activation where a kernel does for such rows and weights. `consumer` is that of
    `residual_update`, as is the result.
    """
    with jax.named_scope("mlp"):
        inner = _gated_linear_unit(params, x, activation, context)
        return residual_update(inner, params, "down", context, consumer)


def _gated_linear_unit(
    params: Params, x: Float[Array, "T E"] | QuantizedRows, activation: str | Gate, context: StepContext
) -> Float[Array, "T F"] | QuantizedRows:
    """Return the input of `params["down"]`: as codes if it rounds its rows to some, and a kernel gives them."""
    weight, bias, kernels = params["gate_up"], params.get("gate_up_bias"), context.kernels
    part = gate_up_part(x, weight, activation, kernels=kernels, has_bias=bias is not None)
    kernel = context.choose("gate_up", part)
    if part.reason is not None:
        gate_up = linear(x, weight, bias, context=context)
        return gate_of(activation)(gate_up[:, 0], gate_up[:, 1])
    assert isinstance(activation, str)
    function = ACTIVATIONS[activation]
    mesh = weight.mesh
    out_spec = PartitionSpec() if mesh.empty else PartitionSpec(None, weight.spec[1])
    makes = result((len(x), weight.shape[1]), x.dtype, NamedSharding(mesh, out_spec))
    if kernel == Kernel.SCALED_MATMUL:
        code = params["down"].rounds_to(len(x), 1)
        makes = makes if code is None else rows_of(makes, code)
        options: dict[str, Any] = {"code": code, "by_xla": kernels == "xla"}
        return context.call(gated_linear_unit_of_rounded, makes, x, weight, function, **options)
    assert not isinstance(x, QuantizedRows)
    if kernel in KERNELS_OF_CODES:
        return context.call(gated_linear_of_codes, makes, x, weight, activation, kernel)
    run = functools.partial(fused.gated_linear_unit, activation=function, implementation=kernels)
    if not mesh.empty:
        run = jax.shard_map(run, in_specs=(PartitionSpec(), weight.spec), out_specs=out_spec, check_vma=False)
    return context.call(run, makes, x, weight.array())


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
