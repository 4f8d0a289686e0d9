"""`expert_routing` in plain XLA: what other implementations are tested with."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_routing.routing import Routed, Routing
from pallas_kernels.grouped_matmul import plan, tile_rows


def expert_routing_xla(
    logits: Float[Array, "T X"],
    num_tokens: Int[Array, ""],
    *,
    routing: Routing,
    selection_bias: Float[Array, " X"] | None,
    first_expert: int | Int[Array, ""],
    num_local_experts: int,
    rows_of_tile: int | None,
) -> Routed:
    """See `expert_routing`."""
    weights, experts = _choose(logits, selection_bias, routing)
    num_choices, per_token = experts.size, experts.shape[1]
    local = experts - first_expert
    is_ours = (local >= 0) & (local < num_local_experts) & (jnp.arange(len(logits)) < num_tokens)[:, None]
    # Choices of other devices' experts are sorted after the last group.
    group = jnp.where(is_ours, local, num_local_experts).reshape(-1)
    order = jnp.argsort(group).astype(jnp.int32)
    choice = jnp.arange(num_choices, dtype=jnp.int32)
    row = jnp.zeros_like(order).at[order].set(choice, unique_indices=True, mode="promise_in_bounds")
    group_sizes = lax.platform_dependent(
        group,
        cpu=lambda group: jnp.zeros(num_local_experts, jnp.int32).at[group].add(1, mode="drop"),
        # Sums of comparisons, for a GPU would add by atomic operations.
        default=lambda group: jnp.sum(group[None] == jnp.arange(num_local_experts)[:, None], axis=1, dtype=jnp.int32),
    )
    rows = rows_of_tile or tile_rows(num_choices, num_local_experts)
    return Routed(
        weights=weights,
        experts=experts,
        row=jnp.where(is_ours, row.reshape(experts.shape), num_choices),
        token=jnp.where(group[order] < num_local_experts, order // per_token, 0),
        group_sizes=group_sizes,
        tiles=plan(group_sizes, num_rows=num_choices, tile_rows=rows),
    )


def _choose(
    logits: Float[Array, "T X"], selection_bias: Float[Array, " X"] | None, routing: Routing
) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    if routing.scores == "sparse_mixer":
        return _choose_one_by_one(logits, routing)
    match routing.scores:
        case "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        case "softmax_of_chosen":
            scores = logits
        case "sigmoid":
            scores = jax.nn.sigmoid(logits)
    preferences = scores if selection_bias is None else scores + selection_bias[None]
    if routing.num_groups > 1:
        preferences = _only_best_groups(preferences, routing)
    _, chosen = lax.top_k(preferences, routing.num_experts_per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if routing.scores == "softmax_of_chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    if routing.is_normalized:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + routing.eps)
    return weights * routing.scale, chosen


def _choose_one_by_one(logits: Float[Array, "T X"], routing: Routing) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """Choose the best logit, again and again, and weigh it by a softmax over those left that are near it."""
    left, weights, chosen = logits, [], []
    for _ in range(routing.num_experts_per_token):
        best = jnp.max(left, axis=-1, keepdims=True)
        chosen.append(jnp.argmax(left, axis=-1).astype(jnp.int32))
        is_far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * routing.jitter
        weights.append(1 / jnp.sum(jnp.where(is_far, 0.0, jnp.exp(left - best)), axis=-1))
        left = jnp.where(jnp.arange(logits.shape[1])[None] == chosen[-1][:, None], -jnp.inf, left)
    return jnp.stack(weights, axis=1), jnp.stack(chosen, axis=1)


def _only_best_groups(preferences: Float[Array, "T X"], routing: Routing) -> Float[Array, "T X"]:
    groups = preferences.reshape(preferences.shape[0], routing.num_groups, -1)
    best, _ = lax.top_k(groups, {"best": 1, "best_two": 2}[routing.group_score])
    _, chosen = lax.top_k(jnp.sum(best, axis=-1), routing.num_chosen_groups)
    is_chosen = jnp.any(chosen[:, :, None] == jnp.arange(routing.num_groups)[None, None], axis=1)
    return jnp.where(is_chosen[:, :, None], groups, -jnp.inf).reshape(preferences.shape)
