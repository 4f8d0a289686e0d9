"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a block whose heads keep a matrix each, which a gated recurrence updates
(`layers.delta_rule`, without corrections).

In the words of a linear attention, C is the query, B the key, and x the value of each token; groups of heads have B and
C in common, as heads of values have a key head in the gated delta rule.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS, scaled
from jaxserve.layers.batch import LayerStep
from jaxserve.layers.linear import Consumer, linear, no_reader, residual_update
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.states import Dim, Projected, StateSpec, StateWeights
from pallas_kernels.recurrent_step import Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2:
    """The block of a layer.

    Devices have groups of heads or, if there is one group only, heads of it: the axis N of most weights, with the M
    values that such a part has.

    Attributes:
        num_heads, num_groups: heads, and groups of equally many.
        head_size: V, the size of a head's values.
        state_size: K, the size of B and C.
        width: number of tokens of the convolution.
        activation: that of the convolution.
        norm_eps: of the norm of each group's output; None if there is no norm.
        norms_before_gate: outputs are normalised before they are multiplied by their gates.
        min_step, max_step: limits of the step sizes, which are softplus(dt + bias).
        has_bias, has_output_bias: of the projections.
        multipliers: of z, x, B, C and dt after the projection, in this order.
    """

    rope = None  # the order of tokens is in the state
    why_not_fused = "the layer keeps a state"
    reader = no_reader  # several weights are multiplied by the block's input
    corrects = False  # values are added to the matrices as they are
    decays_by_channel = False

    num_heads: int
    num_groups: int
    head_size: int
    state_size: int
    width: int
    activation: str
    norm_eps: float | None
    norms_before_gate: bool = False
    min_step: float = 0.0
    max_step: float = math.inf
    has_bias: bool = False
    has_output_bias: bool = False
    has_convolution_bias: bool = True
    multipliers: tuple[float, float, float, float, float] | None = None

    @property
    def heads_of_group(self) -> int:
        """G, the number of heads with B and C in common."""
        return self.num_heads // self.num_groups

    @property
    def parts(self) -> tuple[Dim, Dim, Dim]:
        """The axes N, H of groups, and G of a group's heads, of which either is split over devices."""
        H, G = self.num_groups, self.heads_of_group
        if H == 1:
            return Dim(G, "state_heads"), Dim(1), Dim(G, "state_heads")
        return Dim(H, "state_groups"), Dim(H, "state_groups"), Dim(G)

    @property
    def part_size(self) -> int:
        """M, the number of values of a part."""
        return self.num_heads * self.head_size // self.parts[0].size

    @property
    def cache_spec(self) -> StateSpec:
        """What the layer keeps."""
        N, H, G = self.parts
        K = self.state_size
        return StateSpec(
            width=self.width,
            channels=((N, Dim(self.part_size)), (H, Dim(2 * K))),
            matrix=(H, G, Dim(K), Dim(self.head_size)),
        )

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:  # noqa: ARG002
        """Declare the weights; `prefix` names the block in the checkpoint.

        The rows of its projection are gates z, values x, B, C and step sizes dt. "in" has z and x of each part, "bc" B
        and C of each group.
        """
        (N, H, G), M, K, E = self.parts, self.part_size, self.state_size, hidden_size
        inner, of_groups = self.num_heads * self.head_size, self.num_groups * self.state_size
        z, x, b, c, dt = np.split(
            np.arange(2 * inner + 2 * of_groups + self.num_heads, dtype=np.int32),
            np.cumsum([inner, inner, of_groups, of_groups]),
        )

        def of_parts(*rows: np.ndarray) -> np.ndarray:
            return np.concatenate([each.reshape(N.size, -1) for each in rows], axis=1).ravel()

        def of_each_group(*rows: np.ndarray) -> np.ndarray:
            return np.concatenate([each.reshape(H.size, -1) for each in rows], axis=1).ravel()

        def array(source: str, *dims: Dim, **options: Any) -> ParamSpec:
            shape, axes = zip(*dims, strict=True)
            options = {"init_scale": 0.0} | options
            return ParamSpec(shape=shape, axes=axes, source=(f"{prefix}.{source}",), **options)

        def projection(name: str, rows: np.ndarray, *dims: Dim, quantize: bool) -> Params:
            num_rows = 2 * inner + 2 * of_groups + self.num_heads
            weight = array(
                *("in_proj.weight", *dims, Dim(E, "embed")),
                num_inputs=1,
                source_shapes=((num_rows, E),),
                rows=rows,
                quantize=quantize,
                init_scale=0.02,
            )
            if not self.has_bias:
                return {name: weight}
            return {
                name: weight,
                f"{name}_bias": array("in_proj.bias", *dims, source_shapes=((num_rows,),), rows=rows),
            }

        def convolution(name: str, rows: np.ndarray, *dims: Dim) -> Params:
            num_rows, rows = inner + 2 * of_groups, rows - inner  # which gates do not pass
            weight = array(
                *("conv1d.weight", *dims, Dim(self.width)),
                num_inputs=1,
                dtype=np.float32,
                source_shapes=((num_rows, 1, self.width),),
                rows=rows,
                is_absorbed=True,
                init_scale=0.5,
            )
            if not self.has_convolution_bias:
                return {name: weight}
            shapes = ((num_rows,),)
            bias = array("conv1d.bias", *dims, dtype=np.float32, source_shapes=shapes, rows=rows)
            return {name: weight, f"{name}_bias": bias}

        of_heads: dict[str, Any] = {"dtype": np.float32, "source_shapes": ((self.num_heads,),)}
        specs = {
            **projection("in", of_parts(z, x), N, Dim(2 * M), quantize=True),
            # Those of a single group are on every device.
            **projection("bc", of_each_group(b, c), H, Dim(2 * K), quantize=H.size > 1),
            **projection("steps", dt, H, G, quantize=False),
            **convolution("x_convolution", x, N, Dim(M)),
            **convolution("bc_convolution", of_each_group(b, c), H, Dim(2 * K)),
            "a_log": array("A_log", H, G, **of_heads),
            "dt_bias": array("dt_bias", H, G, **of_heads),
            "skip": array("D", H, G, **of_heads | {"init_scale": None}),
            "out": array(
                *("out_proj.weight", Dim(E, "embed"), N, Dim(M)),
                num_inputs=2,
                source_shapes=((E, inner),),
                quantize=True,
                init_scale=0.02,
            ),
        }
        if self.norm_eps is not None:
            specs["norm"] = array("norm.weight", N, Dim(M), source_shapes=((inner,),), init_scale=None)
        if self.has_output_bias:
            specs["out_bias"] = array("out_proj.bias", Dim(E, "embed"))
        return specs

    def run(self, params: Params, x: Float[Array, "T E"], step: LayerStep, *, consumer: Consumer) -> tuple[Any, Any]:
        """Compute the block; return its update, as `residual_update` does, and the cache after this step."""
        context = step.batch.context

        def project(name: str, dtype: Any = x.dtype) -> Array:
            bias = params.get(f"{name}_bias")
            bias = None if bias is None else bias.astype(dtype)
            return linear(x, params[name], bias, context=context, name=name, output_dtype=jnp.dtype(dtype))

        with jax.named_scope("mamba2"):
            gate, values = jnp.split(project("in"), 2, axis=-1)
            bc, dt = project("bc"), project("steps", jnp.float32)
            if self.multipliers is not None:
                of_z, of_x, of_b, of_c, of_dt = self.multipliers
                gate, values, dt = scaled(gate, of_z), scaled(values, of_x), dt * of_dt
                b, c = jnp.split(bc, 2, axis=-1)
                bc = jnp.concatenate([scaled(b, of_b), scaled(c, of_c)], axis=-1)
            names = ("x_convolution", "bc_convolution")
            weights = StateWeights(
                tuple(params[name].array() for name in names),
                tuple(params[f"{name}_bias"] for name in names) if self.has_convolution_bias else None,
                a_log=params["a_log"],
                dt_bias=params["dt_bias"],
                skip=params["skip"],
            )
            out, cache = step.cache.advance(Projected((values, bc), dt), weights, step.batch, self)
            y = context.call(self._gated, gate, out, gate, params.get("norm"))
            return residual_update(y, params, "out", context, consumer), cache

    def tokens(self, mixed: tuple[Array, ...], projected: Projected, weights: StateWeights) -> Tokens:
        """Return what the recurrence reads, of the outputs of the convolutions; heads are those of a device."""
        assert projected.rates is not None
        assert weights.a_log is not None
        assert weights.dt_bias is not None
        x, bc = map(ACTIVATIONS[self.activation], mixed)
        b, c = jnp.split(bc, 2, axis=-1)
        step = jax.nn.softplus(projected.rates.astype(jnp.float32) + weights.dt_bias[None])
        step = jnp.clip(step, self.min_step, self.max_step)
        return Tokens(
            q=c,
            k=b,
            v=x.reshape(*step.shape, self.head_size),
            log_decay=-jnp.exp(weights.a_log)[None] * step,
            beta=step,
        )

    def _gated(
        self, out: Float[Array, "T N M"], gate: Float[Array, "T N M"], gain: Float[Array, "N M"] | None
    ) -> Float[Array, "T N M"]:
        """Return the output of heads times their gates, normalised by groups, in the gates' dtype."""
        gates = jax.nn.silu(gate.astype(jnp.float32))
        y = out if self.norms_before_gate else out * gates
        if gain is not None:
            assert self.norm_eps is not None
            of_group = (1, 2) if self.num_groups == 1 else -1
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=of_group, keepdims=True) + self.norm_eps)
            y = y * gain.astype(jnp.float32)[None]
        return (y * gates if self.norms_before_gate else y).astype(gate.dtype)
