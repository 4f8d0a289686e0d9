"""Codes that an engine holds: shards of them, matrices of mixed formats, GGUF files, and GPT-OSS's experts."""

import dataclasses
import itertools
import json
import math

import gguf
import gguf_files
import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from depths import quick_only
from golden_models import GOLDENS, full_logits, load_golden, relative_error
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxserve.layers.context import PLAIN, Kernel, StepContext
from jaxserve.layers.layouts import layouts, num_bytes, schemes_of, why_not_held, with_divisible_codes
from jaxserve.layers.linear import linear
from jaxserve.layers.params import ParamSpec
from jaxserve.layers.peers import summed
from jaxserve.layers.random_params import init_params
from jaxserve.layers.weight import Use, Weight
from jaxserve.loading.weights import load_config, load_weights, stored_specs
from jaxserve.models import get_family
from jaxserve.quantization.common import common_scheme, converted, values_of
from jaxserve.quantization.ggml import SCHEMES
from jaxserve.quantization.scheme import Parts, Scheme, dtype_of
from pallas_kernels import quantized_matmuls

FLOAT32 = np.dtype(np.float32)
HELD = {
    "int8": Scheme(codes="int8"),
    "fp8 of blocks": Scheme(codes="fp8", group_size=128),
    "int4": Scheme(codes="int4", group_size=128, scale_dtype="bfloat16"),
    "uint4": Scheme(codes="uint4", group_size=128, scale_dtype="float16", has_zeros=True),
    "int8 with zero points": Scheme(codes="int8", group_size=32, scale_dtype="float16", has_zeros=True),
    "nf4": Scheme(codes="nf4", group_size=64),
    "fp4": Scheme(codes="fp4", group_size=64),
    "nvfp4": Scheme(codes="e2m1", group_size=16, scale_dtype="float8_e4m3fn", factor_dtype="float32"),
    **SCHEMES,
}


def random_parts(scheme, outputs, inputs, seed=0):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 256, size=(outputs, inputs // scheme.kind.per_byte)).astype(np.uint8)
    codes = rng.normal(size=bits.shape).astype(scheme.kind.dtype) if scheme.kind.is_float else bits
    groups, factors = (outputs, scheme.num_groups(inputs)), (outputs, scheme.num_factors(inputs))

    def of_groups():
        if scheme.scale_dtype == "int8":
            return rng.integers(1, 64, size=groups).astype(np.int8)
        if scheme.scale_dtype == "float8_e8m0fnu":
            return rng.integers(120, 130, size=groups).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        return rng.uniform(0.5, 2, size=groups).astype(dtype_of(scheme.scale_dtype))

    def of_factors():
        return rng.uniform(0.01, 0.1, size=factors).astype(dtype_of(scheme.factor_dtype))

    has_factors = scheme.factor_dtype is not None
    return Parts(
        codes=codes.view(scheme.kind.dtype),
        scales=of_groups(),
        zeros=rng.integers(0, 16, size=groups).astype(dtype_of(scheme.scale_dtype)) if scheme.has_zeros else None,
        minimums=of_groups() if scheme.has_minimums else None,
        factors=of_factors() if has_factors else None,
        minimum_factors=of_factors() if has_factors and scheme.has_minimums else None,
    )


def multiplied(weight, x):
    return weight.product(x, PLAIN).run(x)


@pytest.mark.parametrize("num_devices", quick_only([1, 2, 3, 8], 8))
@pytest.mark.parametrize("name", HELD)
def test_shards_of_inputs_multiply_as_the_whole(name, num_devices):
    """768 / 8 inputs are no whole groups of 128, 64 or 256: a device repeats the scales of those it has parts of."""
    scheme, outputs, inputs = HELD[name], 40, 768
    parts = random_parts(scheme, outputs, inputs)
    spec = ParamSpec(
        shape=(outputs, inputs),
        axes=("embed", "ffn"),
        num_inputs=1,
        source=("w",),
        scheme=scheme,
        dtype=FLOAT32,
    )
    mesh = jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])
    weight = jax.tree.map(
        lambda array, layout: layout.put(array), spec.encode_parts([parts]), layouts({"w": spec}, mesh)["w"]
    )
    values = values_of(scheme, parts)
    x = np.random.default_rng(1).normal(size=(5, inputs)).astype(np.float32)
    on = NamedSharding(mesh, PartitionSpec(None, "tensor" if num_devices > 1 else None))
    with jax.set_mesh(mesh):
        multiply = jax.jit(lambda weight, x: (weight.array(), multiplied(weight, x)))
        array, y = multiply(weight, jax.device_put(x, on))
    np.testing.assert_allclose(np.asarray(array), values, rtol=2**-21, atol=2**-20)  # XLA may fuse a product and a sum
    np.testing.assert_allclose(np.asarray(y), x @ values.T, rtol=1e-4, atol=1e-4 * np.abs(values).max())


AXES = [("embed", "ffn"), ("ffn", "embed"), (None, "ffn", "embed")]
MULTIPLIED = [name for name in HELD if name not in ("nf4", "fp4")]
NUM_DEVICES = [1, 2, 8]


# Each scheme with each of the axes and with each number of devices; of two schemes, all three of these with each other.
@pytest.mark.parametrize(
    ("axes", "name", "num_devices"),
    quick_only(
        [
            (axes, name, num_devices)
            for i, name in enumerate(MULTIPLIED)
            for j, axes in enumerate(AXES)
            for k, num_devices in enumerate(NUM_DEVICES)
            if name in ("int4", "Q4_K") or (i + j + k) % 3 == 0
        ],
        *((axes, "int4", num_devices) for axes in AXES for num_devices in NUM_DEVICES),
        *((AXES[j], "Q4_K", num_devices) for j, num_devices in enumerate(NUM_DEVICES)),
    ),
    ids=str,
)
def test_each_device_multiplies_by_its_codes(monkeypatch, axes, name, num_devices):
    """The kernel is XLA's here; of inputs, devices have partial sums."""
    shape = (40, 768) if axes[0] == "embed" else (2, 24, 512) if len(axes) == 3 else (40, 512)
    rows, scheme = math.prod(shape[:-1]), HELD[name]
    parts, calls = random_parts(scheme, rows, shape[-1]), []
    spec = ParamSpec(shape=shape, axes=axes, num_inputs=1, source=("w",), scheme=scheme, dtype=FLOAT32)
    mesh = jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])
    weight = jax.tree.map(
        lambda array, layout: layout.put(array), spec.encode_parts([parts]), layouts({"w": spec}, mesh)["w"]
    )
    by_xla = quantized_matmuls.quantized_matmul

    def multiply(x, weight, **options):
        calls.append(weight.shape)
        return by_xla(x, weight, **options | {"implementation": "xla"})

    monkeypatch.setattr(quantized_matmuls, "quantized_matmul", multiply)
    monkeypatch.setattr(quantized_matmuls, "why_not", lambda *_: None)
    values = values_of(scheme, parts)
    x = (np.random.default_rng(1).normal(size=(5, shape[-1])) / values.std() / 25).astype(np.float32)
    want = x @ values.T
    on = NamedSharding(mesh, PartitionSpec(None, "tensor" if num_devices > 1 and axes[-1] == "ffn" else None))

    context = StepContext("sm90")

    def run(weight, x):
        if len(axes) == 3:
            product = weight.product(x, context, Use("silu"))
            assert product.part == (Kernel.QUANTIZED_MATMUL, None)
            return product.run(x)
        y = linear(x, weight, context=context)
        parts = linear(x, weight, context=context, leaves_partial_sums=True)
        assert jax.typeof(parts).sharding.spec.unreduced == ({"tensor"} if on.spec[1] is not None else set())
        return y, summed(parts, context)

    with jax.set_mesh(mesh):
        found = jax.jit(run)(weight, jax.device_put(x, on))
    if len(axes) == 3:
        gate, up = want[:, :24], want[:, 24:]
        want, found = gate / (1 + np.exp(-gate)) * up, [found]
    for y in found:
        np.testing.assert_allclose(np.asarray(y), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    split = [size // num_devices if axis == "ffn" else size for axis, size in zip(axes, shape, strict=True)]
    assert calls == [tuple(split)] * (1 if len(axes) == 3 else 2)


@pytest.mark.parametrize(
    ("name", "num_rows"),
    quick_only(
        list(itertools.product(["int8", "int8 in groups", "uint4", "nf4", "fp8 of blocks"], [1, 5, 300])),
        ("int8 in groups", 1),
        ("nf4", 5),
    ),
)
def test_inputs_in_an_order_of_their_own(name, num_rows):
    """Columns of codes are permuted; activations are, too, before they are multiplied: also those of several axes."""
    held = HELD | {"int8 in groups": Scheme(codes="int8", group_size=64, scale_dtype="float16")}
    scheme = msgspec.structs.replace(held[name], has_order=True)
    order = np.random.default_rng(2).permutation(768).astype(np.int32)
    parts = random_parts(scheme, 40, 768)
    spec = ParamSpec(
        shape=(40, 12, 64), axes=("embed", "heads", None), num_inputs=2, source=("w",), scheme=scheme, dtype=FLOAT32
    )
    weight = jax.tree.map(jnp.asarray, spec.encode_parts([parts], order))
    assert jax.tree.map(jnp.shape, weight) == jax.tree.map(lambda leaf: leaf.shape, spec.leaves)
    values = values_of(scheme, parts)[:, np.argsort(order)]
    np.testing.assert_allclose(weight.array().reshape(40, 768), values, rtol=2**-21, atol=2**-20)
    np.testing.assert_array_equal(weight.take(jnp.array([3, 0])), weight.array()[jnp.array([3, 0])])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(num_rows, 12, 64)), jnp.float32)
    y = multiplied(weight, x)
    expected = np.asarray(x).reshape(num_rows, 768) @ values.T
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(values).max())
    assert weight.quantized_matrix(2) is None
    columns = x.reshape(num_rows, 768)[:, order].reshape(x.shape)
    stored = dataclasses.replace(weight, order=None)
    np.testing.assert_allclose(multiplied(stored, columns), y, rtol=1e-5, atol=1e-4)


def test_devices_do_not_share_inputs_in_an_order_of_their_own():
    scheme = Scheme(codes="int8", group_size=64, has_order=True)
    spec = ParamSpec(shape=(40, 768), axes=("embed", "ffn"), num_inputs=1, source=("w",), scheme=scheme, dtype=FLOAT32)
    one, two = (jax.make_mesh((n,), ("tensor",), devices=jax.devices()[:n]) for n in (1, 2))
    assert with_divisible_codes({"w": spec}, one)["w"].scheme == scheme
    assert with_divisible_codes({"w": spec}, two)["w"].scheme is None


def test_kernels_multiply_by_inputs_in_an_order_of_their_own():
    scheme = msgspec.structs.replace(HELD["int4"], has_order=True)
    spec = ParamSpec(
        shape=(4096, 4096), axes=("embed", "ffn"), num_inputs=1, source=("w",), scheme=scheme, dtype=jnp.bfloat16
    )
    weight = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), spec.leaves)
    x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)
    assert weight.product(x, StepContext("sm90")).part == (Kernel.QUANTIZED_MATMUL, None)
    assert "order" in why_not_held(
        spec,
        scheme,
        dtype=np.dtype(jnp.bfloat16),
        kernels="sm90",
        is_cpu=False,
        mesh=jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1]),
    )


MIXED = [
    ("Q4_K", "Q6_K"),
    ("Q4_0", "Q8_0"),
    ("Q4_0", "Q4_1"),
    ("Q5_K", "Q8_0"),
    ("int4", "uint4"),
    ("uint4", "int8 with zero points"),
    ("Q4_K", "uint4"),
    ("Q3_K", "Q2_K", "Q6_K"),
]


@pytest.mark.parametrize("names", MIXED, ids=" and ".join)
def test_parts_of_a_matrix_that_are_stored_by_several_schemes(names):
    schemes = [HELD[name] for name in names]
    common = common_scheme(schemes, 768)
    assert isinstance(common, Scheme)
    for seed, scheme in enumerate(schemes):
        parts = random_parts(scheme, 8, 768, seed)
        got = values_of(common, converted(parts, scheme, common, 768))
        np.testing.assert_array_equal(got, values_of(scheme, parts))


@pytest.mark.parametrize("names", [("int8", "fp8 of blocks"), ("nf4", "int4"), ("nvfp4", "Q4_0")])
def test_what_has_no_scheme_in_common(names):
    assert "parts of it are stored as" in common_scheme([HELD[name] for name in names], 768)


KINDS = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q4_K", "ffn_gate": "Q5_K"}
KINDS |= {"ffn_up": "Q5_K", "ffn_down": "Q6_K", "token_embd": "Q3_K", "output": "Q6_K"}
HALVES = {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def write_q4_k_m(path):
    """A GGUF file of a Llama whose matrices are mixed as in Q4_K_M, of random blocks."""
    fields = json.loads(
        (next(golden for golden in GOLDENS if golden.name == "llama_untied") / "config.json").read_text()
    )
    fields |= {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 24, "num_key_value_heads": 24}
    fields |= {"head_dim": 32, "num_hidden_layers": 1}
    family, rng = get_family(fields), np.random.default_rng(3)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for spec in jax.tree.leaves(family.param_specs(family.config(fields)))
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }
    stored, kinds = gguf_files.convert_tensors(fields, tensors), {}
    for name, tensor in stored.items():
        kind = KINDS.get(name.split(".")[-2])
        if kind is None:
            continue
        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        blocks = rng.integers(0, 256, size=(math.prod(tensor.shape) // size, num_bytes)).astype(np.uint8)
        for offset in HALVES[kind]:
            halves = rng.uniform(1e-4, 1e-3, size=(len(blocks), 1)).astype(np.float16)
            blocks[:, offset : offset + 2] = halves.view(np.uint8)
        stored[name], kinds[name] = blocks.reshape(tensor.shape[0], -1), kind
    keys = {f"llama.{name}": value for name, value in gguf_files.convert_fields(fields).items()}
    gguf_files.write(path, "llama", keys, stored, kinds)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_a_gguf_file_of_mixed_types_is_held_exactly(tmp_path, num_devices):
    write_q4_k_m(tmp_path / "m.gguf")
    fields = load_config(tmp_path / "m.gguf")
    family = get_family(fields)
    specs = family.param_specs(family.config(fields))
    mesh = jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])
    held = stored_specs(tmp_path / "m.gguf", specs, dtype=FLOAT32, quantization=None)
    assert {name: scheme.codes for name, scheme in schemes_of(held).items()} == {
        "embed": "int4",
        "lm_head": "int8",
        "layers.0.attention.qkv": "int8",  # Q4_K and Q6_K
        "layers.0.attention.out": "uint4",
        "layers.0.mlp.gate_up": "int8",
        "layers.0.mlp.down": "int8",
    }
    assert num_bytes(held, dtype=FLOAT32) < num_bytes(specs, dtype=FLOAT32) / 3
    options = {"dtype": FLOAT32, "mesh": mesh, "progress": False}
    codes = load_weights(tmp_path / "m.gguf", held, **options)
    values = load_weights(tmp_path / "m.gguf", specs, **options)

    def compare(found, expected):
        if not isinstance(found, Weight):
            return np.testing.assert_array_equal(found, expected)
        with jax.set_mesh(mesh):
            array = jax.jit(lambda weight: weight.array())(found)
        return np.testing.assert_allclose(np.asarray(array), np.asarray(expected.array()), rtol=2**-20, atol=2**-22)

    jax.tree.map(compare, codes, values, is_leaf=lambda node: isinstance(node, Weight))


@pytest.mark.slow
def test_experts_of_gpt_oss_stay_mxfp4():
    path = next(path for path in GOLDENS if path.name == "gpt_oss_mxfp4")
    golden = load_golden(path)
    _, config, family, expected, mesh = golden
    specs = stored_specs(path, family.param_specs(config), dtype=FLOAT32, quantization=None)
    schemes = schemes_of(specs)
    assert {str(scheme) for scheme in schemes.values()} == {"e2m1 in groups of 32"}
    assert schemes.keys() == {
        f"layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in ("gate_up", "down")
    }
    held = load_weights(path, specs, dtype=FLOAT32, mesh=mesh, progress=False)
    experts = held["layers"][0]["mlp"]["experts"]["gate_up"]
    assert experts.parts.codes.shape == (4, 2, 32, 16)
    assert relative_error(full_logits((held, config, family, expected, mesh)), full_logits(golden)) < 1e-5


@pytest.mark.parametrize("name", quick_only(HELD, *list(HELD)[::4]))
def test_random_weights_of_any_scheme(name):
    spec = ParamSpec(
        shape=(64, 768), axes=("embed", "ffn"), num_inputs=1, source=("w",), scheme=HELD[name], dtype=FLOAT32
    )
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    values = np.asarray(init_params({"w": spec}, dtype=FLOAT32, mesh=mesh)["w"].array())
    assert np.isfinite(values).all()
    assert 0.005 < values.std() < 0.08
    assert abs(values.mean()) < 0.05 * values.std()


def abstract_mesh(num_devices):
    return AbstractMesh((num_devices,), ("tensor",), axis_types=(AxisType.Explicit,))


def test_what_is_held_where_nobody_has_said_it():
    spec = ParamSpec(shape=(4096, 4096), axes=("embed", "ffn"), num_inputs=1, source=("w",))
    experts = ParamSpec(
        shape=(8, 64, 256), axes=("experts", "embed", "ffn"), num_inputs=1, source=("w",), expert_size=256
    )
    gpu = {"dtype": np.dtype(jnp.bfloat16), "kernels": "sm90", "is_cpu": False, "mesh": abstract_mesh(1)}
    cpu = gpu | {"kernels": "xla", "is_cpu": True}
    for name in HELD:
        assert why_not_held(spec, HELD[name], **gpu) is None
        assert (why_not_held(spec, HELD[name], **cpu) is None) == (HELD[name].codes != "fp8")
    assert "slow" in why_not_held(spec, HELD["fp8 of blocks"], **cpu)
    reasons = {name: why_not_held(experts, scheme, **gpu) for name, scheme in HELD.items()}
    assert {name: reason for name, reason in reasons.items() if reason is not None} == {
        "int8 with zero points": "zero points of uint4, and of no other codes, got int8"
    }
    inner = ParamSpec(
        shape=(8, 2048, 768), axes=("experts", "embed", "ffn"), num_inputs=1, source=("w",), expert_size=768
    )
    for name, num_devices in itertools.product(("Q4_K", "Q2_K", "Q6_K", "nvfp4", "nf4"), (2, 4)):
        assert why_not_held(inner, HELD[name], **gpu | {"mesh": abstract_mesh(num_devices)}) is None
    assert "16 to 128" in why_not_held(experts, Scheme(codes="int8", group_size=8), **gpu)
    assert why_not_held(experts, HELD["int8"], **cpu) is None
    on_eight = gpu | {"mesh": abstract_mesh(8)}
    for name in ("int8", "uint4", "nvfp4", "Q4_K"):
        assert why_not_held(spec, HELD[name], **on_eight) is None
    odd = ParamSpec(shape=(4096, 29568), axes=("embed", "ffn"), num_inputs=1, source=("w",))
    assert why_not_held(odd, HELD["int4"], **gpu | {"mesh": abstract_mesh(4)}) is None
    assert "multiples of 64 and K of 32" in why_not_held(odd, HELD["int4"], **on_eight)
    assert "every step" in why_not_held(spec, HELD["int8"], **gpu | {"kernels": "xla"})


def test_a_quantized_config_without_weights_has_the_same_schemes(tmp_path):
    """Weights may be random, or only the config was downloaded."""
    path = next(path for path in GOLDENS if path.name == "gpt_oss_mxfp4")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    fields = load_config(tmp_path)
    family = get_family(fields)
    specs = family.param_specs(family.config(fields))
    found = schemes_of(stored_specs(tmp_path, specs, dtype=FLOAT32, quantization=None))
    assert found == schemes_of(stored_specs(path, specs, dtype=FLOAT32, quantization=None)) != {}
