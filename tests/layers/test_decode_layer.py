"""The decode steps with fused matmuls against the decoder in its usual form; here both in plain XLA."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import BLOCK_SIZE, NUM_BLOCKS, abstract_sums, make_batch, make_mesh, make_model, split
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.layers import decode_layer
from jaxserve.layers.attention import paged_attention
from jaxserve.layers.batch import KVCache
from jaxserve.layers.mlp import ACTIVATIONS, FUSED_ACTIVATIONS
from pallas_kernels import layer_matmuls, small_matmul
from pallas_kernels.deviceless import compile_for_h200


@pytest.mark.parametrize(
    ("model_type", "num_devices", "kernel"),
    [
        ("llama", None, "matmul"),
        ("llama", 1, "matmul"),
        ("qwen3", 2, "matmul"),
        ("llama", 4, "matmul"),
        ("qwen3", None, "layer_matmuls"),
        ("llama", 1, "layer_matmuls"),
        ("llama", None, "decode_layer"),
        ("llama", 1, "decode_layer"),
    ],
)
def test_equals_the_decoder(monkeypatch, model_type, num_devices, kernel):
    family, config, params = make_model(model_type)
    rng = np.random.default_rng(0)
    shape = (NUM_BLOCKS, max(2, num_devices or 1), BLOCK_SIZE, 16)  # as many heads as devices, if those are more
    pools = [tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3)) for _ in range(2)]
    batch = make_batch([5, 1, 12, 8, 0])
    given = params, batch, KVCache(*pools)
    mesh = None
    if num_devices is not None:
        mesh = make_mesh(num_devices)
        axis = "tensor" if num_devices > 1 else None
        whole, by_head = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec(None, axis)))
        given = split(params, family, config, mesh), *jax.device_put(given[1:], (whole, by_head))

    @jax.jit
    def forward(params, batch, kv_cache):
        return family.forward(params, config, batch, kv_cache, paged_attention)

    def run():
        jax.clear_caches()  # `supports` is no argument
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return jax.device_get(forward(*given))

    want = run()
    calls = []
    module = small_matmul if kernel == "matmul" else layer_matmuls
    plain = getattr(module, kernel)
    monkeypatch.setattr(module, kernel, lambda *args, **kwargs: calls.append(args) or plain(*args, **kwargs))
    monkeypatch.setattr(decode_layer, "supports", lambda *_, **__: True)
    monkeypatch.setattr(layer_matmuls, "why_not", lambda *_: None if kernel == "layer_matmuls" else "not here")
    monkeypatch.setattr(
        layer_matmuls, "why_not_attention", lambda *_, **__: None if kernel == "decode_layer" else "not here"
    )
    got = run()
    assert calls
    np.testing.assert_allclose(got[0][:4], want[0][:4], atol=2e-5)  # of padding they mean nothing
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_raises(
        AssertionError, np.testing.assert_allclose, got[1].k[1], pools[0][1]
    )  # something is written


def test_an_attention_of_ones_own_is_called(monkeypatch):
    """No kernel of a whole layer attends in its place."""
    family, config, params = make_model("llama")
    pools = [tuple(jnp.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, 16)) for _ in range(3)) for _ in range(2)]
    calls = []

    def attention(*args, **options):
        calls.append(args)
        return paged_attention(*args, **options)

    monkeypatch.setattr(decode_layer, "supports", lambda *_, **__: True)
    monkeypatch.setattr(layer_matmuls, "why_not", lambda *_: None)
    monkeypatch.setattr(layer_matmuls, "why_not_attention", lambda *_, **__: None)
    family.forward(params, config, make_batch([5, 1]), KVCache(*pools), attention)
    assert len(calls) == config.num_layers


def test_what_it_takes():
    _, _, params = make_model("llama", hidden_size=128)
    layers = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["layers"])
    x = jnp.zeros((16, 128), jnp.bfloat16)
    batch = make_batch([1, 2, 3, 4] * 4, "sm90")
    supports = functools.partial(decode_layer.supports, activation="silu")
    assert supports(layers, x, batch)
    assert not supports(layers, x, batch.replace(kernels="xla"))
    assert supports(layers, x, batch.replace(is_decode_only=False))
    for num_rows in (1, 4, 64, 65):
        assert supports(layers, jnp.zeros((num_rows, 128), jnp.bfloat16), batch) == (num_rows < 65)
    assert not supports(params["layers"], x.astype(jnp.float32), batch)
    halves = [jax.tree.map(lambda x: x.astype(jnp.float16), layer) for layer in layers]
    assert not supports(halves, x.astype(jnp.float16), batch)
    biased = [layer | {"mlp": layer["mlp"] | {"down_bias": jnp.zeros(128, jnp.bfloat16)}} for layer in layers]
    assert not supports(biased, x, batch)
    assert not supports(layers, x, batch, activation="relu")


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        ({"is_last": True}, True),
        ({"num_devices": 1}, True),
        ({"num_devices": 2}, False),
        ({"is_decode_only": False}, False),
        ({"sliding_window": 8}, False),
        ({"norms": ("q_norm", "k_norm")}, False),
        ({"norms": ("q_norm",)}, False),
        ({"norms": ("k_norm",)}, False),
        ({"half": 16}, False),
    ],
    ids=str,
)
def test_which_layers_are_one_kernel(changes, takes):
    options = {"is_last": False, "num_devices": None, "is_decode_only": True, "sliding_window": None}
    options |= {"norms": (), "half": 32} | changes
    _, _, params = make_model("llama", hidden_size=128, head_dim=64)
    layer, following, *_ = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["layers"])
    layer["attention"] |= dict.fromkeys(options["norms"], jnp.ones(64, jnp.bfloat16))
    pool = jnp.zeros((NUM_BLOCKS, 2, 8, 64), jnp.bfloat16)
    if (num_devices := options["num_devices"]) is not None:
        spec = PartitionSpec(None, "tensor" if num_devices > 1 else None)
        pool = jax.device_put(pool, NamedSharding(make_mesh(num_devices), spec))
    got = decode_layer._is_one_kernel(
        jnp.zeros((4, 2, 4, 64), jnp.bfloat16),
        (pool, pool),
        make_batch([1, 2, 3, 4], "sm90").replace(is_decode_only=options["is_decode_only"]),
        layer,
        None if options["is_last"] else following,
        (jnp.ones((4, options["half"])), jnp.zeros((4, options["half"]))),
        options["sliding_window"],
    )
    assert got == takes


@pytest.mark.parametrize(
    ("num_devices", "hidden_size", "takes"),
    [(1, 128, True), (2, 128, True), (4, 128, False), (1, 192, True), (2, 192, False)],
)
def test_which_shares_it_takes(num_devices, hidden_size, takes):
    """Of four devices each has 32 of the 128 inputs of the attention's last matmul, which are too few; the norm behind
    a sum over devices takes no rows of 192 values.
    """
    sizes = {"hidden_size": hidden_size, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    family, config, params = make_model("llama", **sizes)
    mesh = make_mesh(num_devices)
    params = split(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), family, config, mesh)
    x = jax.device_put(jnp.zeros((16, hidden_size), jnp.bfloat16), NamedSharding(mesh, PartitionSpec()))
    peers = abstract_sums(mesh, hidden_size)
    assert (peers is None) == (num_devices == 1 or hidden_size == 192)
    batch = make_batch([1, 2, 3, 4] * 4, "sm90")
    supports = functools.partial(decode_layer.supports, params["layers"], x, activation="silu")
    assert supports(batch=batch.replace(peers=peers)) == takes
    assert supports(batch=batch) == takes


@pytest.mark.parametrize("name", sorted(FUSED_ACTIVATIONS))
def test_the_kernels_compute_the_activations(name):
    x = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16)
    run = functools.partial(small_matmul.matmul, activation=ACTIVATIONS[name], implementation="sm90")
    assert compile_for_h200(run, x, weight).spill_bytes == 0
