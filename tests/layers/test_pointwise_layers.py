"""Norm, rotary embedding and the feed-forward against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.mlp import FeedForward, gated_mlp, mlp
from jaxserve.layers.names import Names
from jaxserve.layers.norm import Norm, layer_norm, norm_spec, rms_norm
from jaxserve.layers.rope import Llama3Scaling, Rope, frequencies, half_split_order, rotations
from jaxserve.layers.weight import Dense
from pallas_kernels.kv_write import rotate

HIDDEN_SIZE = 4


def feed_forward(**options):
    return FeedForward(size=6, activation="relu", **options)


@pytest.mark.parametrize("shape", [(3, 12), (3, 2, 12)])
def test_rms_norm(shape):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=shape), rng.normal(size=12)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * weight
    y = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 0.1)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("gains", ["by head", "joint"])
def test_norms_of_heads(kind, gains):
    norm = HeadNorm(norm=Norm(eps=0.1, kind=kind, offset=1.0), gains=gains)
    weights = norm.specs("norm", num_heads=2, head_dim=4, axis="heads", num_interleaved=4)
    spec = weights if kind == "rms" else weights["gain"]
    assert (spec.shape, spec.offset, spec.dtype) == ((2, 4), 1.0, jnp.float32)
    np.testing.assert_array_equal(spec.rows, [0, 2, 1, 3, 4, 6, 5, 7])
    rng = np.random.default_rng(0)
    x, gain = rng.normal(size=(3, 2, 4)), rng.normal(size=(2, 4))
    axes = (1, 2) if gains == "joint" else 2
    centered = x if kind == "rms" else x - x.mean(axes, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(axes, keepdims=True) + 0.1) * gain
    given = jnp.asarray(gain, jnp.float32)
    y = norm(jnp.asarray(x, jnp.float32), given if kind == "rms" else {"gain": given})
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_rms_norm_of_bfloat16_is_computed_in_float32():
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16)  # a sum of squares in bfloat16 would stall at 2304
    y = rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.astype(jnp.float32), 1.0)


@pytest.mark.parametrize("gain_shape", [(12,), (2, 12)])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(gain_shape, bias):
    rng = np.random.default_rng(0)
    x, gain, shift = rng.normal(2.0, 1.0, (3, 2, 12)), rng.normal(size=gain_shape), rng.normal(size=12)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1) * gain + bias * shift
    params = {"gain": jnp.asarray(gain, jnp.float32)} | ({"bias": jnp.asarray(shift, jnp.float32)} if bias else {})
    np.testing.assert_allclose(layer_norm(jnp.asarray(x, jnp.float32), params, 0.1), expected, rtol=1e-4, atol=1e-6)


def test_gain_stored_less_one_keeps_its_precision():
    spec = norm_spec("norm", 1, offset=1.0)
    stored = np.asarray([2.0**-12], jnp.bfloat16)  # 1 + 2^-12 is 1 in bfloat16
    assert spec.assemble([stored]) == 1.0 + 2.0**-12
    assert spec.dtype_in(np.dtype(jnp.bfloat16)) == np.float32


def test_rotation_is_a_complex_product():
    rope = Rope(head_dim=12, theta=100.0)
    x = np.random.default_rng(0).normal(size=(5, 3, 12))
    positions = np.array([0, 1, 7, 100, 1000])
    angle = positions[:, None] * 100.0 ** (-np.arange(6) / 6)
    turned = (x[..., :6] + 1j * x[..., 6:]) * np.exp(1j * angle)[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    cos, sin = rotations(rope, jnp.asarray(positions, jnp.int32))
    # Angles are float32: at position 1000 they are good to about 1000 * 2^-24.
    np.testing.assert_allclose(rotate(jnp.asarray(x, jnp.float32), cos, sin), expected, atol=3e-4)
    np.testing.assert_allclose(rotate(jnp.asarray(x, jnp.float32), cos, sin)[:3], expected[:3], atol=5e-6)


def test_what_a_head_has_beyond_the_rotated_stays():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 12)), jnp.float32)
    cos, sin = rotations(Rope(head_dim=8, theta=100.0), jnp.arange(5, dtype=jnp.int32))
    y = rotate(x, cos, sin)
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(y[..., :8], rotate(x[..., :8], cos, sin))


def test_half_split_order_brings_neighbours_half_a_rotation_apart():
    assert half_split_order(7, 4).tolist() == [0, 2, 1, 3, 4, 5, 6]
    assert half_split_order(4, 0).tolist() == [0, 1, 2, 3]


def test_rotation_keeps_the_dtype():
    cos, sin = rotations(Rope(head_dim=4, theta=100.0), jnp.arange(2, dtype=jnp.int32))
    assert cos.dtype == sin.dtype == jnp.float32
    assert rotate(jnp.ones((2, 1, 4), jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


@pytest.mark.parametrize("high", [4.0, 1.0])  # as Llama 3.1, and as Llama 4 Scout
def test_llama3_scaling_stretches_long_waves_only(high):
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=high, original_max_position_embeddings=8192
    )
    plain = Rope(head_dim=128, theta=500000.0)
    scaled = Rope(head_dim=128, theta=500000.0, scaling=scaling)
    turns = 8192 * frequencies(plain) / (2 * np.pi)
    stretch = frequencies(plain) / frequencies(scaled)
    np.testing.assert_allclose(stretch[turns > high], 1.0, rtol=1e-6)
    np.testing.assert_allclose(stretch[turns < 1], 8.0, rtol=1e-6)
    between = stretch[(turns > 1) & (turns < high)]
    if high == 1.0:
        return
    assert len(between) > 5
    assert (np.diff(between) > 0).all()
    assert between.min() > 1.0
    assert between.max() < 8.0


REFERENCES = {
    "silu": lambda x: x * scipy.special.expit(x),
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * scipy.special.ndtr(x),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def draw_params(specs):
    """Random checkpoint tensors, and the weights that the specs make of them."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape)
        for spec in specs.values()
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }
    params = {}
    for name, spec in specs.items():
        sources = [tensors[source] for source in spec.source]
        values = jnp.asarray(spec.assemble(sources), jnp.float32)
        assert values.shape == spec.shape
        params[name] = Dense(values) if spec.num_inputs else values
    return tensors, params


@pytest.mark.parametrize("activation", REFERENCES)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(activation, bias):
    tensors, params = draw_params(feed_forward(has_bias=bias).specs("mlp", HIDDEN_SIZE))

    def project(name, x):
        return x @ tensors[f"mlp.{name}_proj.weight"].T + tensors.get(f"mlp.{name}_proj.bias", 0.0)

    x = np.random.default_rng(1).normal(size=(3, 4))
    expected = project("down", REFERENCES[activation](project("gate", x)) * project("up", x))
    np.testing.assert_allclose(
        gated_mlp(params, jnp.asarray(x, jnp.float32), activation), expected, rtol=1e-3, atol=1e-4
    )


def test_gated_mlp_from_one_tensor():
    one = feed_forward(has_bias=True).specs("mlp", HIDDEN_SIZE, Names(gate_up=("gate_up_proj",)))
    tensors, params = draw_params(one)
    gate, up = np.split(tensors["mlp.gate_up_proj.weight"], 2)
    np.testing.assert_allclose(params["gate_up"].values, [gate, up], rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_plain_mlp(bias):
    block = feed_forward(is_gated=False, has_bias=bias)
    tensors, params = draw_params(block.specs("mlp", HIDDEN_SIZE, Names(up="fc1", down="fc2")))

    def project(name, x):
        return x @ tensors[f"mlp.{name}.weight"].T + tensors.get(f"mlp.{name}.bias", 0.0)

    x = np.random.default_rng(1).normal(size=(3, 4))
    expected = project("fc2", REFERENCES["relu"](project("fc1", x)))
    np.testing.assert_allclose(mlp(params, jnp.asarray(x, jnp.float32), "relu"), expected, rtol=1e-3, atol=1e-4)
