"""Several residual streams of which each layer runs on one, by alternating updates (Baykal et al. 2023,
arXiv:2301.13310), and a branch of low rank beside its attention.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.context import StepContext
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import Norm
from jaxserve.layers.params import Params, ParamSpec, matrix_spec

FLOAT32 = jnp.dtype(jnp.float32)
MIN_MEAN_SQUARE = 1e-5
"""Lower bound of the mean square by which a projected stream is divided."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AltUp:
    """The N residual streams of a layer; each device computes all of them.

    Between layers they are one array [T, N * E], one stream after the other. Before the layer's blocks, all streams are
    predicted from all; after them, all are corrected by how much the blocks' result differs from the prediction. A
    router, which reads the active stream, weighs both.

    Attributes:
        num_streams: N, at least 2.
        active: index of the stream that the blocks read and update.
        norm: of the router's input.
        has_scale: the third block reads the corrected active stream times a weight.
        is_first, is_last: the layer makes the streams of the embeddings [T, E], or one stream [T, E] of all.
    """

    num_streams: int
    active: int
    norm: Norm
    has_scale: bool = True
    is_first: bool = False
    is_last: bool = False

    def specs(self, prefix: str, hidden_size: int) -> Params:
        """Declare the weights; `prefix` names the layer in the checkpoint."""
        N, E = self.num_streams, hidden_size

        def coefficients(module: str, *shape: int) -> ParamSpec:
            return matrix_spec(f"{prefix}.altup.{module}", shape, (None,) * len(shape))

        specs: Params = {
            "router_norm": self.norm.specs(f"{prefix}.altup.router_norm", E),
            "router": coefficients("modality_router", N, E),
            "predict": coefficients("prediction_coefs", N, N, N),
            "correct": coefficients("correction_coefs", N, N),
        }
        if self.has_scale:
            source = (f"{prefix}.altup.correct_output_scale",)
            specs["scale"] = ParamSpec(shape=(E,), axes=(None,), source=source, init_scale=None)
        if self.is_first:
            modules = [f"model.altup_projections.{index}" for index in range(N - 1)]
            specs["split"] = matrix_spec(modules, (N - 1, E, E), (None, None, "embed"))
        if self.is_last:
            specs["merge"] = [
                matrix_spec(f"model.altup_unembed_projections.{index}", (E, E), (None, "embed"))
                for index in range(N - 1)
            ]
        return specs

    def predict(self, params: Params, x: Float[Array, "T S"], context: StepContext) -> Float[Array, "T N E"]:
        """Return the predicted streams; `x` has those that the layer before has left, or embeddings."""
        with jax.named_scope("altup"):
            context = context.within("streams")
            streams = self._split(params, x, context) if self.is_first else x.reshape(len(x), self.num_streams, -1)
            modalities = self._modalities(params, streams[:, self.active], context)
            mixing = linear(modalities, params["predict"], context=context, name="predict", output_dtype=FLOAT32)
            wide = streams.astype(jnp.float32)
            # A sum of products, which XLA fuses with what is around it; a matmul of N rows would be rounded on a GPU.
            predicted = wide + jnp.sum(mixing[:, :, :, None] * wide[:, None], axis=2)
            return predicted.astype(x.dtype)

    def correct(
        self, params: Params, predicted: Float[Array, "T N E"], result: Float[Array, "T E"], context: StepContext
    ) -> Float[Array, "T N E"]:
        """Return the streams after the blocks, whose result for the active one is given."""
        with jax.named_scope("altup"):
            context = context.within("streams")
            modalities = self._modalities(params, result, context)
            weights = linear(modalities, params["correct"], context=context, name="correct", output_dtype=FLOAT32)
            wide = predicted.astype(jnp.float32)
            innovation = result.astype(jnp.float32) - wide[:, self.active]
            return (wide + innovation[:, None] * (weights + 1.0)[:, :, None]).astype(predicted.dtype)

    def gate_input(self, params: Params, corrected: Float[Array, "T N E"]) -> Float[Array, "T E"]:
        """Return what the layer's third block reads."""
        active = corrected[:, self.active]
        return active * params["scale"][None] if self.has_scale else active

    def joined(
        self, params: Params, corrected: Float[Array, "T N E"], update: Float[Array, "T E"], context: StepContext
    ) -> Float[Array, "T S"]:
        """Add the third block's update to all streams but the first; return what the layer leaves."""
        with jax.named_scope("altup"):
            others = corrected[:, 1:] + update[:, None]
            if self.is_last:
                return self._merge(params, corrected[:, 0], others, context.within("streams"))
            return jnp.concatenate([corrected[:, :1], others], axis=1).reshape(len(update), -1)

    def _modalities(self, params: Params, x: Float[Array, "T E"], context: StepContext) -> Float[Array, "T N"]:
        normed = self.norm.alone(x, params, "router_norm", context)
        routed = linear(normed, params["router"], context=context, name="router", output_dtype=FLOAT32)
        return jnp.tanh(routed / x.shape[1]).astype(x.dtype)

    def _split(self, params: Params, x: Float[Array, "T E"], context: StepContext) -> Float[Array, "T N E"]:
        others = linear(x, params["split"], context=context, name="split")
        first = x[:, None]
        return jnp.concatenate([first, _as_long_as(first, others)], axis=1)

    def _merge(
        self, params: Params, first: Float[Array, "T E"], others: Float[Array, "T M E"], context: StepContext
    ) -> Float[Array, "T E"]:
        total = first.astype(jnp.float32)
        for index, weight in enumerate(params["merge"]):
            projected = linear(others[:, index], weight, context=context, name="merge")
            total = total + _as_long_as(first, projected).astype(jnp.float32)
        return (total / self.num_streams).astype(first.dtype)


def _as_long_as(x: Float[Array, "*batch E"], y: Float[Array, "*others E"]) -> Float[Array, "*others E"]:
    """Scale the vectors y to the root mean square of x."""

    def mean_square(x: Array) -> Array:
        return jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)

    scale = jnp.sqrt(mean_square(x) / jnp.maximum(mean_square(y), MIN_MEAN_SQUARE))
    return (y.astype(jnp.float32) * scale).astype(y.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laurel:
    """A branch of low rank beside the attention: LAuReL (Menghani et al. 2024, arXiv:2411.07501).

    Attributes:
        rank: R, the size of its inner vectors.
        norm: of its update.
    """

    rank: int
    norm: Norm

    def specs(self, prefix: str, hidden_size: int) -> Params:
        """Declare the weights; `prefix` names the layer in the checkpoint."""
        shapes = {"left": (self.rank, hidden_size), "right": (hidden_size, self.rank)}
        return {
            name: matrix_spec(f"{prefix}.laurel.linear_{name}", shape, (None, None)) for name, shape in shapes.items()
        } | {"norm": self.norm.specs(f"{prefix}.laurel.post_laurel_norm", hidden_size)}

    def run(self, params: Params, x: Float[Array, "T E"], context: StepContext) -> Float[Array, "T E"]:
        """Return the branch's output for the attention's input."""
        with jax.named_scope("laurel"):
            context = context.within("laurel")
            inner = linear(x, params["left"], context=context, name="left")
            return x + self.norm.alone(
                linear(inner, params["right"], context=context, name="right"), params, "norm", context
            )
