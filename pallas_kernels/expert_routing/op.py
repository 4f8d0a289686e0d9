"""The public operation: everything between a router's logits and the matmuls of the experts."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_routing.routing import Routed, Routing
from pallas_kernels.expert_routing.sm90 import expert_routing_sm90
from pallas_kernels.expert_routing.xla import expert_routing_xla
from pallas_kernels.implementation import Implementation, check_implementation


def expert_routing(
    logits: Float[Array, "T X"],
    num_tokens: Int[Array, ""],
    *,
    routing: Routing,
    selection_bias: Float[Array, " X"] | None = None,
    first_expert: int | Int[Array, ""] = 0,
    num_local_experts: int | None = None,
    rows_of_tile: int | None = None,
    implementation: Implementation = "xla",
) -> Routed:
    """Return the k experts of each token with their weights, and the row order and tiles of `grouped_matmul` for them.

    The float32 logits are those of all X experts, among which each token chooses. Rows, groups and tiles cover the
    `num_local_experts` (by default all) from `first_expert` on, the shard of a device. Tokens from `num_tokens` on are
    padding: they have experts, but no rows. `selection_bias`, in float32, affects the choice but not the weights. Ties
    go to the lower index. Tiles have up to `rows_of_tile` rows, by default as `grouped_matmul` takes them. NaN in a
    token's logits only makes its own experts and weights meaningless.

    "sm90" is one Mosaic kernel for Hopper GPUs, two for many tokens; "xla" runs anywhere. Raises ValueError for an
    unknown implementation or inconsistent sizes; NotImplementedError for what "sm90" does not support, see `why_not`.
    """
    check_implementation(implementation)
    num_experts = routing.num_experts
    if logits.shape[1] != num_experts or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 of {num_experts} experts, got {logits.dtype} of {logits.shape}")
    if selection_bias is not None and (selection_bias.shape != (num_experts,) or selection_bias.dtype != jnp.float32):
        raise ValueError(
            f"selection_bias must be float32 of {num_experts} experts, got {selection_bias.dtype} of "
            f"{selection_bias.shape}"
        )
    if not 0 < routing.num_experts_per_token <= num_experts:
        raise ValueError(f"a token cannot have {routing.num_experts_per_token} of {num_experts} experts")
    if num_experts % routing.num_groups or routing.num_chosen_groups > routing.num_groups:
        raise ValueError(f"{routing.num_chosen_groups} of {routing.num_groups} groups do not fit {num_experts} experts")
    if routing.group_score == "best_two" and routing.num_groups > 1 and num_experts < 2 * routing.num_groups:
        raise ValueError(f"{num_experts} experts are not two for each of {routing.num_groups} groups")
    if num_local_experts is None:
        num_local_experts = num_experts
    run = {"xla": expert_routing_xla, "sm90": expert_routing_sm90}[implementation]
    return run(
        logits,
        num_tokens,
        routing=routing,
        selection_bias=selection_bias,
        first_expert=first_expert,
        num_local_experts=num_local_experts,
        rows_of_tile=rows_of_tile,
    )
