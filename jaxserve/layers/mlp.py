"""Feed-forward blocks: the gated one of Llama and its relatives (Shazeer 2020, arXiv:2002.05202)."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear
from jaxserve.layers.params import Params, ParamSpec

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def gated_mlp_specs(prefix: str, *, hidden_size: int, intermediate_size: int, bias: bool = False) -> Params:
    """Weights of one block: gate and up fused into [2, F, E], down [E, F]. `prefix` names it in the checkpoint."""
    E, F = hidden_size, intermediate_size
    inner = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    specs: Params = {
        "gate_up": ParamSpec(
            shape=(2, F, E),
            axes=(None, "ffn", "embed"),
            source=tuple(f"{name}.weight" for name in inner),
            source_shapes=((F, E), (F, E)),
            transform=_stack,
            quantize=True,
        ),
        "down": ParamSpec(shape=(E, F), axes=("embed", "ffn"), source=(f"{prefix}.down_proj.weight",), quantize=True),
    }
    if bias:
        specs["gate_up_bias"] = ParamSpec(
            shape=(2, F),
            axes=(None, "ffn"),
            source=tuple(f"{name}.bias" for name in inner),
            source_shapes=((F,), (F,)),
            transform=_stack,
            init_scale=0.0,
        )
        specs["down_bias"] = ParamSpec(
            shape=(E,), axes=("embed",), source=(f"{prefix}.down_proj.bias",), init_scale=0.0
        )
    return specs


def _stack(*tensors: np.ndarray) -> np.ndarray:
    return np.stack(tensors)


def gated_mlp(params: Params, x: Float[Array, "T E"], activation: str) -> Float[Array, "T E"]:
    """down(activation(gate(x)) * up(x)); `activation` is a key of ACTIVATIONS."""
    with jax.named_scope("mlp"):
        gate_up = linear(x, params["gate_up"], params.get("gate_up_bias"))
        inner = ACTIVATIONS[activation](gate_up[:, 0]) * gate_up[:, 1]
        return linear(inner, params["down"], params.get("down_bias"))
