"""Layers that leave partial sums to the next norm, against layers that add them up themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import BLOCK_SIZE, NUM_BLOCKS, abstract_sums, make_batch, make_cache, make_mesh, make_model, split
from depths import quick_first
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.layers.linear import linear
from jaxserve.layers.paged_kv import PagedKV
from jaxserve.layers.peers import MAX_ROWS_OF_SUMS, MAX_ROWS_OF_SUMS_OF_TWO, abstract_peers
from jaxserve.layers.weight import Dense
from pallas_kernels import all_reduce
from pallas_kernels.peers import allocate_peer_buffers

HIDDEN_SIZE, NUM_LAYERS = 128, 3
EXPERTS = {
    **dict.fromkeys(["num_experts", "num_local_experts", "num_experts_per_tok"], 4),  # all: no choice by rounding
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "norm_topk_prob": True,
    "residual_multiplier": 0.5,  # of Granite
}

TRACED = 2
"""Layers that are traced: the second one, which has an update to add, and the third are alike."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "num_devices", "num_with_norm", "num_alone"),
    quick_first(
        [
            ("llama", 2, 2 * TRACED, 0),
            ("llama", 4, 2 * TRACED, 0),
            ("qwen3", 2, 2 * TRACED, 0),
            ("mixtral", 2, 2 * TRACED, 0),
            ("qwen3_moe", 4, 2 * TRACED, 0),
            # The gate of whose shared expert must not meet a partial sum: two sums for the feed-forward.
            ("qwen2_moe", 2, TRACED, 2 * TRACED),
            ("olmo2", 2, 0, 2 * TRACED),  # whose updates are normalised before they are added
            ("granite", 2, 0, 2 * TRACED),  # and scaled
            ("starcoder2", 4, 0, 2 * TRACED),  # has biases
            ("cohere", 2, 0, 2 * TRACED),
        ]
    ),
)
def test_hidden_states_are_the_same(monkeypatch, model_type, num_devices, num_with_norm, num_alone):
    family, config, params = make_model(model_type, hidden_size=HIDDEN_SIZE, num_key_value_heads=4, **EXPERTS)
    mesh = make_mesh(num_devices)
    params = split(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), family, config, mesh)
    peers = allocate_peer_buffers(abstract_sums(mesh, HIDDEN_SIZE))
    rng = np.random.default_rng(3)
    shape = (NUM_BLOCKS, 4, BLOCK_SIZE, 16)
    pools = [
        PagedKV(*(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(2))) for _ in range(NUM_LAYERS)
    ]
    by_head = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    cache = jax.device_put(make_cache(pools), by_head)
    batch = jax.device_put(make_batch([5, 1, 12, 8]), NamedSharding(mesh, PartitionSpec()))
    sums = []
    for name in ("all_reduce_add_rms_norm", "all_reduce"):
        run_one = getattr(all_reduce, name)
        monkeypatch.setattr(
            all_reduce, name, lambda *args, _n=name, _run=run_one, **kwargs: sums.append(_n) or _run(*args, **kwargs)
        )

    def run(batch):
        with jax.set_mesh(mesh):
            forward = jax.jit(lambda *arguments: family.forward(arguments[0], config, *arguments[1:]))
            return np.asarray(forward(params, batch, cache)[0], np.float32)

    want = run(batch)
    assert not sums
    got = run(batch.replace(peers=peers))
    assert sums.count("all_reduce_add_rms_norm") == num_with_norm
    assert sums.count("all_reduce") == num_alone + 1  # that of the tokens' vectors
    np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max())  # bfloat16, rounded at different points


@pytest.mark.parametrize(
    ("num_devices", "num_tokens", "room"),
    [(2, 8192, 8192), (2, 10**6, MAX_ROWS_OF_SUMS_OF_TWO), (4, 8192, MAX_ROWS_OF_SUMS), (4, 100, 100)],
)
def test_more_rows_than_peers_have_room_for_are_added_up_by_xla(num_devices, num_tokens, room):
    peers = abstract_sums(make_mesh(num_devices), HIDDEN_SIZE, num_rows=num_tokens)
    for num_rows in (room, room + 1):
        x = jax.ShapeDtypeStruct((num_rows, HIDDEN_SIZE), jnp.dtype(jnp.bfloat16))
        assert (all_reduce.why_not(x, peers) is None) == (num_rows == room)


def test_one_device_has_no_peers():
    assert abstract_sums(make_mesh(1), HIDDEN_SIZE) is None


@pytest.mark.parametrize(
    ("hidden_size", "vocab_size", "expected"),
    [
        (128, 64, (True, True)),
        (100, 64, (False, True)),
        (128, 10, (True, False)),  # 20 bytes a row
        (128, 65, (True, False)),  # which every device has as a whole
        (100, 65, (False, False)),
    ],
)
def test_no_buffers_for_what_no_kernel_takes(hidden_size, vocab_size, expected):
    peers = abstract_peers(
        make_mesh(2),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        dtype=jnp.dtype(jnp.bfloat16),
        max_num_tokens=8,
        max_num_rows=16,
    )
    assert tuple(buffers is not None for buffers in peers) == expected
    assert all(buffers.inbox.shape[3] == 8 for buffers in peers if buffers is not None)


def test_linear_leaves_partial_sums():
    mesh = make_mesh(2)
    split_inputs = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    rng = np.random.default_rng(0)
    x, values = (jax.device_put(rng.standard_normal((3, 8), np.float32), split_inputs) for _ in range(2))
    weight = Dense(values)

    @jax.jit
    def both(x, weight):
        partial_sums = linear(x, weight, leaves_partial_sums=True)
        assert jax.typeof(partial_sums).sharding.spec.unreduced == {"tensor"}
        whole = linear(x, weight)
        assert not jax.typeof(whole).sharding.spec.unreduced
        return jax.sharding.reshard(partial_sums, NamedSharding(mesh, PartitionSpec(None, None))), whole

    with jax.set_mesh(mesh):
        for y in both(x, weight):
            np.testing.assert_allclose(y, np.asarray(x) @ np.asarray(values).T, rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="a bias would be in each partial sum"):
            linear(x, weight, jnp.ones(3), leaves_partial_sums=True)
