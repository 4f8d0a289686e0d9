"""Weights whose matmuls of many rows round activations to 8 bits: which do, and what becomes of the product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.params import ParamSpec, with_rounded_activations
from jaxserve.layers.weight import Quantized
from jaxserve.quantization.scheme import SCHEMES

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
    ("name", "kernels", "min_rows"), [("fp8", "sm90", 65), ("int8", "sm90", 65), ("int8", "xla", 8)]
)
def test_many_rows_are_rounded_and_few_are_not(name, kernels, min_rows):
    [spec] = with_rounded_activations({"w": declared(name)}, {name}, kernels=kernels).values()
    weight = weight_of(spec)
    assert isinstance(weight, Quantized)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((min_rows, 4, 16)), jnp.float32)
    exact = np.einsum("thd,ehd->te", x, weight.array())
    few, many = (np.asarray(weight.multiply(rows, output_dtype=DTYPE)) for rows in (x[:-1], x))
    np.testing.assert_allclose(few, exact[:-1], rtol=1e-4, atol=1e-4)
    error = np.linalg.norm(many - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 0.04
    # What is rounded is the activations alone, each row by itself.
    alone = np.asarray(weight.multiply(jnp.concatenate([x[-1:], 100 * x[:-1]]), output_dtype=DTYPE))[0]
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
        matrix = weight_of(found).matrix_of_rounded(65, 2)
        assert (matrix is not None) == is_rounded
