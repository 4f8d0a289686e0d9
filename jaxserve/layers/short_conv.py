"""Gated short convolution (Liquid AI 2025, arXiv:2511.23404): a block that mixes each channel over its last few tokens,
which are all that a request keeps.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.batch import LayerStep
from jaxserve.layers.linear import Consumer, linear, residual_update
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.params import Params, matrix_spec
from jaxserve.layers.states import Dim, Projected, StateSpec, StateWeights, convolution_spec
from jaxserve.layers.weight import Weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """The block of a layer: out(c * convolution(b * x)), with b, c and x projections of the input.

    Attributes:
        num_channels: the size of each of the three.
        width: number of tokens of the convolution.
        has_bias: the projections and the convolution have biases.
    """

    rope = None
    why_not_fused = "the layer keeps a state"

    num_channels: int
    width: int
    has_bias: bool

    @property
    def cache_spec(self) -> StateSpec:
        """What the layer keeps; channels are split over devices."""
        return StateSpec(width=self.width, channels=((Dim(self.num_channels, "channels"),),))

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:  # noqa: ARG002
        """Declare the weights; `prefix` names the block in the checkpoint."""
        C, E = self.num_channels, hidden_size
        specs: Params = {
            "in": matrix_spec(f"{prefix}.in_proj", (3, C, E), (None, "channels", "embed"), quantize=True),
            "convolution": convolution_spec(f"{prefix}.conv", (C, self.width), ("channels", None)),
            "out": matrix_spec(f"{prefix}.out_proj", (E, C), ("embed", "channels"), quantize=True),
        }
        if self.has_bias:
            specs |= {f"{name}_bias": specs[name].bias for name in ("in", "convolution", "out")}
        return specs

    def reader(self, params: Params) -> Weight:
        """Return the only weight that is multiplied by the block's input as it is."""
        return params["in"]

    def run(self, params: Params, x: Float[Array, "T E"], step: LayerStep, *, consumer: Consumer) -> tuple[Any, Any]:
        """Compute the block; return its update, as `residual_update` does, and the cache after this step."""
        batch = step.batch
        with jax.named_scope("short_convolution"):
            wide = linear(x, params["in"], params.get("in_bias"), context=batch.context, name="in")
            b, c, value = wide[:, 0], wide[:, 1], wide[:, 2]
            biases = (params["convolution_bias"],) if self.has_bias else None
            weights = StateWeights((params["convolution"].array(),), biases)
            mixed, cache = step.cache.advance(Projected((b * value,)), weights, batch, None)
            return residual_update(c * mixed.astype(c.dtype), params, "out", batch.context, consumer), cache
