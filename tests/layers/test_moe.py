"""Blocks of experts against NumPy, and how they treat a step's padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from expected_routing import expected_route
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxserve.layers.activations import ClampedSwiGLU
from jaxserve.layers.context import StepContext
from jaxserve.layers.layouts import abstract_params
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.moe import Experts, Routing, moe
from jaxserve.layers.params import leaf_specs
from jaxserve.layers.parts import routing_part
from jaxserve.layers.random_params import init_params
from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.expert_routing import expert_routing
from pallas_kernels.grouped_matmul import grouped_matmul

NUM_TOKENS, HIDDEN_SIZE, NUM_EXPERTS = 17, 10, 12


def experts(num_experts, size, **options):
    routing = Routing(num_experts=num_experts, num_experts_per_token=1)
    return Experts(routing=routing, size=size, activation="relu", **options)


def random_block(*, shared_gate):
    shared = FeedForward(size=7, activation="relu")
    specs = experts(NUM_EXPERTS, 6, shared=shared, has_shared_gate=shared_gate).specs("mlp", HIDDEN_SIZE)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    params = init_params(specs, dtype=np.dtype(np.float32), mesh=mesh)
    return jax.tree.map(lambda weight: 20 * np.asarray(weight), params)


@pytest.mark.parametrize("shared_gate", quick_first([True, False]))
@pytest.mark.parametrize("router_biases", quick_first([True, False]))
def test_each_token_has_its_own_experts(shared_gate, router_biases):
    params = random_block(shared_gate=shared_gate)
    routing = Routing(num_experts=NUM_EXPERTS, num_experts_per_token=4)
    bias, selection_bias = np.zeros((2, NUM_EXPERTS), np.float32)
    if router_biases:
        bias, selection_bias = np.random.default_rng(2).standard_normal((2, NUM_EXPERTS)).astype(np.float32)
        params |= {"router_bias": bias, "selection_bias": selection_bias}
    x = np.random.default_rng(4).standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
    num_tokens = 13
    weights = jax.tree.map(jnp.asarray, params)
    got = np.asarray(moe(weights, jnp.asarray(x), jnp.array(num_tokens), routing=routing, activation="relu"))

    def feed_forward(gate_up, down, row):
        gate, up = gate_up @ row
        return down @ (np.maximum(gate, 0) * up)

    for token, row in enumerate(x):
        want = feed_forward(params["shared"]["gate_up"].values, params["shared"]["down"].values, row)
        if shared_gate:
            want = want / (1 + np.exp(-params["shared_gate"].values[0] @ row))
        if token < num_tokens:
            gate_up, down = (params["experts"][name].values for name in ("gate_up", "down"))
            for index, weight in expected_route(params["router"].values @ row + bias, selection_bias, routing).items():
                want = want + weight * feed_forward(gate_up[index], down[index], row)
        np.testing.assert_allclose(got[token], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu"])  # part of the kernel, and after it
def test_what_stands_around_the_kernels(monkeypatch, activation):
    params, rng = random_block(shared_gate=True), np.random.default_rng(7)
    for name, weight in (("gate_up_bias", "gate_up"), ("down_bias", "down")):
        params["experts"][name] = rng.standard_normal(params["experts"][weight].shape[:-1]).astype(np.float32)
    x = jnp.asarray(rng.standard_normal((NUM_TOKENS, HIDDEN_SIZE)), jnp.float32)
    routing = Routing(num_experts=NUM_EXPERTS, num_experts_per_token=4)

    def run(kernels):
        function = functools.partial(moe, routing=routing, activation=activation, context=StepContext(kernels))
        return jax.jit(function)(params, x, 13)

    want = run("xla")
    monkeypatch.setattr("jaxserve.layers.weight.grouped_matmul", without_kernel(grouped_matmul))
    monkeypatch.setattr("jaxserve.layers.moe.expert_routing", without_kernel(expert_routing))
    np.testing.assert_allclose(run("sm90"), want, rtol=1e-4, atol=1e-4)


def without_kernel(operation):
    def run(*arguments, implementation, **options):
        assert implementation == "sm90"
        return operation(*arguments, **options)

    return run


@pytest.mark.parametrize(
    ("num_tokens", "per_token", "kernels", "reason"),
    [
        (256, 32, ["expert_routing"], None),
        (257, 32, ["choose_experts", "expert_routing"], None),
        (8, 33, [], "33 experts of a token"),
        (8193, 32, [], "262176 choices of 8193 tokens"),
    ],
)
def test_what_routes(num_tokens, per_token, kernels, reason):
    """One kernel in a decode step, two in a prefill; if no kernel supports the routing, the table of paths says why."""
    E, F, X = 64, 64, 40
    shapes = experts(X, F).specs("mlp", E)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), leaf_specs(shapes))
    routing = Routing(num_experts=X, num_experts_per_token=per_token)

    def layers(params, x, count):
        for _ in range(2):
            x = moe(params, x, count, routing=routing, activation="silu", context=StepContext("sm90"))
        return x

    x = jax.ShapeDtypeStruct((num_tokens, E), jnp.bfloat16)
    traced = str(jax.make_jaxpr(layers)(params, x, jax.ShapeDtypeStruct((), jnp.int32)))
    assert [name for name in ("choose_experts", "expert_routing") if traced.count(f"name={name}") == 1] == kernels
    part = routing_part(num_tokens, routing, kernels="sm90")
    assert part.kernel == ("XLA" if reason else "expert_routing")
    assert part.reason is None if reason is None else reason in part.reason


@pytest.mark.slow
def test_the_kernel_computes_a_gate_of_both():
    gate = ClampedSwiGLU(alpha=1.702, limit=7.0)
    assert gate == ClampedSwiGLU(alpha=1.702, limit=7.0)  # one program for all layers
    x, weight = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 2, 64, 64), jnp.bfloat16)
    sizes, bias = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2, 2, 64), jnp.bfloat16)

    def run(x, weight, sizes, bias):
        return grouped_matmul(x, weight, sizes, bias=bias, activation=gate, implementation="sm90")

    assert compile_for_h200(run, x, weight, sizes, bias).spill_bytes == 0


def test_devices_run_the_kernel_for_the_experts_that_they_have():
    specs = experts(4, 256).specs("mlp", 128)
    axes = ("expert", "tensor")
    mesh = jax.make_mesh((2, 2), axes, devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2)
    params = abstract_params(specs, dtype=np.dtype(jnp.bfloat16), mesh=mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16, sharding=everywhere)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    routing = Routing(num_experts=4, num_experts_per_token=2)

    def trace(activation):
        run = functools.partial(moe, routing=routing, activation=activation, context=StepContext("sm90"))
        with jax.set_mesh(mesh):
            return str(jax.make_jaxpr(run)(params, x, count))

    fused, plain = trace("silu"), trace("gelu")
    assert fused.count("name=grouped_matmul") == plain.count("name=grouped_matmul") == 2
    assert fused.count("name=expert_routing") == 1
    assert "bf16[4,128,128]" in fused  # gate and up of 2 experts, half of their 256 rows
    assert "erf" not in fused
    assert "erf" in plain
