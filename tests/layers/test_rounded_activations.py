"""Weights whose matmuls of many rows round activations to 8 bits: which do, and what becomes of the product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first

from jaxserve.layers.attention import Attention
from jaxserve.layers.context import PLAIN, StepContext
from jaxserve.layers.layer import Layer
from jaxserve.layers.layouts import with_rounded_activations
from jaxserve.layers.mlp import FeedForward, gated_mlp
from jaxserve.layers.norm import Norm, add_rms_norm, rms_norm
from jaxserve.layers.params import ParamSpec
from jaxserve.layers.paths import Kind, LayerShape, Path, choose
from jaxserve.layers.quantized import Quantized
from jaxserve.layers.rope import Rope
from jaxserve.quantization.scheme import SCHEMES, RoundedActivations, Scheme
from pallas_kernels.row_quantization import QuantizedRows, UnscaledProduct

DTYPE = jnp.dtype(jnp.float32)


def declared(name, shape=(96, 4, 16), **options):
    """The output of attention, [E, H, D]."""
    return ParamSpec(
        shape=shape,
        axes=(None,) * len(shape),
        num_inputs=2,
        source=("w",),
        scheme=SCHEMES[name],
        dtype=DTYPE,
        **options,
    )


def weight_of(spec):
    rng = np.random.default_rng(0)
    return jax.tree.map(jnp.asarray, spec.encode(rng.standard_normal(spec.shape).astype(np.float32)))


@pytest.mark.parametrize(
    ("name", "kernels", "min_rows"), quick_first([("fp8", "sm90", 33), ("int8", "sm90", 65), ("int8", "xla", 8)])
)
def test_many_rows_are_rounded_and_few_are_not(name, kernels, min_rows):
    [spec] = with_rounded_activations({"w": declared(name)}, {name}, kernels=kernels).values()
    weight = weight_of(spec)
    assert isinstance(weight, Quantized)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((min_rows, 4, 16)), jnp.float32)
    exact = np.einsum("thd,ehd->te", x, weight.array())
    few, many = (np.asarray(weight.product(rows, PLAIN).run(rows)) for rows in (x[:-1], x))
    np.testing.assert_allclose(few, exact[:-1], rtol=1e-4, atol=1e-4)
    error = np.linalg.norm(many - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 0.04
    # What is rounded is the activations alone, each row by itself.
    others = jnp.concatenate([x[-1:], 100 * x[:-1]])
    alone = np.asarray(weight.product(others, PLAIN).run(others))[0]
    np.testing.assert_allclose(alone, many[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("spec", "codes", "is_rounded"),
    [
        (declared("fp8"), {"fp8"}, True),
        (declared("int8"), {"fp8"}, False),
        (declared("int8"), {"fp8", "int8"}, True),
        (declared("int4", (8, 4, 64)), {"fp8", "int8"}, False),
        (declared("fp8", expert_size=16), {"fp8"}, False),
        (dataclasses.replace(declared("fp8"), scheme=None), {"fp8"}, False),
    ],
)
def test_which_weights_round_activations(spec, codes, is_rounded):
    [found] = with_rounded_activations({"w": spec}, codes, kernels="sm90").values()
    assert (found.scheme is not None and found.scheme.rounds_activations is not None) == is_rounded
    assert found.scheme is None or found.scheme.stored == spec.scheme
    if found.scheme is not None:
        rows = jax.ShapeDtypeStruct((65, *spec.shape[1:]), jnp.bfloat16)
        code = weight_of(found).product(rows, StepContext("sm90")).rounds_to
        assert (code is not None) == is_rounded


def matrix(shape, *, min_rows=65):
    scheme = Scheme(codes="fp8", rounds_activations=RoundedActivations(min_rows))
    return weight_of(
        ParamSpec(
            shape=shape,
            axes=(None,) * len(shape),
            num_inputs=1,
            source=("w",),
            scheme=scheme,
            dtype=jnp.dtype(jnp.bfloat16),
        )
    )


@pytest.mark.parametrize("num_rows", [64, 65])
def test_rows_stay_codes_from_the_norm_to_the_end_of_a_feed_forward(monkeypatch, num_rows):
    """On a GPU; here XLA computes what its kernels do."""
    monkeypatch.setattr("pallas_kernels.row_quantization.op.is_sm90", lambda _: False)
    monkeypatch.setattr("jaxserve.layers.norm.fused.add_rms_norm", pretend_to_fuse)
    for kernel in ("quantized_matmuls", "grouped_codes"):
        monkeypatch.setattr(f"jaxserve.layers.quantized.{kernel}.why_not", lambda *_: "this is not a GPU")
    rng = np.random.default_rng(2)
    x, update = jnp.asarray(rng.standard_normal((2, num_rows, 128)), jnp.bfloat16)
    gain, params = jnp.ones(128, jnp.bfloat16), {"gate_up": matrix((2, 256, 128)), "down": matrix((128, 256))}
    total, rows = add_rms_norm(x, update, gain, 1e-5, StepContext("sm90"), reader=params["gate_up"])
    got = gated_mlp(params, rows, "silu", StepContext("sm90"), consumer="norm")
    assert (isinstance(rows, QuantizedRows), isinstance(got, UnscaledProduct)) == (num_rows == 65,) * 2
    got = got.values() if isinstance(got, UnscaledProduct) else got
    np.testing.assert_array_equal(total, x + update)
    gate, up = np.einsum("te,gfe->gtf", rms_norm(total, gain, 1e-5), np.asarray(params["gate_up"].array(), np.float32))
    exact = np.asarray(jax.nn.silu(gate) * up) @ np.asarray(params["down"].array(), np.float32).T
    error = np.linalg.norm(np.asarray(got, np.float32) - exact) / np.linalg.norm(exact)
    assert (0.01 < error < 0.06) if num_rows == 65 else error < 0.01


def pretend_to_fuse(x, update, weight, *, eps, update_gain, update_scale, implementation):
    assert (update_gain, update_scale, implementation) == (None, 1.0, "sm90")
    return x + update, rms_norm(x + update, weight, eps)


@pytest.mark.parametrize(("min_rows", "reason"), [(65, None), (64, "64 rows are rounded to 8 bits")])
def test_layers_whose_rows_are_rounded_are_not_fused(min_rows, reason):
    weights = {
        "attention_norm": jnp.ones(128),
        "mlp_norm": jnp.ones(128),
        "attention": {"qkv": matrix((1, 3, 128, 128), min_rows=min_rows), "out": matrix((128, 128), min_rows=min_rows)},
        "mlp": {"gate_up": matrix((2, 256, 128), min_rows=min_rows), "down": matrix((128, 256), min_rows=min_rows)},
    }
    attention = Attention(num_heads=1, num_kv_heads=1, head_dim=128, rope=Rope(head_dim=128, theta=1e4))
    feed_forward = FeedForward(size=256, activation="silu")
    value = Layer(hidden_size=128, mixer=attention, feed_forward=feed_forward, norm=Norm(eps=1e-5))
    layer = LayerShape(layer=value, weights=weights, cache=None)
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    [path] = choose([layer], x, StepContext("sm90", is_decode_only=True))
    assert path == Path(Kind.CODES if reason is None else Kind.UNFUSED, reason)
