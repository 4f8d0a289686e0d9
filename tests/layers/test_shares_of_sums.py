"""Layers that leave what devices have of a sum to the norm behind it, against layers that add it up themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import BLOCK_SIZE, NUM_BLOCKS, make_batch, make_mesh, make_model, split
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.layers.attention import paged_attention
from jaxserve.layers.batch import KVCache
from jaxserve.layers.linear import linear, summed
from jaxserve.layers.norm import MAX_ROWS_OF_PEERS, peer_buffers
from pallas_kernels import all_reduce

HIDDEN_SIZE, NUM_LAYERS = 128, 3


@pytest.mark.parametrize(
    ("model_type", "num_devices", "num_sums"),
    [
        ("llama", 2, 2 * NUM_LAYERS - 1),
        ("llama", 4, 2 * NUM_LAYERS - 1),
        ("qwen3", 2, 2 * NUM_LAYERS - 1),
        ("olmo2", 2, 0),  # whose updates are normalised before they are added
        ("granite", 2, 0),  # and scaled
    ],
)
def test_hidden_states_are_the_same(monkeypatch, model_type, num_devices, num_sums):
    family, config, params = make_model(model_type, hidden_size=HIDDEN_SIZE, num_key_value_heads=4)
    mesh = make_mesh(num_devices)
    params = split(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), family, config, mesh)
    peers = all_reduce.allocate_peer_buffers(peer_buffers(mesh, size=HIDDEN_SIZE, dtype=jnp.dtype(jnp.bfloat16)))
    rng = np.random.default_rng(0)
    shape = (NUM_BLOCKS, 4, BLOCK_SIZE, 16)
    pools = [[jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(NUM_LAYERS)] for _ in range(2)]
    by_head = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    cache = jax.device_put(KVCache(*map(tuple, pools)), by_head)
    batch = jax.device_put(make_batch([5, 1, 12, 8]), NamedSharding(mesh, PartitionSpec()))
    sums, plain = [], all_reduce.all_reduce_add_rms_norm
    monkeypatch.setattr(
        all_reduce, "all_reduce_add_rms_norm", lambda *args, **kwargs: sums.append(args) or plain(*args, **kwargs)
    )

    def run(batch):
        with jax.set_mesh(mesh):
            forward = jax.jit(lambda *arguments: family.forward(arguments[0], config, *arguments[1:], paged_attention))
            return np.asarray(forward(params, batch, cache)[0], np.float32)

    want = run(batch)
    assert not sums
    got = run(batch.replace(peers=peers))
    assert len(sums) == num_sums
    np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max())  # of bfloat16, rounded at other places


def test_more_rows_than_peers_have_room_for_are_added_up_by_xla():
    mesh = make_mesh(2)
    peers = peer_buffers(mesh, size=HIDDEN_SIZE, dtype=jnp.dtype(jnp.bfloat16))
    bf16 = jnp.dtype(jnp.bfloat16)
    for num_rows in (MAX_ROWS_OF_PEERS, MAX_ROWS_OF_PEERS + 1):
        x = jax.ShapeDtypeStruct((num_rows, HIDDEN_SIZE), bf16)
        assert all_reduce.supports(x, peers) == (num_rows == MAX_ROWS_OF_PEERS)
    assert peer_buffers(make_mesh(1), size=HIDDEN_SIZE, dtype=bf16) is None


def test_linear_leaves_shares():
    mesh = make_mesh(2)
    split_inputs = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    rng = np.random.default_rng(0)
    x, weight = (jax.device_put(rng.standard_normal((3, 8), np.float32), split_inputs) for _ in range(2))

    @jax.jit
    def both(x, weight):
        shares = linear(x, weight, leaves_shares=True)
        assert jax.typeof(shares).sharding.spec.unreduced == {"tensor"}
        whole = linear(x, weight)
        assert not jax.typeof(whole).sharding.spec.unreduced
        return summed(shares), summed(whole)

    with jax.set_mesh(mesh):
        for y in both(x, weight):
            np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(weight).T, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="a bias would be in each share of the sum"):
            linear(x, weight, jnp.ones(3), leaves_shares=True)
