"""Per-layer embeddings (Gemma Team 2025, Gemma 3n): a third block of a layer, by which each token adds to the residual
stream what an embedding for this layer says of it.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS
from jaxserve.layers.batch import Batch
from jaxserve.layers.linear import linear
from jaxserve.layers.params import Params, matrix_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInput:
    """The block; each device computes all of it.

    Attributes:
        size: P, the size of a token's vector for a layer, `Batch.layer_inputs`.
        activation: a key of ACTIVATIONS.
    """

    size: int
    activation: str

    def specs(self, prefix: str, hidden_size: int) -> Params:
        """Declare the weights; `prefix` names the layer in the checkpoint."""
        shapes = {"gate": (self.size, hidden_size), "out": (hidden_size, self.size)}
        modules = {"gate": "per_layer_input_gate", "out": "per_layer_projection"}
        return {name: matrix_spec(f"{prefix}.{modules[name]}", shape, (None, None)) for name, shape in shapes.items()}

    def run(self, params: Params, x: Float[Array, "T E"], batch: Batch) -> Float[Array, "T E"]:
        """Return the block's update, before its norm."""
        assert batch.layer_inputs is not None
        with jax.named_scope("layer_input"):
            context = batch.context.within("layer input")
            gate = ACTIVATIONS[self.activation](linear(x, params["gate"], context=context, name="gate"))
            return linear(gate * batch.layer_inputs, params["out"], context=context, name="out")
