"""Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692): Gated DeltaNet in which each channel of a key has a decay.

Decays and the gates of outputs are projected through vectors of the size of a head, in Ling 3 at once. What a request
keeps is that of `layers.delta_net`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS
from jaxserve.layers.batch import LayerStep
from jaxserve.layers.delta_net import rows_by_head
from jaxserve.layers.linear import Consumer, linear, no_reader, residual_update
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.norm import norm_spec, rms_norm
from jaxserve.layers.params import Params, ParamSpec, matrix_spec
from jaxserve.layers.states import Dim, Projected, StateSpec, StateWeights, convolution_spec
from pallas_kernels.recurrent_step import Tokens, unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiDelta:
    """The block of a layer.

    Attributes:
        num_heads: H.
        head_size: K, the size of queries, keys and values.
        width: number of tokens of the convolutions.
        activation: that of the convolutions.
        norm_eps: of the norm of a head's output.
        has_low_rank: projections of decays and gates are products of two.
        min_log_decay: a bound, below 0, that the logarithm of a decay approaches; None if there is none.
    """

    rope = None  # the order of tokens is in the state
    why_not_fused = "the layer keeps a state"
    reader = no_reader  # several weights are multiplied by the block's input
    corrects = True
    decays_by_channel = True

    num_heads: int
    head_size: int
    width: int
    activation: str
    norm_eps: float
    has_low_rank: bool = True
    min_log_decay: float | None = None

    @property
    def cache_spec(self) -> StateSpec:
        """What the layer keeps; heads are split over devices."""
        heads, size = Dim(self.num_heads, "key_heads"), Dim(self.head_size)
        return StateSpec(
            width=self.width,
            channels=((heads, Dim(3 * self.head_size)),),
            matrix=(heads, Dim(1), size, size),
            corrects=self.corrects,
            decays_by_channel=self.decays_by_channel,
        )

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights; `prefix` names the block in the checkpoint.

        "in" has of each head its query, its key and its value. "low" makes the small vectors that "decay" and "gate"
        are multiplied by, if there are any; it is whole on every device.
        """
        H, K, E = self.num_heads, self.head_size, hidden_size
        by_head = rows_by_head(H, [K, K, K])

        def of_heads(module: str, size: int, inputs: int) -> ParamSpec:
            axes = ("key_heads", None, "embed" if inputs == E else None)
            return matrix_spec(f"{prefix}.{module}", (H, size, inputs), axes)

        def in_float32(name: str, source_shape: tuple[int, ...], *shape: int) -> ParamSpec:
            return ParamSpec(
                shape=(H, *shape),
                axes=("key_heads", *(None,) * len(shape)),
                dtype=np.float32,
                source=(f"{prefix}.{name}",),
                source_shapes=(source_shape,),
                init_scale=0.0,
            )

        if self.has_low_rank:
            low = matrix_spec([f"{prefix}.{name}" for name in ("f_a_proj", "g_a_proj")], (2 * K, E), (None, "embed"))
            projections = {"low": low, "decay": of_heads("f_b_proj", K, K), "gate": of_heads("g_b_proj", K, K)}
        else:
            projections = {"decay": of_heads("f_proj", K, E), "gate": of_heads("g_proj", K, E)}
        return projections | {
            "in": matrix_spec(
                [f"{prefix}.{name}" for name in names.qkv],
                (H, 3 * K, E),
                ("key_heads", None, "embed"),
                rows=by_head,
                quantize=True,
            ),
            "strength": of_heads("b_proj", 1, E),
            "convolution": convolution_spec(
                [f"{prefix}.{name}" for name in ("q_conv1d", "k_conv1d", "v_conv1d")],
                (H, 3 * K, self.width),
                ("key_heads", None, None),
                rows=by_head,
            ),
            "a_log": in_float32("A_log", (1, 1, H, 1) if self.has_low_rank else (H,), 1),
            "dt_bias": in_float32("dt_bias", (H * K,), 1, K),
            "norm": norm_spec(f"{prefix}.o_norm", K),
            "out": matrix_spec(
                f"{prefix}.{names.out}", (E, H, K), ("embed", "key_heads", None), num_inputs=2, quantize=True
            ),
        }

    def run(self, params: Params, x: Float[Array, "T E"], step: LayerStep, *, consumer: Consumer) -> tuple[Any, Any]:
        """Compute the block; return its update, as `residual_update` does, and the cache after this step."""
        context, in_float32 = step.batch.context, jnp.dtype(jnp.float32)
        with jax.named_scope("kimi_delta"):
            mixed = linear(x, params["in"], context=context, name="in")
            for_decay = for_gate = x
            if self.has_low_rank:
                for_decay, for_gate = jnp.split(linear(x, params["low"], context=context, name="low"), 2, axis=-1)
            strength = linear(x, params["strength"], context=context, name="strength", output_dtype=in_float32)
            decay = linear(for_decay, params["decay"], context=context, name="decay", output_dtype=in_float32)
            gate = linear(for_gate, params["gate"], context=context, name="gate")
            projected = Projected((mixed,), jnp.concatenate([strength, decay], axis=-1))
            weights = StateWeights((params["convolution"].array(),), a_log=params["a_log"], dt_bias=params["dt_bias"])
            out, cache = step.cache.advance(projected, weights, step.batch, self)
            y = context.call(self._gated, gate, out, gate, params["norm"])
            return residual_update(y, params, "out", context, consumer), cache

    def tokens(self, mixed: tuple[Float[Array, "T H C"], ...], projected: Projected, weights: StateWeights) -> Tokens:
        """Return what the delta rule reads, of the outputs of the convolutions; heads are those of a device."""
        assert projected.rates is not None
        assert weights.a_log is not None
        assert weights.dt_bias is not None
        q, k, v = jnp.split(ACTIVATIONS[self.activation](mixed[0]), 3, axis=-1)
        strength, decay = jnp.split(projected.rates, [1], axis=-1)
        step, rate = decay[:, :, None] + weights.dt_bias[None], jnp.exp(weights.a_log)[None, ..., None]
        if self.min_log_decay is None:
            log_decay = -rate * jax.nn.softplus(step)
        else:
            log_decay = self.min_log_decay * jax.nn.sigmoid(rate * step)
        return Tokens(
            q=unit(q) * self.head_size**-0.5,
            k=unit(k),
            v=v[:, :, None],
            log_decay=log_decay,
            beta=jax.nn.sigmoid(strength),
        )

    def _gated(
        self, out: Float[Array, "T H K"], gate: Float[Array, "T H K"], gain: Float[Array, " K"]
    ) -> Float[Array, "T H K"]:
        """Return the normalised output of heads times their gates, in the gates' dtype."""
        normed = rms_norm(out, gain, self.norm_eps)
        return (normed * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)
