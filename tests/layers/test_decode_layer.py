"""The decode steps with fused matmuls against the decoder in its usual form; here both in plain XLA."""

import contextlib
import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import (
    BLOCK_SIZE,
    FIELDS,
    NUM_BLOCKS,
    abstract_sums,
    make_batch,
    make_cache,
    make_mesh,
    make_model,
    make_params,
    placed,
    random_pools,
    split,
)
from depths import quick_first, quick_only
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.layers import decoder, paths
from jaxserve.layers.activations import ACTIVATIONS, FUSED_ACTIVATIONS
from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.context import StepContext
from jaxserve.layers.latent_attention import PagedLatent
from jaxserve.layers.layer import ONE_NORM, SANDWICH_NORMS, Arrangement
from jaxserve.layers.layouts import layouts, put, rounded_to, with_schemes
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.norm import Norm
from jaxserve.layers.paged_kv import PagedKV
from jaxserve.layers.params import ParamSpec
from jaxserve.layers.paths import Kind, LayerShape, choose
from jaxserve.layers.quantized import Quantized
from jaxserve.layers.rope import Rope
from jaxserve.models import smollm3
from jaxserve.quantization.scheme import SCHEMES, Parts, Scheme
from pallas_kernels import all_reduce, layer_matmuls, quantized_matmuls, small_matmul
from pallas_kernels.deviceless import compile_for_h200
from pallas_kernels.peers import allocate_peer_buffers


@pytest.mark.parametrize(
    ("model_type", "num_devices", "kernel"),
    quick_only(
        [
            ("llama", None, "matmul"),
            ("llama", 1, "matmul"),
            ("qwen3", 2, "matmul"),
            ("llama", 4, "matmul"),
            ("qwen3", None, "layer_matmuls"),
            ("llama", 1, "layer_matmuls"),
            ("llama", None, "decode_layer"),
            ("llama", 1, "decode_layer"),
            ("qwen2", None, "matmul"),
            ("qwen2", 2, "matmul"),
            ("qwen2", 1, "layer_matmuls"),
            ("qwen2", None, "decode_layer"),
        ],
        ("llama", 1, "decode_layer"),
    ),
)
def test_equals_the_decoder(monkeypatch, model_type, num_devices, kernel):
    family, config, params = make_model(model_type)
    pools = random_pools(3, max(2, num_devices or 1))  # as many heads as devices, if those are more
    given = params, make_batch([5, 1, 12, 8, 0]), make_cache(pools)
    mesh = None
    if num_devices is not None:
        mesh = make_mesh(num_devices)
        given = split(params, family, config, mesh), *placed(*given[1:], mesh)

    @jax.jit
    def forward(params, batch, kv_cache):
        return family.forward(params, config, batch, kv_cache)

    def run():
        jax.clear_caches()  # what kernels take is no argument
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return jax.device_get(forward(*given))

    want = run()
    calls = []
    module = small_matmul if kernel == "matmul" else layer_matmuls
    plain = getattr(module, kernel)
    monkeypatch.setattr(module, kernel, lambda *args, **kwargs: calls.append(args) or plain(*args, **kwargs))
    monkeypatch.setattr(paths, "why_not_fused", lambda *_: None)
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
        AssertionError, np.testing.assert_allclose, got[1].pools[1].k, pools[1].k
    )  # something is written


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", quick_first([2, 1, 4]))
def test_codes_equal_the_decoder(monkeypatch, num_devices):
    """One device has one kernel for a layer's matmuls, several have one for each matmul, and sums in between."""
    family, config, params = make_model("llama")
    specs = family.param_specs(config)
    specs = with_schemes(specs, rounded_to(specs, Scheme(codes="int4", group_size=32)), dtype=np.dtype(np.float32))
    mesh = make_mesh(num_devices)
    held = jax.tree.map(
        lambda spec, weight, layout: put(spec, layout, np.asarray(*jax.tree.leaves(weight))),
        *(specs, params, layouts(specs, mesh)),
        is_leaf=lambda node: isinstance(node, ParamSpec),
    )
    given = placed(make_batch([5, 1, 12, 8]), make_cache(random_pools(3, max(2, num_devices))), mesh)

    def run():
        jax.clear_caches()  # what kernels take is no argument
        with jax.set_mesh(mesh):
            forward = jax.jit(lambda params, batch, kv_cache: family.forward(params, config, batch, kv_cache))
            return jax.device_get(forward(held, *given))

    want = run()
    calls = []
    kernel = "quantized_layer_matmuls" if num_devices == 1 else "quantized_matmul"
    plain = getattr(quantized_matmuls, kernel)
    monkeypatch.setattr(quantized_matmuls, kernel, lambda *args, **kwargs: calls.append(args) or plain(*args, **kwargs))
    monkeypatch.setattr(paths, "why_not_fused", lambda *_: None)
    got = run()
    # Of three layers two are alike; the first qkv is not among them.
    assert len(calls) == (2 if num_devices == 1 else 7)
    np.testing.assert_allclose(got[0], want[0], atol=2e-5)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_a_cache_of_its_own_kind_is_asked_to_attend(monkeypatch):
    """No kernel of a whole layer attends in its place."""
    family, config, params = make_model("llama")
    pages = PagedKV(*(jnp.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, 16)) for _ in range(2)))
    calls = []

    class Own(NamedTuple):
        pages: PagedKV

        def attend(self, *args, **options):
            calls.append(args)
            out, pages = self.pages.attend(*args, **options)
            return out, Own(pages)

    monkeypatch.setattr(paths, "why_not_fused", lambda *_: None)
    monkeypatch.setattr(layer_matmuls, "why_not", lambda *_: None)
    monkeypatch.setattr(layer_matmuls, "why_not_attention", lambda *_, **__: None)
    family.forward(params, config, make_batch([5, 1]), make_cache([Own(pages)] * 3))
    assert len(calls) == 2  # of three layers two are alike


def shapes_of(value, layers, *, cache=None):
    if cache is None:
        num_kv_heads, _, head_dim, _ = layers[0]["attention"]["qkv"].shape
        cache = PagedKV(*[jnp.zeros((NUM_BLOCKS, num_kv_heads, 8, head_dim), jnp.bfloat16)] * 2)
    return [LayerShape(layer=value, weights=weights, cache=cache) for weights in layers]


def attending(**changes):
    """Return a function that changes the attention of a Layer."""
    return lambda layer: replace(layer, mixer=replace(layer.mixer, **changes))


def feeding(**changes):
    """Return a function that changes the feed-forward of a Layer."""
    return lambda layer: replace(layer, feed_forward=replace(layer.feed_forward, **changes))


def layered(**changes):
    return lambda layer: replace(layer, **changes)


HEAD_NORM = HeadNorm(norm=Norm(eps=1e-5))


def mixed_layers(config):
    """Return layers of which some are fused, and some are not, each for another reason."""
    first, second, third, unrotated, *_ = smollm3.layers(config)
    routing = Routing(num_experts=4, num_experts_per_token=2)
    return (
        first,
        second,
        replace(third, feed_forward=Experts(routing=routing, size=32, activation="silu")),
        unrotated,
        attending(head_norm=HEAD_NORM, qkv_bias=True)(first),
        layered(norms=SANDWICH_NORMS)(first),
        layered(arrangement=Arrangement.PARALLEL)(first),
        layered(norm=Norm(eps=1e-2))(first),
        first,  # whose norm is another one, and is not computed with the layer before
    )


@pytest.mark.parametrize(
    ("num_devices", "has_peers", "cuts"),
    quick_first(
        [
            (None, False, range(1, 9)),
            *((None, False, [cut]) for cut in (1, 2, 3, 6, 8)),
            (2, False, [4]),
            (2, False, range(1, 9)),
            (2, True, []),
            (2, True, [4]),
        ]
    ),
)
def test_layers_of_many_kinds_and_parts_of_them_equal_the_decoder(monkeypatch, num_devices, has_peers, cuts):
    """What one layer leaves to the next one, fused or not, is the same wherever the model is cut. With peers, layers
    that are not fused leave partial sums to those that are.
    """
    family = replace(smollm3.FAMILY, layers=mixed_layers)
    fields = FIELDS | {"head_dim": 16, "num_hidden_layers": 9, "use_sliding_window": True, "sliding_window": 3}
    config = family.config(fields)
    params, mesh = make_params(family, config), None
    batch, cache = make_batch([5, 1, 12, 8, 0]), make_cache(random_pools(9))
    if num_devices is not None:
        mesh = make_mesh(num_devices)
        params, (batch, cache) = split(params, family, config, mesh), placed(batch, cache, mesh)

    def run(batch, cuts):
        jax.clear_caches()  # what kernels take is no argument

        @jax.jit
        def forward(params, batch, cache):
            x = family.embed(params, config, batch)
            for start, stop in itertools.pairwise([0, *cuts, 9]):
                x, cache = family.run(params, config, x, batch, cache, range(start, stop))
            return x, cache

        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return jax.device_get(forward(params, batch, cache))

    want = run(batch, [])
    chosen = []

    def choose_and_tell(*args):
        chosen.extend(choose(*args))
        return chosen[-len(args[0]) :]

    monkeypatch.setattr(decoder, "choose", choose_and_tell)
    monkeypatch.setattr(paths, "why_not_fused", lambda layer, *_: layer.layer.why_not_fused)
    monkeypatch.setattr(layer_matmuls, "why_not", lambda *_: None)
    monkeypatch.setattr(layer_matmuls, "why_not_attention", lambda *_, **__: None)
    if has_peers:
        monkeypatch.setattr(all_reduce, "why_not", lambda *_: None)  # which has no kernel for float32
        batch = batch.replace(peers=allocate_peer_buffers(abstract_sums(mesh, 64)))
    got = run(batch, cuts)
    fused = [path.kind != Kind.UNFUSED for path in chosen]
    assert fused == [True, True, False, True, True, False, False, True, True]
    assert {path.kind for path in chosen} == (
        {Kind.LAYER, Kind.BETWEEN, Kind.UNFUSED} if mesh is None else {Kind.MATMULS, Kind.UNFUSED}
    )
    passes_on = [index for index, path in enumerate(chosen) if path.passes_on_qkv]
    assert passes_on == [index for index in (0, 3) if index + 1 not in cuts]
    results = zip(jax.tree.leaves((got[0][:4], got[1])), jax.tree.leaves((want[0][:4], want[1])), strict=True)
    for a, b in results:  # without those of padding, which mean nothing
        np.testing.assert_allclose(a, b, atol=2e-5)


def step_of(num_rows=16, dtype=jnp.bfloat16, hidden_size=128, **changes):
    """Return the rows of a step, and its context."""
    x = jax.ShapeDtypeStruct((num_rows, hidden_size), dtype)
    return x, StepContext(**{"kernels": "sm90", "is_decode_only": True} | changes)


def bfloat16(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


@pytest.mark.parametrize(
    ("change", "step", "reason"),
    [
        (None, {"num_rows": 1}, None),
        (None, {"num_rows": 64}, None),
        (None, {"is_decode_only": False}, None),
        (attending(qkv_bias=True), {}, None),
        (attending(head_norm=HEAD_NORM), {}, None),
        (attending(rope=None, sliding_window=8, soft_cap=5.0, has_sinks=True), {}, None),
        (None, {"num_rows": 65}, "qkv: at most 64 rows, got 65"),
        (None, {"kernels": "xla"}, "running on plain XLA"),
        (None, {"dtype": jnp.dtype(jnp.float32)}, "needs bfloat16, got float32"),
        (None, {"dtype": jnp.dtype(jnp.float16)}, "needs bfloat16, got float16"),
        (feeding(activation="relu"), {}, "no matmul has the activation relu"),
        (feeding(has_bias=True), {}, "the feed-forward has biases"),
        (feeding(is_gated=False), {}, "the feed-forward has no gate"),
        (attending(out_bias=True), {}, "the attention has an output bias"),
        (layered(norms=SANDWICH_NORMS), {}, "the layer has norms after blocks"),
        (layered(norm=Norm(eps=1e-5, kind="layer")), {}, "the layer has layer norms"),
        (layered(arrangement=Arrangement.PARALLEL), {}, "the layer has parallel blocks"),
        (layered(update_scale=0.5), {}, "the layer has scaled updates"),
        ("int4", {}, "qkv: it is stored as int4 in groups of 128"),
    ],
)
def test_which_layers_have_fused_matmuls_and_why_others_have_not(change, step, reason):
    """A layer is chosen for itself: those beside it stay fused."""
    family, config, params = make_model("llama", hidden_size=128)
    layers, [value, *_] = bfloat16(params["layers"]), family.layers(config)
    if change == "int4":
        scheme = SCHEMES[change]
        values = np.asarray(layers[1]["attention"]["qkv"].values, np.float32)
        parts = scheme.quantize(values.reshape(-1, 128))
        parts = Parts(*(part if part is None else part.reshape(*values.shape[:3], -1) for part in parts))
        layers[1]["attention"]["qkv"] = Quantized(jax.tree.map(jnp.asarray, parts), scheme, jnp.dtype(jnp.bfloat16))
    shapes = shapes_of(value, layers)
    if callable(change):
        shapes[1] = replace(shapes[1], layer=change(value))
    first, found, last = choose(shapes, *step_of(**step))
    if reason is None:
        assert found.kind != Kind.UNFUSED
        assert (first.passes_on_qkv, found.passes_on_qkv, last.passes_on_qkv) == (True, True, False)
    else:
        assert found.kind == Kind.UNFUSED
        assert reason in found.reason
        assert not first.passes_on_qkv
        assert {first.kind == Kind.UNFUSED, last.kind == Kind.UNFUSED} == {bool(step)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arrangement": Arrangement.NORMED_SUMS, "update_scale": 0.5}, "normalised sums: updates are not scaled"),
        ({"arrangement": Arrangement.NORMED_INPUTS, "update_scale": 2.0}, "normalised inputs: updates are not scaled"),
        ({"arrangement": Arrangement.NORMED_SUMS, "norms": SANDWICH_NORMS}, "normalised sums: norms must be among"),
        ({"arrangement": Arrangement.NORMED_INPUTS, "norms": ONE_NORM}, "normalised inputs: norms must be among"),
        ({"arrangement": Arrangement.PARALLEL, "norms": SANDWICH_NORMS}, "parallel blocks: norms must be among"),
        ({"arrangement": Arrangement.PARALLEL, "norms": ("mlp_norm",)}, "parallel blocks: norms must be among"),
        ({"norms": ("final_norm",)}, "one block after the other: norms must be among"),
    ],
)
def test_a_layer_has_nothing_that_its_arrangement_leaves_out(changes, reason):
    family, config, _ = make_model("llama")
    with pytest.raises(ValueError, match=reason):
        replace(family.layers(config)[0], **changes)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (None, {}, None),
        (None, {"num_rows": 16}, None),
        (None, {"num_devices": 1}, None),
        (attending(qkv_bias=True), {}, None),
        (None, {"num_rows": 17}, "at most 16 rows, got 17"),
        (None, {"num_devices": 2}, "devices have heads of their own"),
        (None, {"is_decode_only": False}, "several tokens"),
        (attending(sliding_window=8), {}, "a window of 8"),
        (None, {"cache": PagedLatent(None)}, "keys and values are not in pages"),
        (attending(head_norm=HEAD_NORM), {}, "the attention has norms of heads"),
        (attending(soft_cap=5.0, has_sinks=True), {}, "the attention has sinks, capped scores"),
        (attending(rope=Rope(head_dim=32, theta=1e4)), {}, "whole heads of 64 or 128, got 64 of which 32 are turned"),
        (attending(rope=None), {}, "there is no rotary embedding"),
    ],
)
def test_which_layers_are_one_kernel(change, options, reason):
    family, config, params = make_model("llama", hidden_size=128, head_dim=64)
    layers, [value, *_] = bfloat16(params["layers"]), family.layers(config)
    pages = jnp.zeros((NUM_BLOCKS, 2, 8, 64), jnp.bfloat16)
    if (num_devices := options.get("num_devices")) is not None:
        spec = PartitionSpec(None, "tensor" if num_devices > 1 else None)
        pages = jax.device_put(pages, NamedSharding(make_mesh(num_devices), spec))
    cache = options.get("cache", PagedKV(pages, pages))
    shapes = shapes_of(value if change is None else change(value), layers, cache=cache)
    step = {name: options[name] for name in ("num_rows", "is_decode_only") if name in options}
    for path in choose(shapes, *step_of(**step)):
        assert (path.kind == Kind.LAYER) == (reason is None)
        assert path.kind in (Kind.LAYER, Kind.BETWEEN)
        assert path.reason is None if reason is None else reason in path.reason


@pytest.mark.parametrize(
    ("num_devices", "hidden_size", "takes"),
    [(1, 128, True), (2, 128, True), (4, 128, False), (1, 192, True), (2, 192, True)],
)
def test_which_shards_it_takes(num_devices, hidden_size, takes):
    """Four devices have 32 inputs each of the attention's last matmul, which are too few."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    family, config, params = make_model("llama", **sizes)
    mesh = make_mesh(num_devices)
    params = split(bfloat16(params), family, config, mesh)
    peers = abstract_sums(mesh, hidden_size)
    assert (peers is None) == (num_devices == 1)
    shapes = shapes_of(family.layers(config)[0], params["layers"])
    for given in (peers, None):
        found = choose(shapes, *step_of(hidden_size=hidden_size, peers=given))
        assert all((path.kind != Kind.UNFUSED) == takes for path in found)
        assert takes or found[0].reason is not None


@pytest.mark.parametrize("name", quick_first(sorted(FUSED_ACTIVATIONS)))
def test_the_kernels_compute_the_activations(name):
    x = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16)
    run = functools.partial(small_matmul.matmul, activation=ACTIVATIONS[name], implementation="sm90")
    assert compile_for_h200(run, x, weight).spill_bytes == 0
