"""When a feed-forward runs the kernel for gate and up, and how a step with it compiles for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.bench.shapes import LLAMA_3_8B
from jaxserve.layers import activations, mlp
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.context import StepContext
from jaxserve.layers.layouts import abstract_params
from jaxserve.layers.paged_kv import PagedKV
from jaxserve.layers.sharding import with_explicit_axes
from jaxserve.layers.weight import Dense
from jaxserve.models import get_family
from pallas_kernels import gated_linear_unit as kernels
from pallas_kernels.deviceless import compile_for_h200, compile_lowered, h200_mesh

F, E = 256, 128


def make_params(dtype=jnp.bfloat16, *, bias=False):
    params = {
        name: Dense(jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * shape[-1] ** -0.5, dtype))
        for seed, (name, shape) in enumerate({"gate_up": (2, F, E), "down": (E, F)}.items())
    }
    return params | ({"gate_up_bias": jnp.ones((2, F), dtype), "down_bias": jnp.ones(E, dtype)} if bias else {})


def make_rows(num_rows, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(2).standard_normal((num_rows, E)), dtype)


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of the operation; it runs in plain XLA."""
    calls = []

    def run(x, weight, *, activation, implementation):
        calls.append(implementation)
        return plain(x, weight, activation=activation)

    plain = kernels.gated_linear_unit
    monkeypatch.setattr(kernels, "gated_linear_unit", run)
    return calls


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_many_rows_take_the_kernel(calls, dtype, activation):
    params, x = make_params(dtype), make_rows(128, dtype)
    got = mlp.gated_mlp(params, x, activation, StepContext("sm90"))
    assert calls == ["sm90"]
    want = mlp.gated_mlp(params, x, activation)
    assert len(calls) == 1
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=0.02)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("few rows", {"num_rows": 127}),
        ("float32", {"dtype": jnp.float32}),
        ("biases", {"bias": True}),
        ("an activation that Mosaic has not", {"activation": "gelu"}),
        ("a function of gate and up", {"activation": activations.ClampedSwiGLU(alpha=1.7, limit=7.0)}),
        ("no kernels", {"kernels": "xla"}),
    ],
)
def test_all_else_takes_xla(calls, case, changes):
    case = {"num_rows": 128, "dtype": jnp.bfloat16, "bias": False, "activation": "silu", "kernels": "sm90"} | changes
    params, x = make_params(case["dtype"], bias=case["bias"]), make_rows(case["num_rows"], case["dtype"])
    assert mlp.gated_mlp(params, x, case["activation"], StepContext(case["kernels"])).shape == x.shape
    assert calls == []


@pytest.mark.parametrize(
    ("num_devices", "is_split", "num_calls"),
    [(2, False, 1), (2, True, 1), (4, True, 0)],
    ids=["whole weights", "a share that the kernel takes", "a share that is too small"],
)
def test_on_several_devices(calls, num_devices, is_split, num_calls):
    mesh = with_explicit_axes(jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices]))
    params, x = make_params(), make_rows(128)
    want = mlp.gated_mlp(params, x, "silu")
    axis = "tensor" if is_split else None
    specs = {"gate_up": PartitionSpec(None, axis, None), "down": PartitionSpec(None, axis)}
    params = jax.device_put(params, {name: Dense(NamedSharding(mesh, spec)) for name, spec in specs.items()})
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(mlp.gated_mlp, activation="silu", context=StepContext("sm90")))(params, x)
    assert len(calls) == num_calls
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02)


@pytest.mark.parametrize("num_rows", quick_first([128, 1024]))
@pytest.mark.parametrize(
    "name", quick_first(sorted(activations.FUSED_ACTIVATIONS - {"swish", "gelu_new"}))
)  # two pairs of synonyms
def test_the_kernel_computes_the_activations(name, num_rows):
    x = jax.ShapeDtypeStruct((num_rows, E), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((2, F, E), jnp.bfloat16)
    run = functools.partial(kernels.gated_linear_unit, activation=activations.ACTIVATIONS[name], implementation="sm90")
    assert compile_for_h200(run, x, weight).spill_bytes == 0


def compile_prefill(num_tokens=8192, num_blocks=1024):
    """Compile a layer of Llama 3 8B over one prompt for an H200."""
    fields = LLAMA_3_8B | {"num_hidden_layers": 1}
    family = get_family(fields)
    config = family.config(fields)
    mesh = with_explicit_axes(h200_mesh((1,), ("tensor",)))
    dtype = np.dtype(jnp.bfloat16)
    params = abstract_params(family.param_specs(config), dtype=dtype, mesh=mesh)
    whole = NamedSharding(mesh, PartitionSpec())

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    batch = Batch(
        token_ids=array(num_tokens),
        positions=array(num_tokens),
        write_index=array(num_tokens),
        query_starts=array(2),
        seq_lens=array(1),
        block_tables=array(1, 512),
        slots=array(1),
        num_decode_rows=array(),
        num_rows=array(),
        kernels="sm90",
    )
    pool = array(num_blocks, config.num_kv_heads, 16, config.head_dim, dtype=dtype)
    kv_cache = KVCache((PagedKV(pool, pool),), num_blocks=num_blocks, block_size=16)

    def step(params, batch, kv_cache):
        return family.forward(params, config, batch, kv_cache)

    def lower():
        with jax.set_mesh(mesh):
            return jax.jit(step, donate_argnums=2).lower(params, batch, kv_cache)

    # The options with which the engine compiles a step of so many tokens.
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
    return compile_lowered(lower, compiler_options=options), (num_tokens, 2 * config.intermediate_size)


@pytest.mark.slow
def test_a_prefill_keeps_gate_and_up_in_the_kernel(monkeypatch):
    program, (rows, outputs) = compile_prefill()
    gate_up = [f"bf16[{rows},{outputs}]", f"bf16[{rows},2,{outputs // 2}]"]
    assert program.spill_bytes == 0
    assert not any(shape in program.compiled.as_text() for shape in gate_up)

    monkeypatch.setattr(kernels, "why_not", lambda *_: "not here")
    plain, _ = compile_prefill()
    assert any(shape in plain.compiled.as_text() for shape in gate_up)
    assert program.temp_bytes <= plain.temp_bytes - rows * outputs * 2 // 2  # of both, the half is the result
