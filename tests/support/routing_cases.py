"""Logits of routers, and what routing has to answer, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from expected_routing import expected_route

from pallas_kernels.expert_routing import Routing
from pallas_kernels.grouped_matmul import plan, tile_rows

VARIANTS = {
    "softmax": {},
    "normalized softmax": {"is_normalized": True},
    "softmax of chosen": {"scores": "softmax_of_chosen"},
    "sigmoid": {"scores": "sigmoid", "is_normalized": True, "scale": 2.5},
    "best groups": {"num_groups": 4, "num_chosen_groups": 2, "scale": 16.0},
    "best groups by two": {
        "scores": "sigmoid",
        "num_groups": 3,
        "num_chosen_groups": 2,
        "group_score": "best_two",
        "is_normalized": True,
    },
}

jitted_plan = jax.jit(plan, static_argnames=("num_rows", "tile_rows"))


def make_logits(rng, shape):
    """Many are equal: some on a coarse grid, some -inf."""
    logits = np.round(2 * rng.standard_normal(shape)).astype(np.float32) / 2 + np.float32(0)
    return np.where(rng.random(shape) < 0.05, -np.inf, logits).astype(np.float32)


def make_case(variant, *, num_tokens, num_experts, per_token, has_bias=False, seed=0):
    rng = np.random.default_rng(seed)
    routing = Routing(num_experts=num_experts, num_experts_per_token=per_token, **VARIANTS[variant])
    bias = rng.standard_normal(num_experts).astype(np.float32) if has_bias else None
    return routing, make_logits(rng, (num_tokens, num_experts)), bias


def check(routed, routing, logits, bias, *, num_tokens, first_expert=0, num_local=None):
    """All of what routing answers; `num_tokens` are not padding."""
    num_local = routing.num_experts if num_local is None else num_local
    routed = jax.tree.map(np.asarray, routed)
    for token, (x, experts, weights) in enumerate(zip(logits, routed.experts, routed.weights, strict=True)):
        want = expected_route(x, 0.0 if bias is None else bias.astype(np.float64), routing)
        assert experts.tolist() == list(want), token
        np.testing.assert_allclose(weights, list(want.values()), rtol=2e-6, atol=1e-30)
    check_rows(routed, num_tokens=num_tokens, first_expert=first_expert, num_local=num_local)


def check_rows(routed, *, num_tokens, first_expert, num_local):
    """Rows and tiles, of whichever experts."""
    T, k = routed.experts.shape
    local = routed.experts - first_expert
    is_ours = (local >= 0) & (local < num_local) & (np.arange(T) < num_tokens)[:, None]
    choices = np.flatnonzero(is_ours)
    order = choices[np.argsort(local.reshape(-1)[choices], stable=True)]
    row = np.full(T * k, T * k)
    row[order] = np.arange(len(order))
    np.testing.assert_array_equal(routed.row.reshape(-1), row)
    np.testing.assert_array_equal(routed.token, np.append(order // k, np.zeros(T * k - len(order), int)))
    sizes = np.bincount(local[is_ours], minlength=num_local)
    np.testing.assert_array_equal(routed.group_sizes, sizes)
    tiles = jitted_plan(jnp.asarray(sizes), num_rows=T * k, tile_rows=tile_rows(T * k, num_local))
    for got, want in zip(routed.tiles, tiles, strict=True):
        np.testing.assert_array_equal(got, want)
