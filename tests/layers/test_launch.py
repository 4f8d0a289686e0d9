"""Cutting a launch leaves the residual stream unchanged, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.layers.batch import Batch
from jaxserve.layers.launch import MIN_LAYERS, cut_launch, spans_of_programs
from jaxserve.layers.sharding import with_explicit_axes


def make_batch(**fields):
    names = "token_ids positions write_index query_starts seq_lens block_tables slots num_decode_rows"
    nothing = dict.fromkeys(names.split())
    return Batch(**nothing, num_rows=jnp.int32(0), **fields)


def cuts(batch, num_layers):
    x = jax.ShapeDtypeStruct((2, 8), jnp.bfloat16)

    def is_cut(index):
        jaxpr = jax.make_jaxpr(lambda x: cut_launch(x, batch, index=index, num_layers=num_layers))(x)
        return bool(jaxpr.eqns)

    return [index for index in range(num_layers) if is_cut(index)]


def test_where():
    batch = make_batch(launch="in parts")
    assert cuts(batch, 32) == [3, 15]
    assert cuts(batch, MIN_LAYERS) == [1, 7]
    assert cuts(batch, MIN_LAYERS - 1) == []
    assert cuts(make_batch(), 32) == []
    batch = make_batch(launch="in programs")
    assert cuts(batch, 80) == [44]
    assert cuts(batch, 32) == [17]
    assert cuts(batch, MIN_LAYERS) == [8]
    assert cuts(batch, MIN_LAYERS - 1) == []


def test_the_first_program_is_short():
    assert spans_of_programs(80) == (range(16), range(16, 80))
    assert spans_of_programs(MIN_LAYERS) == (range(3), range(3, MIN_LAYERS))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("value", [-0.0, 1.0009765625, -3e4, 1e-7, np.inf, np.nan])
def test_nothing_changes(dtype, value):
    x = jnp.full((2, 8), value, dtype)
    cut = jax.jit(lambda x: cut_launch(x, make_batch(launch="in parts"), index=3, num_layers=32))
    assert np.asarray(cut(x)).tobytes() == np.asarray(x).tobytes()


def test_on_two_devices():
    mesh = with_explicit_axes(jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2]))
    batch, x = jax.device_put(
        (make_batch(launch="in parts"), jnp.arange(16, dtype=jnp.float16).reshape(2, 8)),
        NamedSharding(mesh, PartitionSpec()),
    )
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x, batch: cut_launch(x, batch, index=3, num_layers=32))(x, batch)
    assert got.sharding.is_fully_replicated
    assert got.tolist() == x.tolist()
