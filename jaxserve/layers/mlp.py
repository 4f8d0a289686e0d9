"""Feed-forward blocks: gated as in Llama and its relatives (Shazeer 2020, arXiv:2002.05202), plain as in GPT."""

import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS, Gate, gate_of
from jaxserve.layers.batch import Kernels
from jaxserve.layers.linear import gated_linear_of_codes, linear, linear_with_sum
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.parts import KERNELS_OF_CODES, Kernel, gate_up_part
from jaxserve.layers.rounded import gated_linear_unit_of_rounded
from pallas_kernels import gated_linear_unit as fused
from pallas_kernels.peers import PeerBuffers
from pallas_kernels.row_quantization import QuantizedRows


def gated_mlp_specs(
    prefix: str,
    config: Any,
    *,
    intermediate_size: int | None = None,
    bias: bool = False,
    inputs: tuple[str, ...] = ("gate_proj", "up_proj"),
    output: str = "down_proj",
) -> Params:
    """Declare the weights of one block: gate and up fused into [2, F, E], down [E, F].

    `prefix` names the block in the checkpoint, `inputs` and `output` its parts: gate and up, or one tensor of both.
    `config` has `hidden_size` and, unless it is given, `intermediate_size`.
    """
    E, F = config.hidden_size, intermediate_size or config.intermediate_size
    rows = 2 * F // len(inputs)
    specs: Params = {
        "gate_up": ParamSpec(
            shape=(2, F, E),
            axes=(None, "ffn", "embed"),
            num_inputs=1,
            source=tuple(f"{prefix}.{name}.weight" for name in inputs),
            source_shapes=((rows, E),) * len(inputs),
            quantize=True,
        ),
        "down": _matrix(f"{prefix}.{output}", (E, F), axes=("embed", "ffn")),
    }
    if bias:
        specs["gate_up_bias"] = ParamSpec(
            shape=(2, F),
            axes=(None, "ffn"),
            source=tuple(f"{prefix}.{name}.bias" for name in inputs),
            source_shapes=((rows,),) * len(inputs),
            init_scale=0.0,
        )
        specs["down_bias"] = ParamSpec(shape=(E,), axes=("embed",), source=(f"{prefix}.{output}.bias",), init_scale=0.0)
    return specs


def _matrix(source: str, shape: tuple[int, int], *, axes: tuple[str, str]) -> ParamSpec:
    """Declare a matrix [outputs, inputs] that is a tensor of its own in the checkpoint."""
    return ParamSpec(shape=shape, axes=axes, num_inputs=1, source=(f"{source}.weight",), quantize=True)


def gated_mlp(
    params: Params,
    x: Float[Array, "T E"] | QuantizedRows,
    activation: str | Gate,
    *,
    kernels: Kernels = "xla",
    peers: PeerBuffers | None = None,
    leaves_partial_sums: bool = False,
    leaves_scales: bool = False,
) -> Any:
    """down(activation(gate(x)) * up(x)), in two matmuls; `activation` is as `gate_of` takes it.

    The first includes the activation where `kernels` has one for such rows and weights. `peers`, `leaves_partial_sums`
    and `leaves_scales` are those of `linear_with_sum`, as is the result.
    """
    sums = {"kernels": kernels, "peers": peers, "leaves_partial_sums": leaves_partial_sums}
    sums["leaves_scales"] = leaves_scales
    with jax.named_scope("mlp"):
        inner = _gated_linear_unit(params, x, activation, kernels=kernels)
        return linear_with_sum(inner, params["down"], params.get("down_bias"), **sums)


def _gated_linear_unit(
    params: Params,
    x: Float[Array, "T E"] | QuantizedRows,
    activation: str | Gate,
    *,
    kernels: Kernels,
) -> Float[Array, "T F"] | QuantizedRows:
    """Return the input of `params["down"]`: as codes if it rounds its rows to some, and a kernel gives them."""
    weight, bias = params["gate_up"], params.get("gate_up_bias")
    part = gate_up_part(x, weight, activation, kernels=kernels, has_bias=bias is not None)
    if part.reason is not None:
        gate_up = linear(x, weight, bias, kernels=kernels)
        return gate_of(activation)(gate_up[:, 0], gate_up[:, 1])
    assert isinstance(activation, str)
    function = ACTIVATIONS[activation]
    if part.kernel == Kernel.SCALED_MATMUL:
        return gated_linear_unit_of_rounded(x, weight, params["down"], function, by_xla=kernels == "xla")
    assert not isinstance(x, QuantizedRows)
    if part.kernel in KERNELS_OF_CODES:
        return gated_linear_of_codes(x, weight, activation, part.kernel)
    run = functools.partial(fused.gated_linear_unit, activation=function, implementation=kernels)
    if not jax.typeof(x).sharding.mesh.empty:
        out_spec = PartitionSpec(None, weight.spec[1])
        run = jax.shard_map(run, in_specs=(PartitionSpec(), weight.spec), out_specs=out_spec, check_vma=False)
    return run(x, weight.array())


def mlp_specs(
    prefix: str, config: Any, *, up: str, down: str, intermediate_size: int | None = None, bias: bool = True
) -> Params:
    """Declare the weights of one block without a gate: up [F, E], down [E, F]; `prefix`, `up` and `down` are names in
    the checkpoint.

    `config` has `hidden_size` and, unless it is given, `intermediate_size`.
    """
    E, F = config.hidden_size, intermediate_size or config.intermediate_size
    specs: Params = {
        "up": _matrix(f"{prefix}.{up}", (F, E), axes=("ffn", "embed")),
        "down": _matrix(f"{prefix}.{down}", (E, F), axes=("embed", "ffn")),
    }
    if bias:
        specs["up_bias"] = ParamSpec(shape=(F,), axes=("ffn",), source=(f"{prefix}.{up}.bias",), init_scale=0.0)
        specs["down_bias"] = ParamSpec(shape=(E,), axes=("embed",), source=(f"{prefix}.{down}.bias",), init_scale=0.0)
    return specs


def mlp(
    params: Params,
    x: Float[Array, "T E"],
    activation: str,
    *,
    kernels: Kernels = "xla",
    peers: PeerBuffers | None = None,
) -> Float[Array, "T E"]:
    """down(activation(up(x))); `activation` is a key of ACTIVATIONS, `peers` are those of `linear_with_sum`."""
    sums = {"kernels": kernels, "peers": peers, "leaves_partial_sums": False}
    with jax.named_scope("mlp"):
        inner = ACTIVATIONS[activation](linear(x, params["up"], params.get("up_bias"), kernels=kernels))
        return linear_with_sum(inner, params["down"], params.get("down_bias"), **sums)
