"""Mixtures of experts: a router gives each token a few experts, and their feed-forwards see its tokens only.

Tokens are sorted by expert, multiplied in groups and summed up where they came from (Gale et al. 2022,
arXiv:2211.15841). No expert computes for a token that is not its own, nor for the padding of a step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.activations import ACTIVATIONS, Gate, scaled
from jaxserve.layers.batch import Batch
from jaxserve.layers.context import PLAIN, Kernel, StepContext, result
from jaxserve.layers.embedding import soft_cap
from jaxserve.layers.linear import Consumer, linear, no_reader, norm_adds_partial_sums
from jaxserve.layers.mlp import FeedForward, gated_mlp, mlp
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.params import Params, ParamSpec, matrix_spec
from jaxserve.layers.parts import routing_part
from jaxserve.layers.peers import summed
from jaxserve.layers.sharding import DATA, names_of, partition_specs, shard_map
from jaxserve.layers.token_shards import TokenShards
from jaxserve.layers.weight import Use, Weight
from pallas_kernels import grouped_codes
from pallas_kernels.expert_routing import Routing, expert_routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A feed-forward block of a layer, with experts.

    Attributes:
        routing: how a token's experts are chosen.
        size: the number of inner values of one expert.
        activation: as for `activations.gate_of`.
        has_router_bias: a bias is part of the router's logits.
        has_selection_bias: a bias is added to scores for the choice among experts, and to nothing else.
        router_cap: the router's logits are bent to stay within it, as by `soft_cap`; None if they are not.
        shared: a feed-forward that serves every token, or None.
        has_shared_gate: the shared one is multiplied by a gate of its own.
        shared_scale: a factor of the shared one.
        weighs_inputs: an expert's weight is a factor of its input, instead of its output.
        is_gated: as for a FeedForward; without a gate the activation is a key of ACTIVATIONS.
        latent_size: the size of the vectors to which tokens are projected for the experts, and theirs are before they
            are projected back; None if there are no such projections.
        has_latent_bias: these projections have biases.
    """

    why_not_fused = "the feed-forward has experts"
    reader = no_reader  # the router and the experts are all multiplied by the block's input

    routing: Routing
    size: int
    activation: str | Gate
    has_router_bias: bool = False
    has_selection_bias: bool = False
    router_cap: float | None = None
    shared: FeedForward | None = None
    has_shared_gate: bool = False
    shared_scale: float = 1.0
    weighs_inputs: bool = False
    is_gated: bool = True
    latent_size: int | None = None
    has_latent_bias: bool = False

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights: the router, all experts' gate and up in [X, 2, F, L], or up in [X, F, L], and down in
        [X, L, F], where L is the size of their inputs; `prefix` names the block in the checkpoint.
        """
        X, E, F, own = self.routing.num_experts, hidden_size, self.size, names.experts
        L = self.latent_size or E
        name, outputs, inputs = ("gate_up", (2, F), (own.gate, own.up)) if self.is_gated else ("up", (F,), (own.up,))

        def of_experts(parts: tuple[str, ...], fused: int, shape: tuple[int, ...], *axes: str | None) -> ParamSpec:
            """Declare a weight of all experts, which comes from `parts` of each, or from tensor `fused` of all."""
            modules = [f"{prefix}.{own.experts}.{index}.{part}" for index in range(X) for part in parts]
            spec = matrix_spec(modules, (X, *shape), ("experts", *axes), quantize=True, expert_size=F)
            if own.fused is None:
                return spec
            stored = (X, math.prod(shape[:-1]), shape[-1])
            return dataclasses.replace(spec, source=(f"{prefix}.{own.fused[fused]}",), source_shapes=(stored,))

        axes = (*(None,) * (len(outputs) - 1), "expert_ffn", "embed")
        specs: Params = {
            "router": router_spec(f"{prefix}.{own.router}", num_experts=X, hidden_size=E),
            "experts": {
                name: of_experts(inputs, 0, (*outputs, L), *axes),
                "down": of_experts((own.down,), 1, (L, F), "embed", "expert_ffn"),
            },
        }
        if self.has_router_bias:
            specs["router_bias"] = specs["router"].bias
        if self.has_selection_bias:
            # In float32 as the scores: rounding would change which experts are chosen.
            specs["selection_bias"] = ParamSpec(
                shape=(X,), axes=(None,), dtype=np.float32, source=(f"{prefix}.{own.selection_bias}",), init_scale=0.0
            )
        if self.shared is not None:
            gate, up, down = own.of_shared or (own.gate, own.up, own.down)
            inputs = tuple(dict.fromkeys((gate, up)))  # one tensor may have both
            of_shared = dataclasses.replace(names, gate_up=inputs, up=up, down=down)
            specs["shared"] = self.shared.specs(f"{prefix}.{own.shared}", E, of_shared)
        if self.has_shared_gate:
            specs["shared_gate"] = matrix_spec(f"{prefix}.{own.shared_gate}", (1, E), (None, "embed"))
        if self.latent_size is not None:
            for name, module, shape in (("latent_in", own.latents[0], (L, E)), ("latent_out", own.latents[1], (E, L))):
                specs[name] = matrix_spec(f"{prefix}.{module}", shape, (None, "embed"))
                if self.has_latent_bias:
                    specs[f"{name}_bias"] = specs[name].bias
        return specs

    def run(self, params: Params, x: Any, batch: Batch, *, consumer: Consumer) -> Any:
        """Compute the block with the tokens of a step that are not padding; the result is that of `residual_update`."""
        num_tokens = batch.query_starts[batch.num_rows]
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("router_cap", "shared_scale", "weighs_inputs")
        }
        return moe(params, x, num_tokens, self.routing, self.activation, batch.context, consumer, **options)


def router_spec(source: str, *, num_experts: int, hidden_size: int) -> ParamSpec:
    """Declare the matrix that gives each token a logit for each expert; `source` is its module in the checkpoint."""
    return matrix_spec(source, (num_experts, hidden_size), (None, "embed"))


def _has_partial_sums(params: Params) -> bool:
    """Return true if `moe` with these weights is a sum of which each device along one mesh axis has a partial sum."""
    axes = _axes_of_partial_sums(params["experts"])
    if len(axes) != 1 or "shared_gate" in params or "latent_out" in params:
        return False
    shared = params.get("shared")
    return shared is None or ("down_bias" not in shared and shared["down"].spec[1] == axes[0])


def moe(
    params: Params,
    x: Float[Array, "T E"],
    num_tokens: Int[Array, ""],
    routing: Routing,
    activation: str | Gate,
    context: StepContext = PLAIN,
    consumer: Consumer = "stream",
    *,
    router_input: Float[Array, "T E"] | None = None,
    router_cap: float | None = None,
    shared_scale: float = 1.0,
    weighs_inputs: bool = False,
) -> Float[Array, "T E"]:
    """Return the weighted sum of each token's experts, and of the shared one if there is one.

    Tokens from `num_tokens` on are padding, for which no expert runs; `activation` is as for `activations.gate_of`,
    `consumer` as for `residual_update`. `router_input` is by default x; the other options are those of `Experts`.
    Raises NotImplementedError for experts that kernels cannot multiply by; if they do not support the routing, XLA does
    it.
    """
    has_peers = context.peers is not None
    is_one_sum = _has_partial_sums(params) and shared_scale == 1.0
    leaves_sums = consumer == "norm" and norm_adds_partial_sums(x.shape, x.dtype, context) and is_one_sum
    # The experts and the shared one are in one sum over devices if possible.
    together = has_peers and is_one_sum
    alone = has_peers and not together and len(_axes_of_partial_sums(params["experts"])) == 1
    with jax.named_scope("moe"):
        by_xla = dataclasses.replace(context, kernels="xla")
        float32 = jnp.dtype(jnp.float32)
        routed = x if router_input is None else router_input
        router = params["router"]  # in float32 where transformers keeps it so
        logits = linear(routed.astype(router.dtype), router, context=by_xla, name="router", output_dtype=float32)
        if "router_bias" in params:
            logits = logits + params["router_bias"].astype(jnp.float32)[None]
        logits = soft_cap(logits, router_cap)
        run = functools.partial(
            _run_experts,
            run=functools.partial(
                _run_local_experts, routing=routing, activation=activation, context=context, weighs_inputs=weighs_inputs
            ),
            leaves_partial_sums=together or alone,
            tokens=context.tokens,
        )
        inner = x
        if "latent_in" in params:
            inner = linear(x, params["latent_in"], params.get("latent_in_bias"), context=context, name="latent_in")
        of_experts = params.get("selection_bias"), params.get("expert_scale")
        y, load = run(params["experts"], inner, logits, of_experts, num_tokens)
        if context.loads is not None:
            context.loads.counts.append(load)
        if alone:
            y = summed(y, context)
        if "latent_out" in params:
            y = linear(y, params["latent_out"], params.get("latent_out_bias"), context=context, name="latent_out")
        if "shared" in params:
            of_shared = context.within("shared")
            run_shared = gated_mlp if "gate_up" in params["shared"] else mlp
            shared = run_shared(params["shared"], x, activation, of_shared, "sum" if together else "stream")
            if "shared_gate" in params:
                gate = linear(x, params["shared_gate"], context=by_xla, name="shared_gate")
                shared = jax.nn.sigmoid(gate) * shared
            y = y + scaled(shared, shared_scale)
        return y if leaves_sums else summed(y, context)


def _run_experts(
    experts: Params,
    x: Float[Array, "T E"],
    logits: Float[Array, "T X"],
    of_experts: tuple[Float[Array, " X"] | None, Float[Array, " X"] | None],
    num_tokens: Int[Array, ""],
    *,
    run: Callable[..., tuple[Array, Array]],
    leaves_partial_sums: bool,
    tokens: TokenShards | None,
) -> tuple[Float[Array, "T E"], Int[Array, " L"]]:
    """Route and run in a `shard_map`: every device chooses among all experts, and runs those that it has, or its shard
    of their inner sizes, for all tokens. `run` is `_run_local_experts`. Returns the number of tokens of each expert,
    too. With `tokens`, x and logits are those of own tokens: they are gathered before, and sums scattered after it; the
    numbers are those of the shard's L experts.
    """
    down: Weight = experts["down"]
    if down.mesh.empty:
        return run(experts, x, logits, of_experts, num_tokens, first_expert=0)
    expert_axis, _, ffn_axis = down.spec
    axes = _axes_of_partial_sums(experts)

    def on_device(experts: Params, *arguments: Any) -> tuple[Array, Array]:
        num_local = experts["down"].shape[0]
        places = (*(() if tokens is None else (DATA,)), *names_of([expert_axis]))
        first_expert = jax.lax.axis_index(places) * num_local if places else 0
        if ffn_axis is not None and "down_bias" in experts:  # once in the sum over devices
            bias = jnp.where(jax.lax.axis_index(ffn_axis) == 0, experts["down_bias"], 0)
            experts = experts | {"down_bias": bias}
        x, logits, *others = arguments
        if tokens is not None:
            with jax.named_scope("dispatch"):
                x, logits = tokens.gather(x), tokens.gather(logits)
        y, load = run(experts, x, logits, *others, first_expert=first_expert)
        if tokens is not None:
            with jax.named_scope("combine"):
                y = tokens.scatter_sum(y)
        return y if leaves_partial_sums or not axes else jax.lax.psum(y, axes), load

    of_sums = PartitionSpec(unreduced=frozenset(axes) if leaves_partial_sums else frozenset())
    in_specs, out_specs = (partition_specs(experts), *[PartitionSpec()] * 4), (of_sums, PartitionSpec(expert_axis))
    return shard_map(on_device, in_specs, out_specs)(experts, x, logits, of_experts, num_tokens)


def _axes_of_partial_sums(experts: Params) -> tuple[str, ...]:
    """Return the axes of the mesh along which devices have experts of their own, or shards of their inner sizes."""
    spec = experts["down"].spec
    return tuple(axis for axis in (spec[0], spec[2]) if axis is not None) if len(spec) else ()


def _run_local_experts(
    experts: Params,
    x: Float[Array, "T E"],
    logits: Float[Array, "T X"],
    of_experts: tuple[Float[Array, " X"] | None, Float[Array, " X"] | None],
    num_tokens: Int[Array, ""],
    *,
    first_expert: int | Int[Array, ""],
    routing: Routing,
    activation: str | Gate,
    context: StepContext,
    weighs_inputs: bool,
) -> tuple[Float[Array, "T E"], Int[Array, " L"]]:
    """Return the partial sum of these experts, which begin at `first_expert`, and the number of tokens of each.

    `of_experts` are what is added to the scores of all experts for the choice, and a factor of their weights.
    """
    selection_bias, expert_scale = of_experts
    num_choices, num_experts = len(x) * routing.num_experts_per_token, experts["down"].shape[0]
    routed_by = context.choose("routing", routing_part(len(x), routing, kernels=context.kernels))
    # The kernel for codes has tiles of its own; one plan of tiles does for both matmuls unless one is of codes.
    products, is_of_codes = {}, {}
    first, gate = ("gate_up", activation) if "gate_up" in experts else ("up", None)
    for name, after in ((first, gate), ("down", None)):
        products[name] = experts[name].product(x, context, Use(after, of_groups=True))
        is_of_codes[name] = context.choose("experts", products[name].part) == Kernel.GROUPED_CODES
    has_tiles_of_codes = all(is_of_codes.values())

    def run() -> tuple[Array, Array]:
        routed = expert_routing(
            logits,
            num_tokens,
            routing=routing,
            selection_bias=selection_bias,
            first_expert=first_expert,
            num_local_experts=num_experts,
            rows_of_tile=grouped_codes.tile_rows(num_choices, num_experts) if has_tiles_of_codes else None,
            implementation=context.kernels if routed_by == Kernel.EXPERT_ROUTING else "xla",
        )

        def multiply(rows: Array, name: str) -> Array:
            tiles = routed.tiles if is_of_codes[name] == has_tiles_of_codes else None
            return products[name].run(rows, routed.group_sizes, experts.get(f"{name}_bias"), tiles)

        rows, weights = x[routed.token], routed.weights
        if expert_scale is not None:
            weights = weights * expert_scale.astype(jnp.float32)[routed.experts]
        if weighs_inputs:
            of_row = jnp.zeros(len(rows), jnp.float32).at[routed.row].set(weights, mode="drop")
            weighted = rows.astype(jnp.float32) * of_row[:, None]
            rows, weights = weighted.astype(x.dtype), jnp.ones_like(weights)
        inner = multiply(rows, first)
        if gate is None:
            assert isinstance(activation, str)
            inner = ACTIVATIONS[activation](inner)
        y = multiply(inner, "down")
        has_row = routed.row < len(rows)
        y = y.at[routed.row].get(mode="clip").astype(jnp.float32)
        # After the last group y may be NaN.
        total = jnp.sum(jnp.where(has_row[:, :, None], y * weights[:, :, None], 0), axis=1)
        return total.astype(x.dtype), routed.group_sizes

    return context.call(run, (result(x.shape, x.dtype), result((num_experts,), jnp.dtype(jnp.int32))))
