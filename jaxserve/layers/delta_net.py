"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): a block whose heads keep a matrix each, instead of all tokens.

Queries, keys and values pass a short causal convolution, then the gated delta rule (`layers.delta_rule`); a head's
output is normalised and gated. What a request keeps is one state, whatever the length of its text: the last inputs of
the convolution, and the matrices.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS
from jaxserve.layers.batch import LayerStep
from jaxserve.layers.linear import Consumer, linear, no_reader, residual_update
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.norm import norm_spec, rms_norm
from jaxserve.layers.params import Params, ParamSpec, matrix_spec
from jaxserve.layers.states import Dim, Projected, StateSpec, StateWeights, convolution_spec
from pallas_kernels.recurrent_step import Mixed


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaHeads:
    """The heads of one block: H of keys, each with G of values."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    width: int
    """Number of tokens of the convolution."""

    @property
    def group_size(self) -> int:
        """G, the number of value heads that have a key head in common."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_channels(self) -> int:
        """The number of channels of a key head: of its query, its key and its values."""
        return 2 * self.key_size + self.group_size * self.value_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """The block of a layer.

    Attributes:
        activation: that of the convolution.
        norm_eps: of the norm of a head's output.
        max_beta: the strength of an update is between 0 and this; above 1 a state may be reflected.
    """

    rope = None  # the order of tokens is in the state
    why_not_fused = "the layer keeps a state"
    reader = no_reader  # two weights are multiplied by the block's input
    corrects = True
    decays_by_channel = False

    heads: DeltaHeads
    activation: str
    norm_eps: float
    max_beta: float = 1.0

    @property
    def cache_spec(self) -> StateSpec:
        """What the layer keeps; key heads are split over devices."""
        heads = self.heads
        key_heads = Dim(heads.num_key_heads, "key_heads")
        return StateSpec(
            width=heads.width,
            channels=((key_heads, Dim(heads.num_channels)),),
            matrix=(key_heads, Dim(heads.group_size), Dim(heads.key_size), Dim(heads.value_size)),
            corrects=self.corrects,
        )

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights; `prefix` names the block in the checkpoint.

        All rows are by key head, so that a split over key heads keeps together what meets: "in" has of each its query,
        its key, its values and the gates of these; "rates", which stays in the dtype of activations, has for each of
        its values a strength and a decay.
        """
        heads, own, E = self.heads, names.delta_net, hidden_size
        H, G, K, V = heads.num_key_heads, heads.group_size, heads.key_size, heads.value_size
        sizes = [H * K, H * K, H * G * V, H * G * V]
        channels = rows_by_head(H, [K, K, G * V])

        def projection(modules: tuple[str, ...], sizes: list[int], num_rows: int, rows: np.ndarray) -> ParamSpec:
            if len(modules) == 1:  # by key head already
                sizes, rows_of_source = [sum(sizes)], None
            else:
                rows_of_source = rows
                if len(modules) < len(sizes):  # one of query, key and values
                    sizes = [sum(sizes[:-1]), sizes[-1]]
            sources = [f"{prefix}.{module}" for module in modules]
            axes = ("key_heads", None, "embed")
            return matrix_spec(sources, (H, num_rows, E), axes, num_outputs=sizes, rows=rows_of_source)

        def of_value_heads(name: str) -> ParamSpec:
            return ParamSpec(
                shape=(H, G),
                axes=("key_heads", None),
                dtype=np.float32,
                source=(f"{prefix}.{name}",),
                source_shapes=((H * G,),),
                init_scale=0.0,
            )

        wide = projection(own.qkvz, sizes, heads.num_channels + G * V, rows_by_head(H, [K, K, G * V, G * V]))
        return {
            "in": dataclasses.replace(wide, quantize=True),
            "rates": projection(own.rates, [H * G, H * G], 2 * G, rows_by_head(H, [G, G])),
            "convolution": convolution_spec(
                [f"{prefix}.{module}" for module in own.convolution],
                (H, heads.num_channels, heads.width),
                ("key_heads", None, None),
                num_channels=sizes[:3] if len(own.convolution) > 1 else None,
                rows=channels,
            ),
            "a_log": of_value_heads("A_log"),
            "dt_bias": of_value_heads("dt_bias"),
            "norm": norm_spec(f"{prefix}.{own.norm}", V),
            "out": matrix_spec(
                f"{prefix}.{own.out}", (E, H, G * V), ("embed", "key_heads", None), num_inputs=2, quantize=True
            ),
        }

    def run(self, params: Params, x: Float[Array, "T E"], step: LayerStep, *, consumer: Consumer) -> tuple[Any, Any]:
        """Compute the block; return its update, as `residual_update` does, and the cache after this step."""
        context = step.batch.context
        with jax.named_scope("delta_net"):
            wide = linear(x, params["in"], context=context, name="in")
            rates = linear(x, params["rates"], context=context, name="rates", output_dtype=jnp.dtype(jnp.float32))
            mixed, gate = jnp.split(wide, [self.heads.num_channels], axis=-1)
            weights = StateWeights((params["convolution"].array(),), a_log=params["a_log"], dt_bias=params["dt_bias"])
            out, cache = step.cache.advance(Projected((mixed,), rates), weights, step.batch, self)
            y = context.call(self._gated, gate, out, gate, params["norm"])
            return residual_update(y, params, "out", context, consumer), cache

    def tokens(self, mixed: tuple[Float[Array, "T H C"], ...], projected: Projected, weights: StateWeights) -> Mixed:
        """Return what the delta rule's tokens are made of, of the outputs of the convolution; heads are those of a
        device.
        """
        assert projected.rates is not None
        assert weights.a_log is not None
        assert weights.dt_bias is not None
        return Mixed(
            heads=ACTIVATIONS[self.activation](mixed[0]),
            rates=projected.rates.astype(jnp.float32),
            a_log=weights.a_log,
            dt_bias=weights.dt_bias,
            key_size=self.heads.key_size,
            max_beta=self.max_beta,
        )

    def _gated(
        self, out: Float[Array, "T H values"], gate: Float[Array, "T H values"], gain: Float[Array, " V"]
    ) -> Float[Array, "T H values"]:
        """Return the normalised output of heads times their gates, in the gates' dtype."""
        out = out.reshape(*out.shape[:2], self.heads.group_size, self.heads.value_size)
        normed = rms_norm(out, gain, self.norm_eps).reshape(gate.shape)
        return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def rows_by_head(num_heads: int, sizes: list[int]) -> np.ndarray:
    """Return the rows of parts, one part after the other, each of which has `size` rows for each head, by head."""
    starts = np.cumsum([0, *(num_heads * size for size in sizes)])
    parts = [
        start + np.arange(num_heads * size, dtype=np.int32).reshape(num_heads, size)
        for start, size in zip(starts, sizes, strict=False)
    ]
    return np.concatenate(parts, axis=1).ravel()
