"""Logical axis -> mesh axis, and the two layers that exchange something between devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import make_batch
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.layers import sharding
from jaxserve.layers.context import StepContext
from jaxserve.layers.embedding import embed, gathered, unembed
from jaxserve.layers.linear import linear
from jaxserve.layers.peers import abstract_peers, allocate_peers
from jaxserve.layers.weight import Dense
from pallas_kernels import all_gather, all_reduce, small_matmul


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4])


def test_axes_of_one_device_or_of_no_name_stay_whole():
    for shape, names in [((1,), ("tensor",)), ((2,), ("data",))]:
        mesh = jax.make_mesh(shape, names, devices=jax.devices()[: shape[0]])
        spec = sharding.partition_spec(("ffn", "embed", None), (3, 5, 7), mesh, name="w")
        assert spec == PartitionSpec(None, None, None)


def test_split_axes(mesh):
    assert sharding.mesh_axes("kv_heads", mesh) == "tensor"
    assert sharding.mesh_axes("embed", mesh) is None
    assert sharding.partition_spec((None, "ffn"), (3, 8), mesh, name="w") == PartitionSpec(None, "tensor")


def test_what_is_not_of_an_expert_is_split_over_both_axes():
    mesh = AbstractMesh((2, 4), ("expert", "tensor"))
    weight = sharding.partition_spec(("experts", None, "expert_ffn", "embed"), (6, 2, 8, 3), mesh, name="w")
    assert weight == PartitionSpec("expert", None, "tensor", None)
    assert sharding.partition_spec(("heads", None), (8, 3), mesh, name="w") == PartitionSpec(("expert", "tensor"), None)
    assert sharding.kv_copies(2, mesh, name="w") == 4
    only_experts = AbstractMesh((2, 1), ("expert", "tensor"))
    assert sharding.partition_spec(("heads", None), (8, 3), only_experts, name="w") == PartitionSpec("expert", None)
    with pytest.raises(
        ConfigError, match=r"heads of size 12 .* 8 devices .mesh axes 'expert' and 'tensor'.: .* use 1, 2"
    ):
        sharding.partition_spec(("heads", None), (12, 3), mesh, name="w")
    with pytest.raises(
        ConfigError, match=r"experts of size 3 .* 2 devices .*enable_expert_parallel.*use 1 or 3 devices"
    ):
        sharding.partition_spec(("experts", None), (3, 3), mesh, name="w")


@pytest.mark.parametrize(("num_heads", "copies"), [(16, 1), (8, 1), (4, 2), (2, 4), (1, 8)])
def test_each_device_has_a_kv_head(num_heads, copies):
    mesh = AbstractMesh((2, 8), ("data", "tensor"))
    assert sharding.kv_copies(num_heads, mesh, name="w") == copies
    assert sharding.kv_copies(num_heads, AbstractMesh((8,), ("data",)), name="w") == 1


@pytest.mark.parametrize("num_heads", [3, 6, 12])
def test_kv_heads_that_neither_split_nor_repeat(num_heads):
    message = f"w: kv_heads of size {num_heads} can be neither split nor repeated evenly over 8 devices"
    with pytest.raises(ConfigError, match=message):
        sharding.kv_copies(num_heads, AbstractMesh((8,), ("tensor",)), name="w")


def test_a_vocabulary_that_does_not_divide_stays_whole(mesh):
    assert sharding.partition_spec(("vocab", "embed"), (9, 8), mesh, name="w") == PartitionSpec(None, None)
    assert sharding.partition_spec(("vocab", "embed"), (12, 8), mesh, name="w") == PartitionSpec("tensor", None)


def test_two_axes_on_the_same_devices(mesh):
    with pytest.raises(ConfigError, match="w: axes 'vocab' and 'ffn' cannot both be split over mesh axis 'tensor'"):
        sharding.partition_spec(("vocab", "ffn"), (8, 8), mesh, name="w")


@pytest.mark.parametrize(
    ("num_experts", "size", "devices", "whole"),
    [(32, 2880, 2, True), (128, 2880, 8, True), (128, 768, 8, True), (128, 768, 4, False), (60, 1408, 8, False)],
)
def test_experts_are_whole_where_their_shards_suit_no_kernel(num_experts, size, devices, whole):
    mesh = AbstractMesh((devices,), ("tensor",))
    assert sharding.splits_by_expert(num_experts, size, mesh) == whole
    with_experts = AbstractMesh((2, devices), ("expert", "tensor"))
    assert not sharding.splits_by_expert(num_experts, size, with_experts)


def test_unknown_axis(mesh):
    with pytest.raises(KeyError):
        sharding.partition_spec(("colour",), (8,), mesh, name="w")


def test_mesh_of_any_origin_becomes_explicit(mesh):
    automatic = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    assert automatic != mesh
    assert sharding.with_explicit_axes(automatic) == mesh
    assert sharding.with_explicit_axes(mesh) == mesh


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def test_linear_over_split_outputs_and_split_inputs(mesh):
    rng = np.random.default_rng(0)
    x, up, down = (rng.normal(size=shape).astype(np.float32) for shape in [(3, 5), (4, 2, 5), (6, 4, 2)])
    bias = rng.normal(size=6).astype(np.float32)

    @jax.jit
    def forward(x, up, down, bias):
        inner = linear(x, up)
        assert jax.typeof(inner).sharding.spec == PartitionSpec(None, "tensor", None)
        return linear(inner, down, bias)

    with jax.set_mesh(mesh):
        y = forward(x, Dense(put(up, mesh, "tensor")), Dense(put(down, mesh, None, "tensor")), put(bias, mesh))
    assert y.sharding.is_fully_replicated
    expected = np.einsum("tkd,ekd->te", np.einsum("te,kde->tkd", x, up), down) + bias
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [None, (), ("tensor",), (None, None, "tensor")], ids=str)
@pytest.mark.parametrize("output_dtype", [None, jnp.dtype(jnp.float32)])
def test_few_rows_by_the_kernel(monkeypatch, mesh, spec, output_dtype):
    """Each device multiplies by its outputs; if the inputs are sharded, XLA does it all."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in [(3, 256), (4, 80, 256)])
    shapes, plain = [], small_matmul.matmul

    def matmul(x, weight, *, output_dtype, implementation):
        assert implementation == "sm90"
        shapes.append(weight.shape)
        return plain(x, weight, output_dtype=output_dtype)

    monkeypatch.setattr("jaxserve.layers.weight.small_matmul.matmul", matmul, raising=True)
    want = linear(x, Dense(weight), output_dtype=output_dtype)
    run = jax.jit(lambda x, w: linear(x, w, context=StepContext("sm90"), output_dtype=output_dtype, of_few_rows=True))
    if spec is None:
        got = run(x, Dense(weight))
    else:
        with jax.set_mesh(mesh):
            got = run(put(x, mesh), Dense(put(weight, mesh, *spec)))
    assert shapes == ([] if spec == (None, None, "tensor") else [(80 if spec == ("tensor",) else 320, 256)])
    assert got.dtype == want.dtype
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), rtol=2e-2, atol=0.2
    )  # partial sums are rounded


@pytest.mark.parametrize("size", [252, 256])
def test_few_rows_that_the_kernel_does_not_take(monkeypatch, size):
    """The inputs are not a multiple of 64, or are in float32."""
    monkeypatch.delattr("jaxserve.layers.weight.small_matmul.matmul")
    dtype = jnp.bfloat16 if size % 64 else jnp.float32
    x, weight = jnp.ones((3, size), dtype), Dense(jnp.ones((64, size), dtype))
    np.testing.assert_array_equal(linear(x, weight, context=StepContext("sm90"), of_few_rows=True), linear(x, weight))


def test_linear_without_a_mesh_and_in_bfloat16():
    x, weight = jnp.full((2, 3), 1.5, jnp.bfloat16), Dense(jnp.ones((4, 3), jnp.bfloat16))
    assert linear(x, weight).dtype == jnp.bfloat16
    wide = linear(x, weight, output_dtype=jnp.dtype(jnp.float32))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, 4.5)


def test_embedding_and_head_over_a_split_vocabulary(mesh):
    table = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    ids = np.array([0, 2, 3, 11, 6, 6, 5], np.int32)  # both sides of every border between devices

    @jax.jit
    def forward(table, ids):
        x = embed(table, make_batch([1] * len(ids)).replace(token_ids=ids))
        return x, gathered(unembed(table, x))

    with jax.set_mesh(mesh):
        x, logits = forward(Dense(put(table, mesh, "tensor")), ids)
    assert x.sharding.is_fully_replicated
    assert logits.sharding.is_fully_replicated
    np.testing.assert_array_equal(x, table[ids])
    np.testing.assert_allclose(logits, table[ids] @ table.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_rows", "num_sends"), [(7, 2), (9, 0)])
def test_embedding_and_head_through_the_peers_memory(mesh, monkeypatch, num_rows, num_sends):
    """Vectors go through the peers' memory if they fit into it. XLA replaces the kernels, which need GPUs."""
    sent = []
    for module, name in ((all_reduce, "all_reduce"), (all_gather, "all_gather")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, _run=run, **kwargs: sent.append(args) or _run(*args, **kwargs))
    sizes = {"hidden_size": 128, "vocab_size": 16, "max_num_tokens": 8, "max_num_rows": 8}
    peers = allocate_peers(abstract_peers(mesh, dtype=jnp.dtype(jnp.bfloat16), **sizes))
    table = np.random.default_rng(0).normal(size=(16, 128)).astype(jnp.bfloat16)
    ids = np.array([0, 3, 4, 15, 7, 8, 5, 11, 12], np.int32)[:num_rows]

    @jax.jit
    def forward(table, ids, peers):
        batch = make_batch([1] * num_rows).replace(token_ids=ids, peers=peers.sums)
        x = embed(table, batch)
        return x, gathered(unembed(table, x), peers.logits)

    with jax.set_mesh(mesh):
        x, logits = forward(Dense(put(table, mesh, "tensor")), ids, peers)
    assert len(sent) == num_sends
    assert x.sharding.is_fully_replicated
    assert logits.sharding.is_fully_replicated
    np.testing.assert_array_equal(x, table[ids])
    exact = table[ids].astype(np.float32) @ table.T.astype(np.float32)
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-4)
