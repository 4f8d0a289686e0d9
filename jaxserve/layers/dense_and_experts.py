"""A feed-forward block of which a dense one and experts are two parts side by side, each with norms of its own."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.layers.batch import Batch
from jaxserve.layers.linear import Consumer, no_reader
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.moe import Experts, Routing, moe
from jaxserve.layers.names import Names
from jaxserve.layers.norm import Norm
from jaxserve.layers.params import Params, ParamSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseAndExperts:
    """The block of a Gemma 4 with experts; its input is the residual stream, in a layer without "mlp_norm".

    Attributes:
        norm: of the inputs and outputs of both parts, and without its gain of the router's input.
    """

    why_not_fused = Experts.why_not_fused
    reader = no_reader  # no weight is multiplied by the block's input as it is

    dense: FeedForward
    experts: Experts
    norm: Norm

    @property
    def routing(self) -> Routing:
        """How a token's experts are chosen."""
        return self.experts.routing

    def specs(self, prefix: str, hidden_size: int, names: Names) -> Params:
        """Declare the weights; `prefix` names the layer in the checkpoint, which holds both parts."""
        norms = {
            "dense_norm": "pre_feedforward_layernorm",
            "dense_post_norm": "post_feedforward_layernorm_1",
            "experts_norm": "pre_feedforward_layernorm_2",
            "experts_post_norm": "post_feedforward_layernorm_2",
        }
        router = f"{prefix}.{names.experts.router.rpartition('.')[0]}"
        return (
            self.experts.specs(prefix, hidden_size, names)
            | {name: self.norm.specs(f"{prefix}.{module}", hidden_size) for name, module in norms.items()}
            | {
                "dense": self.dense.specs(f"{prefix}.mlp", hidden_size, names),
                "router_norm": ParamSpec(
                    shape=(hidden_size,), axes=(None,), source=(f"{router}.scale",), init_scale=None
                ),
                "expert_scale": ParamSpec(
                    shape=(self.routing.num_experts,),
                    axes=(None,),
                    source=(f"{router}.per_expert_scale",),
                    init_scale=None,
                ),
            }
        )

    def run(self, params: Params, x: Any, batch: Batch, *, consumer: Consumer) -> Any:  # noqa: ARG002
        """Return the sum of both parts, as one array whatever takes it."""
        context = batch.context

        def normed(x: Any, name: str) -> Any:
            return self.norm.alone(x, params, name, context)

        dense = self.dense.run(params["dense"], normed(x, "dense_norm"), batch, consumer="stream")
        # The gain of the router's norm is divided by the length of a vector of ones, which 16 bits would round.
        scaled = {"router_norm": params["router_norm"].astype(jnp.float32) * x.shape[1] ** -0.5}
        experts = moe(
            params,
            normed(x, "experts_norm"),
            batch.query_starts[batch.num_rows],
            self.routing,
            self.experts.activation,
            context,
            router_input=self.norm.alone(x, scaled, "router_norm", context),
        )
        return normed(dense, "dense_post_norm") + normed(experts, "experts_post_norm")
