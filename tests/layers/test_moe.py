"""Routers in each of their variants against NumPy, and what experts do with a step's padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxserve.layers.mlp import ClampedSwiGLU
from jaxserve.layers.moe import Routing, moe, moe_specs, route
from jaxserve.layers.params import abstract_params, init_params
from jaxserve.layers.ranking import count_groups, order_by_group, top_k
from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.grouped_matmul import grouped_matmul

NUM_TOKENS, HIDDEN_SIZE, NUM_EXPERTS = 17, 10, 12


def softmax(x):
    exponentials = np.exp(x - x.max())
    return exponentials / exponentials.sum()


def expected_route(logits, selection_bias, routing):
    """One token's {expert: weight}, from the definitions."""
    scores = {"softmax": softmax, "softmax_of_chosen": lambda x: x, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}
    scores = scores[routing.scores](logits)
    preferences = scores + selection_bias
    size = NUM_EXPERTS // routing.num_groups
    best = {"best": 1, "best_two": 2}[routing.group_score]
    groups = [np.sort(preferences[g * size : (g + 1) * size])[-best:].sum() for g in range(routing.num_groups)]
    allowed = np.argsort(groups)[-routing.num_chosen_groups :]
    preferences = np.where(np.isin(np.arange(NUM_EXPERTS) // size, allowed), preferences, -np.inf)
    chosen = np.argsort(preferences)[-routing.num_experts_per_token :]
    weights = softmax(scores[chosen]) if routing.scores == "softmax_of_chosen" else scores[chosen]
    weights = weights / weights.sum() if routing.is_normalized else weights
    return dict(zip(chosen.tolist(), (weights * routing.scale).tolist(), strict=True))


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"is_normalized": True},
        {"scores": "softmax_of_chosen"},
        {"scores": "sigmoid", "is_normalized": True, "scale": 2.5},
        {"num_groups": 4, "num_chosen_groups": 2, "scale": 16.0},
        {"scores": "sigmoid", "num_groups": 3, "num_chosen_groups": 2, "group_score": "best_two"},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("kernels", ["xla", "sm90"])
def test_route(switches, has_biases, kernels):
    routing = Routing(num_experts=NUM_EXPERTS, num_experts_per_token=3, **switches)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
    router = rng.standard_normal((NUM_EXPERTS, HIDDEN_SIZE)).astype(np.float32)
    params, logits, selection_bias = {"router": jnp.asarray(router)}, x @ router.T, np.zeros(NUM_EXPERTS, np.float32)
    if has_biases:
        bias, selection_bias = rng.standard_normal((2, NUM_EXPERTS)).astype(np.float32)
        params |= {"router_bias": jnp.asarray(bias), "selection_bias": jnp.asarray(selection_bias)}
        logits = logits + bias
    weights, chosen = map(np.asarray, route(params, jnp.asarray(x), routing, kernels=kernels))
    for token in range(NUM_TOKENS):
        want = expected_route(logits[token], selection_bias, routing)
        got = dict(zip(chosen[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(want, rel=1e-4)


def test_the_best_by_comparisons_are_the_best():
    values = np.random.default_rng(5).integers(-3, 3, (40, 9)).astype(np.float32)  # many are equal
    values[:, 2] = -np.inf
    want = jax.lax.top_k(jnp.asarray(values), 7)
    for kernels in ("xla", "sm90"):
        got = top_k(jnp.asarray(values), jnp.asarray(values), 7, kernels=kernels)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("num_entries", [1, 100, 2049])
@pytest.mark.parametrize("kernels", ["xla", "sm90"])
def test_order_by_group(num_entries, kernels):
    group = np.random.default_rng(6).integers(0, 8, num_entries)  # 7 stands for none
    order, place = map(np.asarray, order_by_group(jnp.asarray(group, jnp.int32), kernels=kernels))
    np.testing.assert_array_equal(order, np.argsort(group, stable=True))
    np.testing.assert_array_equal(place[order], np.arange(num_entries))
    counts = count_groups(jnp.asarray(group, jnp.int32), 7, kernels=kernels)
    np.testing.assert_array_equal(counts, np.bincount(group, minlength=8)[:7])


def test_sigmoids_that_are_all_zero_have_finite_weights():
    routing = Routing(num_experts=2, num_experts_per_token=2, scores="sigmoid", is_normalized=True)
    weights, _ = route({"router": jnp.full((2, 1), -1e4)}, jnp.ones((1, 1)), routing)
    assert np.isfinite(np.asarray(weights)).all()


def random_block(*, shared_gate):
    specs = moe_specs(
        "mlp",
        hidden_size=HIDDEN_SIZE,
        intermediate_size=6,
        num_experts=NUM_EXPERTS,
        shared_size=7,
        shared_gate=shared_gate,
    )
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    params = init_params(specs, dtype=np.dtype(np.float32), mesh=mesh)
    return jax.tree.map(lambda weight: 20 * np.asarray(weight), params)


@pytest.mark.parametrize("shared_gate", [False, True])
def test_each_token_has_its_own_experts(shared_gate):
    params = random_block(shared_gate=shared_gate)
    routing = Routing(num_experts=NUM_EXPERTS, num_experts_per_token=4)
    x = np.random.default_rng(4).standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
    num_tokens = 13
    weights = jax.tree.map(jnp.asarray, params)
    got = np.asarray(moe(weights, jnp.asarray(x), jnp.array(num_tokens), routing=routing, activation="relu"))

    def feed_forward(gate_up, down, row):
        gate, up = gate_up @ row
        return down @ (np.maximum(gate, 0) * up)

    for token, row in enumerate(x):
        want = feed_forward(params["shared"]["gate_up"], params["shared"]["down"], row)
        if shared_gate:
            want = want / (1 + np.exp(-params["shared_gate"][0] @ row))
        if token < num_tokens:
            experts = params["experts"]
            for index, weight in expected_route(params["router"] @ row, 0.0, routing).items():
                want = want + weight * feed_forward(experts["gate_up"][index], experts["down"][index], row)
        np.testing.assert_allclose(got[token], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu"])  # a part of the kernel, and behind it
def test_what_stands_around_the_kernels(monkeypatch, activation):
    params, rng = random_block(shared_gate=True), np.random.default_rng(7)
    for name, weight in (("gate_up_bias", "gate_up"), ("down_bias", "down")):
        params["experts"][name] = rng.standard_normal(params["experts"][weight].shape[:-1]).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)), jnp.float32)
    routing = Routing(num_experts=NUM_EXPERTS, num_experts_per_token=4)

    def run(kernels):
        function = functools.partial(moe, routing=routing, activation=activation, kernels=kernels)
        return jax.jit(function)(params, x, 13)

    want = run("xla")
    monkeypatch.setattr("jaxserve.layers.moe.grouped_matmul", grouped_matmul_without_kernel)
    np.testing.assert_allclose(run("sm90"), want, rtol=1e-4, atol=1e-4)


def grouped_matmul_without_kernel(*arguments, implementation, **options):
    assert implementation == "sm90"
    return grouped_matmul(*arguments, **options)


def test_the_kernel_computes_a_gate_of_both():
    gate = ClampedSwiGLU(alpha=1.702, limit=7.0)
    assert gate == ClampedSwiGLU(alpha=1.702, limit=7.0)  # one program for all layers
    x, weight = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 2, 64, 64), jnp.bfloat16)
    sizes, bias = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2, 2, 64), jnp.bfloat16)

    def run(x, weight, sizes, bias):
        return grouped_matmul(x, weight, sizes, bias=bias, activation=gate, implementation="sm90")

    assert compile_for_h200(run, x, weight, sizes, bias).spill_bytes == 0


def test_devices_run_the_kernel_for_the_experts_that_they_have():
    specs = moe_specs("mlp", hidden_size=128, intermediate_size=256, num_experts=4)
    axes = ("expert", "tensor")
    mesh = jax.make_mesh((2, 2), axes, devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2)
    params = abstract_params(specs, dtype=np.dtype(jnp.bfloat16), mesh=mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16, sharding=everywhere)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    routing = Routing(num_experts=4, num_experts_per_token=2)

    def trace(activation):
        run = functools.partial(moe, routing=routing, activation=activation, kernels="sm90")
        with jax.set_mesh(mesh):
            return str(jax.make_jaxpr(run)(params, x, count))

    fused, plain = trace("silu"), trace("gelu")
    assert fused.count("name=grouped_matmul") == plain.count("name=grouped_matmul") == 2
    assert "bf16[4,128,128]" in fused  # gate and up of 2 experts, half of their 256 rows
    assert "erf" not in fused
    assert "erf" in plain
