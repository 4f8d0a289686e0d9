"""The Hopper kernel of expert routing with clusters of CTAs, emulated in NumPy: experts, rows and tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from emulated_blocks import emulate
from routing_cases import check, make_case

from pallas_kernels.expert_routing import kernel, sm90


def run_emulated(monkeypatch, routing, logits, bias, num_tokens, *, num_parts, first_expert=0, num_local=None, seed=0):
    num_local = routing.num_experts if num_local is None else num_local
    config = dataclasses.replace(sm90.heuristic(len(logits), num_local), num_parts=num_parts)
    emulate(monkeypatch, sm90, kernel, seed=seed)
    with jax.disable_jit():
        return sm90.expert_routing_sm90(
            jnp.asarray(logits),
            jnp.int32(num_tokens),
            routing=routing,
            selection_bias=None if bias is None else jnp.asarray(bias),
            first_expert=first_expert,
            num_local_experts=num_local,
            config=config,
        )


@pytest.mark.parametrize("num_parts", quick_first([2, 4, 8]))
@pytest.mark.parametrize("num_tokens", quick_first([17, 100, 257, 1000], 2))
def test_all_experts(monkeypatch, num_parts, num_tokens):
    """In one kernel and, with more tokens, in two; with parts that have no token."""
    routing, logits, bias = make_case(
        "sigmoid", num_tokens=num_tokens, num_experts=40, per_token=4, has_bias=num_parts == 4
    )
    routed = run_emulated(monkeypatch, routing, logits, bias, num_tokens - 3, num_parts=num_parts)
    check(routed, routing, logits, bias, num_tokens=num_tokens - 3)


@pytest.mark.slow
@pytest.mark.parametrize("num_parts", [2, 4, 8])
@pytest.mark.parametrize("seed", [1, 2])
def test_orders_of_warpgroups(monkeypatch, num_parts, seed):
    """With experts in each warpgroup."""
    routing, logits, _ = make_case("normalized softmax", num_tokens=33, num_experts=400, per_token=9)
    routed = run_emulated(monkeypatch, routing, logits, None, 33, num_parts=num_parts, seed=seed)
    check(routed, routing, logits, None, num_tokens=33)


@pytest.mark.parametrize(
    ("num_tokens", "num_parts", "first_expert"), quick_first([(100, 2, 0), (257, 4, 0), (100, 8, 35)])
)
def test_a_part_of_the_experts(monkeypatch, num_tokens, num_parts, first_expert):
    routing, logits, _ = make_case("normalized softmax", num_tokens=num_tokens, num_experts=40, per_token=4)
    part = {"first_expert": first_expert, "num_local": 5}
    routed = run_emulated(monkeypatch, routing, logits, None, num_tokens - 1, num_parts=num_parts, **part)
    check(routed, routing, logits, None, num_tokens=num_tokens - 1, **part)


@pytest.mark.parametrize("num_parts", quick_first([2, 4, 8]))
def test_all_rows_on_one_expert(monkeypatch, num_parts):
    routing, logits, _ = make_case("softmax of chosen", num_tokens=257, num_experts=40, per_token=1)
    logits[:, 7] = 9.0
    routed = run_emulated(monkeypatch, routing, logits, None, 257, num_parts=num_parts)
    assert routed.group_sizes[7] == 257
    check(routed, routing, logits, None, num_tokens=257)


@pytest.mark.parametrize(("num_tokens", "num_parts"), quick_first([(17, 2), (100, 8), (257, 4)]))
def test_nothing_but_padding(monkeypatch, num_tokens, num_parts):
    routing, logits, _ = make_case("softmax", num_tokens=num_tokens, num_experts=40, per_token=4)
    routed = run_emulated(monkeypatch, routing, logits, None, 0, num_parts=num_parts)
    assert not np.any(routed.group_sizes)
    check(routed, routing, logits, None, num_tokens=0)


@pytest.mark.parametrize(
    ("variant", "num_parts"), quick_first([("best groups", 2), ("best groups by two", 4), ("best groups", 8)])
)
def test_groups_of_experts(monkeypatch, variant, num_parts):
    routing, logits, bias = make_case(variant, num_tokens=100, num_experts=36, per_token=4, has_bias=True)
    routed = run_emulated(monkeypatch, routing, logits, bias, 90, num_parts=num_parts)
    check(routed, routing, logits, bias, num_tokens=90)
