"""A model whose matrices are quantized computes what it computes with the dequantized values, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first, quick_only
from paged import chunked_logits
from test_tensor_parallel import SEQUENCE, fields_of, make_mesh

from jaxserve.layers.layouts import abstract_params, layouts, num_bytes, put, rounded_to, schemes_of, with_schemes
from jaxserve.layers.quantized import Quantized
from jaxserve.layers.random_params import init_params
from jaxserve.layers.weight import Dense, Weight
from jaxserve.models import get_family
from jaxserve.quantization.scheme import SCHEMES

FLOAT32 = np.dtype(np.float32)
MODELS = [
    ("llama", "int4"),
    ("llama", "fp8"),
    ("gpt2", "int8"),  # stored with inputs before outputs
    ("qwen3", "int4"),
    ("qwen2_moe", "int4"),
    ("gpt_oss", "int8"),
    ("deepseek_v2", "fp8"),
    ("phi", "int4"),
]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 12,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
GPT2 = {"n_embd": 64, "n_inner": 96, "n_layer": 1, "n_head": 8, "n_positions": 64}


def quantized_specs(model_type, quantization):
    fields = fields_of(model_type, **SIZES) | (GPT2 if model_type == "gpt2" else {})
    family = get_family(fields)
    config = family.config(fields)
    specs = family.param_specs(config)
    schemes = rounded_to(specs, SCHEMES[quantization])
    return with_schemes(specs, schemes, dtype=FLOAT32), config, family


def draw(specs, mesh, *, keeps=True):
    """Random weights, or with `keeps` False their values as they are before they are rounded."""
    rng = np.random.default_rng(3)

    def put_one(spec, layout):
        values = rng.normal(0.3 if spec.init_scale is None else 0.0, 0.3, spec.shape).astype(np.float32)
        return put(spec, layout, values)

    return jax.tree.map(put_one, specs if keeps else plain(specs), layouts(specs if keeps else plain(specs), mesh))


def plain(specs):
    return jax.tree.map(lambda spec: dataclasses.replace(spec, scheme=None), specs)


def dequantized(params):
    """Replace codes and scales by the values that they encode."""

    def values(weight):
        return Dense(weight.array()) if isinstance(weight, Weight) else weight

    return jax.tree.map(values, params, is_leaf=lambda node: isinstance(node, Weight))


@pytest.mark.parametrize(("model_type", "quantization"), quick_first(MODELS))
def test_codes_compute_what_their_values_do(model_type, quantization):
    """On four devices groups of inputs are smaller than on one, as far as the devices' inputs require it."""
    specs, config, family = quantized_specs(model_type, quantization)
    assert len(schemes_of(specs)) >= 4
    one, four = make_mesh(tensor=1), make_mesh(tensor=4)
    params = draw(specs, one)
    assert any(isinstance(node, Quantized) for node in jax.tree.leaves(params, is_leaf=lambda n: isinstance(n, Weight)))

    def logits(params, mesh):
        return chunked_logits(params, config, family, SEQUENCE, [[9, 1, 4]], mesh=mesh)

    want = logits(dequantized(params), one)
    np.testing.assert_allclose(logits(params, one), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits(draw(specs, four), four), want, rtol=1e-4, atol=2e-5)
    exact = logits(draw(specs, one, keeps=False), one)
    assert np.abs(want - exact).max() > 1e-4, "nothing was rounded"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "changes"),
    quick_only(
        [(1, {}), (2, {}), (4, {"intermediate_size": 200}), (4, {"num_attention_heads": 8, "num_key_value_heads": 2})],
        (4, {"intermediate_size": 200}),
    ),
)
@pytest.mark.parametrize("quantization", quick_only(SCHEMES, "int4"))
def test_each_device_has_the_codes_and_scales_of_its_values(num_devices, changes, quantization):
    specs = quantized_specs("llama", quantization)[0]
    fields = fields_of("llama", **SIZES) | changes
    family = get_family(fields)
    specs = family.param_specs(family.config(fields))
    specs = with_schemes(specs, rounded_to(specs, SCHEMES[quantization]), dtype=FLOAT32)
    mesh = make_mesh(tensor=num_devices)
    params = draw(specs, mesh)
    abstract = abstract_params(specs, dtype=FLOAT32, mesh=mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for expected, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert (expected.shape, expected.dtype, expected.sharding) == (array.shape, array.dtype, array.sharding)
    dense = draw(plain(specs), mesh)
    for quantized, values in zip(
        jax.tree.leaves(params["layers"], is_leaf=lambda node: isinstance(node, Weight)),
        jax.tree.leaves(dense["layers"], is_leaf=lambda node: isinstance(node, Weight)),
        strict=True,
    ):
        if isinstance(quantized, Weight):
            assert (quantized.shape, quantized.dtype) == (values.shape, values.dtype)
            with jax.set_mesh(mesh):
                array = quantized.array()
            assert array.sharding == values.array().sharding
            off = np.abs(np.asarray(array) - np.asarray(values.array()))
            assert off.max() < {"int8": 0.01, "fp8": 0.1, "int4": 0.15}[quantization]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", quick_only(SCHEMES, "int4"))
def test_random_codes_stand_for_values_of_the_declared_size(quantization):
    specs = quantized_specs("llama", quantization)[0]
    one, four = (init_params(specs, dtype=FLOAT32, mesh=make_mesh(tensor=size), seed=1) for size in (1, 4))
    for params in (one, four):
        gate_up = params["layers"][0]["mlp"]["gate_up"]
        with jax.set_mesh(make_mesh(tensor=1) if params is one else make_mesh(tensor=4)):
            values = np.asarray(gate_up.array())
        assert np.isfinite(values).all()
        assert abs(values.std() / 0.02 - 1) < 0.1
    np.testing.assert_array_equal(
        one["layers"][0]["mlp"]["down"].parts.codes, four["layers"][0]["mlp"]["down"].parts.codes
    )


def test_bytes_are_those_of_codes_and_scales():
    specs = quantized_specs("llama", "int4")[0]
    params = draw(specs, make_mesh(tensor=1))
    assert num_bytes(specs, dtype=FLOAT32) == sum(array.nbytes for array in jax.tree.leaves(params))
    layer = num_bytes({"layer": specs["layers"][0]}, dtype=FLOAT32)
    assert layer < num_bytes({"layer": plain(specs["layers"][0])}, dtype=FLOAT32) / 6


def test_rows_of_a_table_of_codes():
    """A checkpoint may have an embedding as codes, too."""
    values = np.random.default_rng(0).normal(size=(24, 64)).astype(np.float32)
    scheme = SCHEMES["int4"].fitted((24, 64), 1)
    table = Quantized(jax.tree.map(jnp.asarray, scheme.quantize(values)), scheme, jnp.dtype(jnp.bfloat16))
    ids = jnp.array([3, 0, 23, 3])
    np.testing.assert_array_equal(table.take(ids), table.array()[ids])
    assert table.take(ids).dtype == jnp.bfloat16
