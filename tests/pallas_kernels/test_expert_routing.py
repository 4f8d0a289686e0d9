"""Experts, rows and tiles against NumPy, in every implementation that runs here: the Hopper kernel interpreted on a CPU
with race detection, compiled for an H200 that is not there, and run where there is one. Clusters are in
test_expert_routing_clusters.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from expected_routing import expected_route
from interpreting import interpret
from routing_cases import VARIANTS, check, check_rows, make_case

from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.expert_routing import Routing, expert_routing
from pallas_kernels.expert_routing.sm90 import MANY_TOKENS, Config, expert_routing_sm90, heuristic


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_xla(variant, has_bias):
    routing, logits, bias = make_case(variant, num_tokens=17, num_experts=12, per_token=3, has_bias=has_bias)
    run = jax.jit(functools.partial(expert_routing, routing=routing))
    routed = run(jnp.asarray(logits), jnp.int32(13), selection_bias=None if bias is None else jnp.asarray(bias))
    check(routed, routing, logits, bias, num_tokens=13)


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_xla_with_a_part_of_the_experts(num_tokens):
    routing, logits, _ = make_case("softmax", num_tokens=num_tokens, num_experts=20, per_token=6)
    run = jax.jit(functools.partial(expert_routing, routing=routing, num_local_experts=5))
    for first_expert in (0, 15):
        routed = run(jnp.asarray(logits), jnp.int32(num_tokens - 1), first_expert=jnp.int32(first_expert))
        check(routed, routing, logits, None, num_tokens=num_tokens - 1, first_expert=first_expert, num_local=5)


# A number of experts that is not a multiple of a warp's lanes, or several per lane; several tokens per warp, and warps
# without any.
INTERPRETED = [
    ("softmax", {"num_tokens": 5, "num_experts": 12, "per_token": 3, "has_bias": True}, 1),
    ("normalized softmax", {"num_tokens": 9, "num_experts": 40, "per_token": 8}, 1),
    ("softmax of chosen", {"num_tokens": 3, "num_experts": 12, "per_token": 12}, 1),
    ("softmax of chosen", {"num_tokens": 9, "num_experts": 70, "per_token": 2, "has_bias": True}, 2),
    ("sigmoid", {"num_tokens": 18, "num_experts": 33, "per_token": 4, "has_bias": True}, 2),
    ("best groups", {"num_tokens": 6, "num_experts": 40, "per_token": 6}, 1),
    ("best groups by two", {"num_tokens": 6, "num_experts": 36, "per_token": 4, "has_bias": True}, 1),
]


def run_interpreted(
    capsys, routing, logits, bias, num_tokens, *, num_groups, num_choosers=0, first_expert=0, num_local=None, **options
):
    run = functools.partial(
        expert_routing_sm90,
        routing=routing,
        selection_bias=None if bias is None else jnp.asarray(bias),
        first_expert=first_expert,
        num_local_experts=routing.num_experts if num_local is None else num_local,
        config=Config(num_parts=1, num_groups=num_groups, num_choosers=num_choosers),
        interpret=True,
        **options,
    )
    return interpret(capsys, run, jnp.asarray(logits), jnp.int32(num_tokens))


@pytest.mark.parametrize(("variant", "sizes", "num_groups"), quick_first(INTERPRETED))
def test_interpreted_without_races(capsys, variant, sizes, num_groups):
    routing, logits, bias = make_case(variant, **sizes)
    num_tokens = len(logits) - 1
    routed = run_interpreted(capsys, routing, logits, bias, num_tokens, num_groups=num_groups)
    check(routed, routing, logits, bias, num_tokens=num_tokens)


@pytest.mark.slow
def test_interpreted_with_a_part_of_the_experts(capsys):
    """One of these experts has two tiles, and one has no rows."""
    routing, logits, _ = make_case("normalized softmax", num_tokens=70, num_experts=11, per_token=3)
    logits[:, 4] = 9.0
    logits[:, 3] = -np.inf
    part = {"first_expert": 3, "num_local": 7}
    routed = run_interpreted(capsys, routing, logits, None, 69, num_groups=2, **part)
    assert routed.tiles.first[:, :3].tolist() == [[0, 0, 69], [0, 0, 2]]
    check(routed, routing, logits, None, num_tokens=69, **part)


@pytest.mark.slow
def test_tiles_of_any_number_of_rows(capsys):
    """One expert has 70 rows, two tiles of 48."""
    routing, logits, _ = make_case("normalized softmax", num_tokens=70, num_experts=11, per_token=3)
    logits[:, 4] = 9.0
    got = run_interpreted(capsys, routing, logits, None, 70, num_groups=2, rows_of_tile=48)
    want = jax.jit(functools.partial(expert_routing, routing=routing, rows_of_tile=48))(logits, jnp.int32(70))
    num_tiles = int(want.tiles.first[1, -1])
    assert sorted(want.tiles.num_rows[:num_tiles].tolist())[-2:] == [22, 48]
    np.testing.assert_array_equal(got.tiles.first, want.tiles.first)
    for ours, theirs in zip(got.tiles[:3], want.tiles[:3], strict=True):
        np.testing.assert_array_equal(ours[:num_tiles], theirs[:num_tiles])


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "num_choosers"), [(3, 1), (37, 2), (70, 1)])
def test_interpreted_with_a_kernel_that_chooses(capsys, num_tokens, num_choosers):
    """More tokens than a warp reads at once, and CTAs that have fewer than others."""
    routing, logits, bias = make_case(
        "sigmoid", num_tokens=num_tokens, num_experts=12, per_token=3, has_bias=num_choosers == 2
    )
    part = {"first_expert": 2, "num_local": 9}
    options = {"num_groups": 1, "num_choosers": num_choosers}
    routed = run_interpreted(capsys, routing, logits, bias, num_tokens - 1, **options, **part)
    check(routed, routing, logits, bias, num_tokens=num_tokens - 1, **part)


@pytest.mark.slow
def test_interpreted_with_nan(capsys):
    """Other tokens have their own experts, and rows stay consistent: no two choices have the same row."""
    routing, logits, _ = make_case("sigmoid", num_tokens=4, num_experts=12, per_token=3)
    logits[1, 2:7] = np.nan
    logits[2] = -np.nan
    routed = jax.tree.map(np.asarray, run_interpreted(capsys, routing, logits, None, 4, num_groups=1))
    for token in (0, 3):
        assert routed.experts[token].tolist() == list(expected_route(logits[token], 0.0, routing))
    for experts in routed.experts:
        assert len(set(experts.tolist())) == 3
    assert np.isfinite(routed.weights[[0, 3]]).all()
    check_rows(routed, num_tokens=4, first_expert=0, num_local=12)


@pytest.mark.parametrize("variant", quick_first(VARIANTS))
def test_zeros_of_both_signs(capsys, variant):
    """XLA's order: "softmax_of_chosen" takes 0 before -0, the others have one weight for both."""
    routing, logits, _ = make_case(variant, num_tokens=4, num_experts=12, per_token=6)
    logits = np.where(np.arange(12) % 3 == 0, -0.0, np.minimum(logits, 0)).astype(np.float32)
    got = run_interpreted(capsys, routing, logits, None, 4, num_groups=1)
    want = jax.jit(functools.partial(expert_routing, routing=routing))(jnp.asarray(logits), jnp.int32(4))
    np.testing.assert_array_equal(got.experts, want.experts)


def test_sigmoids_that_are_all_zero_have_finite_weights():
    routing = Routing(num_experts=2, num_experts_per_token=2, scores="sigmoid", is_normalized=True)
    routed = expert_routing(jnp.full((1, 2), -1e4), jnp.int32(1), routing=routing)
    assert np.isfinite(np.asarray(routed.weights)).all()


# Shapes of Qwen3 30B A3B, DeepSeek V3 and Mixtral; the most that the kernel supports.
COMPILED = [
    ("normalized softmax", 1, 128, 8),
    ("normalized softmax", 64, 128, 8),
    ("best groups by two", 256, 255, 8),
    ("normalized softmax", 256, 8, 2),
    ("sigmoid", 256, 512, 16),
    ("normalized softmax", 8192, 128, 8),
    ("best groups by two", 32768, 255, 8),
    ("sigmoid", 8192, 512, 32),
]


@pytest.mark.parametrize(("variant", "num_tokens", "num_experts", "per_token"), quick_first(COMPILED))
def test_on_an_h200_it_is_one_kernel_or_two_without_spills(variant, num_tokens, num_experts, per_token):
    routing = Routing(num_experts=num_experts, num_experts_per_token=per_token, **VARIANTS[variant])

    def layers(logits, num_tokens, bias):
        routed = []
        for step in range(6):
            rows_of_tile = None if step < 3 else 192
            run = functools.partial(
                expert_routing, routing=routing, selection_bias=bias, rows_of_tile=rows_of_tile, implementation="sm90"
            )
            routed.append(run(logits[step], num_tokens))
        return routed

    logits = [jax.ShapeDtypeStruct((num_tokens, num_experts), jnp.float32)] * 6
    bias = jax.ShapeDtypeStruct((num_experts,), jnp.float32)
    program = compile_for_h200(layers, logits, jax.ShapeDtypeStruct((), jnp.int32), bias)
    assert program.spill_bytes == 0
    assert program.thunks == {"kCommandBuffer": 1}
    num_choosers = 0 if num_tokens <= MANY_TOKENS else 1
    assert program.num_launches == 6 * (1 + num_choosers)
    assert len(program.kernels) == 2 + num_choosers, "tiles make no difference to what chooses"


@pytest.mark.parametrize("num_local", [1, 8, 128, 512])
def test_there_is_a_thread_for_each_expert_and_a_warp_for_most_tokens(num_local):
    for num_tokens in range(1, MANY_TOKENS + 1):
        config = heuristic(num_tokens, num_local)
        assert config.num_groups * 128 >= num_local
        assert config.num_groups <= 4
        assert config.num_parts in (1, 2, 4, 8)
        assert 2 * config.num_parts * config.num_groups * 4 >= num_tokens


@pytest.mark.parametrize(
    ("num_tokens", "options", "reason"),
    [
        (2**15 + 1, {}, "262152 choices of 32769 tokens"),
        (8, {"num_experts": 513}, "513 experts"),
        (8, {"num_experts_per_token": 33}, "33 experts of a token"),
        (8, {"num_groups": 64}, "64 groups"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(num_tokens, options, reason):
    routing = Routing(**({"num_experts": 128, "num_experts_per_token": 8} | options))
    logits = jnp.zeros((num_tokens, routing.num_experts))
    with pytest.raises(NotImplementedError, match=reason):
        expert_routing(logits, jnp.int32(1), routing=routing, implementation="sm90")


@pytest.mark.parametrize(
    ("options", "bias", "reason"),
    [
        ({"num_experts": 12}, None, "float32 of 12 experts"),
        ({}, jnp.zeros(8, jnp.bfloat16), "selection_bias must be float32"),
        ({"num_experts_per_token": 9}, None, "9 of 8"),
        ({"num_groups": 3}, None, "of 3 groups"),
        ({"num_groups": 8, "group_score": "best_two"}, None, "two for each of 8 groups"),
    ],
)
def test_numbers_that_do_not_fit_together(options, bias, reason):
    routing = Routing(**({"num_experts": 8, "num_experts_per_token": 2} | options))
    with pytest.raises(ValueError, match=reason):
        expert_routing(jnp.zeros((1, 8)), jnp.int32(1), routing=routing, selection_bias=bias)


needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
ON_A_GPU = [
    *((1, 128, 8), (7, 12, 3), (16, 60, 4), (17, 128, 8), (64, 384, 8), (128, 512, 16), (255, 36, 6), (256, 8, 2)),
    *((257, 12, 3), (1000, 128, 8)),
]
CASES_ON_A_GPU = [
    (variant, *sizes) for variant in VARIANTS for sizes in ON_A_GPU if "groups" not in variant or sizes[1] % 12 == 0
]


@needs_gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("variant", "num_tokens", "num_experts", "per_token"), CASES_ON_A_GPU)
def test_on_a_gpu(variant, num_tokens, num_experts, per_token, has_bias):
    """With clusters of 1 to 8 CTAs, padding, and the same result twice."""
    routing, logits, bias = make_case(
        variant, num_tokens=num_tokens, num_experts=num_experts, per_token=per_token, has_bias=has_bias
    )
    run = jax.jit(functools.partial(expert_routing, routing=routing, implementation="sm90"))
    arguments = {"selection_bias": None if bias is None else jnp.asarray(bias)}
    for count in {num_tokens, num_tokens // 2}:
        routed, again = (run(jnp.asarray(logits), jnp.int32(count), **arguments) for _ in range(2))
        check(routed, routing, logits, bias, num_tokens=count)
        for a, b in zip(jax.tree.leaves(routed), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)


@needs_gpu
@pytest.mark.parametrize(("num_tokens", "num_experts", "per_token"), [(8192, 128, 8), (5001, 512, 10), (32768, 64, 8)])
def test_many_tokens_on_a_gpu(num_tokens, num_experts, per_token):
    """Experts as XLA chooses them."""
    routing, logits, _ = make_case(
        "normalized softmax", num_tokens=num_tokens, num_experts=num_experts, per_token=per_token
    )
    run = jax.jit(functools.partial(expert_routing, routing=routing), static_argnames="implementation")
    routed, want = (
        run(jnp.asarray(logits), jnp.int32(num_tokens - 3), implementation=name) for name in ("sm90", "xla")
    )
    np.testing.assert_array_equal(routed.experts, want.experts)
    np.testing.assert_allclose(routed.weights, want.weights, rtol=2e-6, atol=1e-30)
    check_rows(jax.tree.map(np.asarray, routed), num_tokens=num_tokens - 3, first_expert=0, num_local=num_experts)


@needs_gpu
@pytest.mark.parametrize("num_tokens", [1, 40, 256, 2000])
@pytest.mark.parametrize("first_expert", [0, 32, 96])
def test_a_part_of_the_experts_on_a_gpu(num_tokens, first_expert):
    routing, logits, _ = make_case("normalized softmax", num_tokens=num_tokens, num_experts=128, per_token=8)
    part = {"first_expert": first_expert, "num_local": 32}
    run = jax.jit(functools.partial(expert_routing, routing=routing, num_local_experts=32, implementation="sm90"))
    routed = run(jnp.asarray(logits), jnp.int32(num_tokens), first_expert=jnp.int32(first_expert))
    check(routed, routing, logits, None, num_tokens=num_tokens, **part)


@needs_gpu
def test_nan_on_a_gpu():
    routing, logits, _ = make_case("normalized softmax", num_tokens=200, num_experts=128, per_token=8)
    logits[[3, 50], 2:7] = np.nan
    logits[77] = -np.nan
    run = jax.jit(functools.partial(expert_routing, routing=routing, implementation="sm90"))
    routed = jax.tree.map(np.asarray, run(jnp.asarray(logits), jnp.int32(200)))
    for token in set(range(200)) - {3, 50, 77}:
        assert routed.experts[token].tolist() == list(expected_route(logits[token], 0.0, routing))
    assert all(len(set(experts.tolist())) == 8 for experts in routed.experts)
    check_rows(routed, num_tokens=200, first_expert=0, num_local=128)
