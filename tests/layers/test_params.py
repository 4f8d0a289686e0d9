"""What follows from a tree of ParamSpecs without a checkpoint: shapes, shardings, sizes and random weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.layers.layouts import abstract_params, layouts, num_bytes
from jaxserve.layers.params import ParamSpec
from jaxserve.layers.random_params import init_params

SPECS = {
    "table": ParamSpec(shape=(64, 32), axes=("vocab", "embed"), source=("table",), init_scale=0.5),
    "layers": [
        {
            "up": ParamSpec(shape=(64, 32), axes=("ffn", "embed"), source=(f"{index}.up",)),
            "bias": ParamSpec(shape=(64,), axes=("ffn",), source=(f"{index}.bias",), init_scale=0.0),
            "norm": ParamSpec(shape=(32,), axes=(None,), source=(f"{index}.norm",), init_scale=None, dtype=np.float32),
        }
        for index in range(2)
    ],
}
BFLOAT16 = np.dtype(jnp.bfloat16)


def make_mesh(size):
    return jax.make_mesh((size,), ("tensor",), devices=jax.devices()[:size])


@pytest.fixture(scope="module")
def params():
    return init_params(SPECS, dtype=BFLOAT16, mesh=make_mesh(1), seed=7)


def test_random_weights_are_what_the_specs_say(params):
    table, layer = np.asarray(params["table"], np.float32), params["layers"][0]
    assert abs(table.std() - 0.5) < 0.05
    assert abs(table.mean()) < 0.05
    assert abs(np.asarray(layer["up"], np.float32).std() - 0.02) < 0.002
    np.testing.assert_array_equal(np.asarray(layer["bias"], np.float32), 0.0)
    np.testing.assert_array_equal(layer["norm"], 1.0)
    assert layer["up"].dtype == BFLOAT16
    assert layer["norm"].dtype == np.float32


def test_no_two_weights_are_equal(params):
    first, second = params["layers"]
    assert (np.asarray(first["up"]) != np.asarray(second["up"])).mean() > 0.9


def test_random_weights_depend_on_seed_and_path_only(params):
    split = init_params(SPECS, dtype=BFLOAT16, mesh=make_mesh(2), seed=7)
    jax.tree.map(np.testing.assert_array_equal, split, params)
    assert split["table"].sharding.spec == PartitionSpec("tensor", None)
    alone = init_params({"table": SPECS["table"]}, dtype=BFLOAT16, mesh=make_mesh(1), seed=7)
    np.testing.assert_array_equal(alone["table"], params["table"])
    other = init_params({"table": SPECS["table"]}, dtype=BFLOAT16, mesh=make_mesh(1), seed=8)
    assert (np.asarray(other["table"]) != np.asarray(params["table"])).mean() > 0.9


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_kv_heads_on_more_devices(dtype):
    """Heads 0 and 1 with queries 0 to 3 each, as members of a fused weight and with a value each."""
    specs = {
        "qkv": ParamSpec(shape=(2, 4 + 2, 3), axes=("kv_heads", "members", "embed"), source=("qkv",)),
        "gain": ParamSpec(shape=(2, 3), axes=("kv_heads", None), source=("gain",)),
    }
    options = {"dtype": np.dtype(dtype), "seed": 7}
    declared = init_params(specs, mesh=make_mesh(1), **options)
    laid_out = init_params(specs, mesh=make_mesh(4), **options)
    heads, members = [0, 0, 1, 1], [[0, 1, 4, 5], [2, 3, 4, 5], [0, 1, 4, 5], [2, 3, 4, 5]]
    expected = {"qkv": np.asarray(declared["qkv"])[np.c_[heads], members], "gain": np.asarray(declared["gain"])[heads]}
    jax.tree.map(np.testing.assert_array_equal, laid_out, expected)
    for name, layout in layouts(specs, make_mesh(4)).items():
        put = layout.put(np.asarray(declared[name]))
        assert (put.shape, put.dtype, put.sharding) == (layout.shape, dtype, layout.sharding)
        np.testing.assert_array_equal(put, expected[name])
        for shard in put.addressable_shards:
            np.testing.assert_array_equal(layout.shard(np.asarray(declared[name]), shard.index), shard.data)


def test_queries_that_do_not_divide():
    qkv = ParamSpec(shape=(2, 3 + 2, 3), axes=("kv_heads", "members", "embed"), source=("qkv",))
    with pytest.raises(ConfigError, match="qkv: heads of size 6 cannot be split evenly over 4 devices"):
        layouts({"qkv": qkv}, make_mesh(4))


def test_abstract_tree_matches_the_real_one(params):
    abstract = abstract_params(SPECS, dtype=BFLOAT16, mesh=make_mesh(1))
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for shape, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert (shape.shape, shape.dtype, shape.sharding) == (array.shape, array.dtype, array.sharding)
    assert num_bytes(SPECS, dtype=BFLOAT16) == sum(array.nbytes for array in jax.tree.leaves(params))


INTERLEAVED = np.arange(24).reshape(12, 2).T.ravel()


@pytest.mark.parametrize(
    ("num_parts", "rows"),
    [(1, None), (1, INTERLEAVED), (3, None), (3, INTERLEAVED), (3, np.arange(24)[::-3])],
    ids=["one as it is", "one reordered", "several one after the other", "several reordered", "some of the rows"],
)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.float8_e4m3fn, np.uint8], ids=str)
def test_whatever_a_row_has_follows_it(num_parts, rows, dtype):
    """Values, packed codes and scales of a row all move to the row's index in the weight."""
    num_rows = 24 if rows is None else len(rows)
    spec = ParamSpec(
        shape=(num_rows // 4, 4, 5),
        axes=(None, None, None),
        num_inputs=1,
        source=tuple("abc"[:num_parts]),
        source_shapes=((24 // num_parts, 5),) * num_parts,
        rows=rows,
    )
    order = np.arange(24) if rows is None else rows
    for width in (5, 3, 1):
        whole = np.random.default_rng(0).integers(0, 200, (24, width)).astype(dtype)
        arranged = spec.arrange(np.split(whole, num_parts))
        assert (arranged.shape, arranged.dtype) == ((num_rows, width), dtype)
        np.testing.assert_array_equal(arranged.view(np.uint8), np.ascontiguousarray(whole[order]).view(np.uint8))


def test_sources_with_inputs_before_outputs():
    spec = ParamSpec(
        shape=(2, 2, 3, 5),
        axes=(None, None, None, None),
        num_inputs=1,
        source=("w",),
        source_shapes=((2, 5, 6),),
        rows=np.arange(12).reshape(2, 3, 2).transpose(0, 2, 1).ravel(),
        is_transposed=True,
    )
    stored = np.random.default_rng(0).normal(size=(2, 5, 6))
    np.testing.assert_array_equal(spec.assemble([stored]), stored.reshape(2, 5, 3, 2).transpose(0, 3, 2, 1))


def test_spec_that_contradicts_itself():
    with pytest.raises(ValueError, match="differ in rank"):
        ParamSpec(shape=(2, 3), axes=("embed",), source=("w",))
    with pytest.raises(ValueError, match="one of source_shapes"):
        ParamSpec(shape=(2, 3), axes=(None, None), source=("q", "k"))
    with pytest.raises(ValueError, match=r"8 values do not make up a weight of shape \(2, 3\)"):
        ParamSpec(shape=(2, 3), axes=(None, None), source=("q",), source_shapes=((2, 4),))
    with pytest.raises(ValueError, match="3 values do not make up"):
        ParamSpec(shape=(2, 3), axes=(None, None), num_inputs=1, source=("q",), rows=np.arange(1))
