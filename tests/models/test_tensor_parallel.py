"""A model sharded over devices computes what it computes on one, with the expected collectives and no others."""

import collections
import re

import jax
import numpy as np
import pytest
from depths import quick_first, quick_only
from golden_models import relative_error
from meshes import FIELDS, SEQUENCE, fields_of, logits_on, logprobs_on, make_mesh, random_model
from paged import BLOCK_SIZE, empty_cache, make_batch, paged_logits

from jaxserve.errors import ConfigError
from jaxserve.inspect import find_collectives
from jaxserve.layers.layouts import layouts
from jaxserve.models import FAMILIES, get_family

GPT_FIELDS = {"n_embd": 64, "n_inner": 72, "n_layer": 1, "n_head": 8, "n_positions": 64, "rotary_dim": 4}
OPT_FIELDS = {"ffn_dim": 72, "word_embed_proj_dim": 20}

SPLIT = ["llama", "bloom", "qwen3", "olmo2", "cohere", "gpt_neox", "phi", "deepseek_v2", "qwen2_moe", "qwen3_next"]
SPLIT += ["gemma3n_text", "falcon_h1", "lfm2", "mamba2", "nemotron_h", "kimi_linear"]


@pytest.fixture(scope="module", params=quick_only(SPLIT, "llama"))
def expected(request):
    return request.param, logits_on(request.param, make_mesh(tensor=1))


def test_split_model_equals_one_device(expected):
    model_type, on_one_device = expected
    assert np.abs(on_one_device).max() > 1.0
    np.testing.assert_allclose(logits_on(model_type, make_mesh(tensor=4)), on_one_device, rtol=1e-4, atol=1e-5)


WITH_EXPERTS = [
    ("qwen2_moe", {"expert": 2, "tensor": 2}),
    ("gpt_oss", {"expert": 2}),
    ("deepseek_v3", {"expert": 2, "tensor": 4}),
    ("llama4_text", {"expert": 2, "tensor": 2}),
    ("gemma4_text", {"expert": 2, "tensor": 2}),
    ("qwen3_next", {"data": 1, "tensor": 2}),  # an axis of one device
]


@pytest.mark.parametrize(("model_type", "axes"), quick_first(WITH_EXPERTS))
def test_experts_split_over_devices_equal_one_device(model_type, axes):
    """A few cells of the table that `make meshes` prints."""
    on_one_device = logits_on(model_type, make_mesh(tensor=1))
    # One of its tokens moves by 1e-5 in any split, the others by 2e-6: roundings of embeddings alone move it by 3e-6.
    bound = 2e-5 if model_type == "gemma4_text" else 2e-6
    assert relative_error(logits_on(model_type, make_mesh(**axes)), on_one_device) < bound


OF_TOKENS = [
    ("gpt_oss", {"data": 2, "tensor": 2}),
    ("qwen2_moe", {"data": 3, "expert": 2}),
    ("llama", {"data": 5}),
    ("bloom", {"data": 4}),
    ("deepseek_v2", {"data": 2, "tensor": 2}),
    ("gemma4_text", {"data": 2, "tensor": 2}),
    ("gemma3n_text", {"data": 2, "tensor": 2}),
    ("llama4_text", {"data": 2}),
]


@pytest.mark.parametrize(("model_type", "axes"), quick_first(OF_TOKENS))
def test_tokens_split_over_devices_equal_one_device(model_type, axes):
    """Steps have 12 tokens, 3 or 2 of which are padding; 5 devices have up to 3 each, and all of the heads."""
    on_many = logits_on(model_type, make_mesh(**axes))
    np.testing.assert_allclose(on_many, logits_on(model_type, make_mesh(tensor=1)), rtol=1e-4, atol=1e-5)


STAGES = [("qwen2_moe", {"pipe": 2, "expert": 2}), ("llama", {"pipe": 2}), ("deepseek_v2", {"pipe": 2, "tensor": 2})]


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "axes"), STAGES)
def test_stages_equal_one_device(model_type, axes):
    """More cells of it."""
    on_many, on_one = (logprobs_on(model_type, make_mesh(**each)) for each in (axes, {"tensor": 1}))
    np.testing.assert_allclose(on_many, on_one, rtol=1e-4, atol=1e-5)


HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_kv_heads": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "devices", "size", "by_expert"),
    [
        ("gpt_oss", 2, 180, True),
        ("gpt_oss", 2, 128, False),
        ("qwen3_moe", 8, 96, True),
        ("qwen2_moe", 4, 100, True),
    ],
)
def test_experts_whose_shards_no_kernel_takes_stay_whole(model_type, devices, size, by_expert):
    fields = HEADS | {"intermediate_size": size, "moe_intermediate_size": size, "num_experts": 8, "mlp_only_layers": []}
    mesh = make_mesh(tensor=devices)
    params, *_ = random_model(model_type, mesh, **fields)
    for weight in jax.tree.leaves(params["layers"][0]["mlp"]["experts"]):
        assert (weight.sharding.spec[0] == "tensor") == by_expert
        if by_expert:
            assert weight.addressable_shards[0].data.shape == (8 // devices, *weight.shape[1:])
    on_one_device = logits_on(model_type, make_mesh(tensor=1), **fields)
    np.testing.assert_allclose(logits_on(model_type, mesh, **fields), on_one_device, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_falcon_of_grouped_heads_equals_one_device(devices):
    """Falcon 40B and 180B have 8 KV heads and a norm for each block."""
    on_one_device = logits_on("falcon", make_mesh(tensor=1), **HEADS)
    on_many = logits_on("falcon", make_mesh(tensor=devices), **HEADS)
    np.testing.assert_allclose(on_many, on_one_device, rtol=1e-4, atol=1e-5)


# What the heads of a family have in addition: biases, one gain for all heads, one for each, one norm over all, sinks.
REPEATED = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "cohere": {"num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 2, "qk_layernorm": True},
    "olmo2": {"num_key_value_heads": 2},
    "gpt_oss": {"num_key_value_heads": 1, "num_local_experts": 6},
    "qwen3_moe": {"num_key_value_heads": 2, "moe_intermediate_size": 24},
    "qwen3_next": {"num_key_value_heads": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
    "gemma": {"num_key_value_heads": 1},
    "gemma3n_text": {"num_key_value_heads": 2},
    "gemma4_text": {"num_key_value_heads": 2, "moe_intermediate_size": 24},
    "llama4_text": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1},
    "gemma2": {"num_key_value_heads": 2, "num_hidden_layers": 2, "sliding_window": 5, "query_pre_attn_scalar": 12},
    "starcoder2": {"num_key_value_heads": 1},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": True, "bias": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REPEATED)
def test_more_devices_than_kv_heads_equal_one_device(model_type):
    """Several devices have each head, each with other queries of its group: two, or one on eight devices."""
    changes = REPEATED[model_type]
    on_one_device = logits_on(model_type, make_mesh(tensor=1), **changes)
    assert on_one_device.std(axis=1).min() > 0.1, "logits hardly depend on what is attended to"
    for devices in (4, 8) if model_type in ("llama", "gpt_oss", "qwen3_next") else (4,):
        on_many = logits_on(model_type, make_mesh(tensor=devices), **changes)
        np.testing.assert_allclose(on_many, on_one_device, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_two_all_reduces_a_layer_and_no_cache_moves(num_kv_heads):
    mesh = make_mesh(tensor=4)
    params, config, family = random_model("llama", mesh, num_key_value_heads=num_kv_heads)
    with jax.set_mesh(mesh):
        cache = empty_cache(family.kv_specs(config), 4, mesh)
        batch, _ = make_batch([(SEQUENCE, range(4), 0, 14)], num_tokens=16, num_rows=2, num_blocks=4)
        compiled = paged_logits.lower(params, config, family, batch, cache).compile()
    names = re.findall(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", compiled.as_text())
    # One for the embedding, two per layer; the logits are gathered from the devices' parts of the vocabulary.
    assert collections.Counter(names) == {"all-reduce": 1 + 2 * config.num_layers, "all-gather": 1}
    pool = cache.pools[0].k
    assert pool.addressable_shards[0].data.shape == (4, 1, BLOCK_SIZE, 12)


def test_what_devices_with_tokens_of_their_own_send():
    mesh = make_mesh(data=2)
    params, config, family = random_model("qwen2_moe", mesh)
    with jax.set_mesh(mesh):
        cache = empty_cache(family.kv_specs(config), 4, mesh)
        batch, _ = make_batch([(SEQUENCE, range(4), 0, 9)], num_tokens=9, num_rows=2, num_blocks=4)
        compiled = paged_logits.lower(params, config, family, batch, cache).compile()
    found = {(each.kind, each.place): each.num_bytes for each in find_collectives(compiled.as_text())}
    # Five tokens a device, the last one of which is padding; the logits of the router are gathered, too.
    of_token = 4 * config.hidden_size
    assert found["all-gather", "dispatch"] in (10 * of_token, 10 * 4 * 6)
    assert found["reduce-scatter", "combine"] == 5 * of_token
    assert found.keys() == {
        *[("all-reduce", "embed"), ("all-to-all", "attention"), ("all-gather", "dispatch")],
        *[("reduce-scatter", "combine"), ("all-gather", "residual_stream"), ("all-gather", "lm_head")],
    }
    assert cache.pools[0].k.addressable_shards[0].data.shape == (4, 2, BLOCK_SIZE, 12)
    assert params["layers"][0]["mlp"]["experts"]["down"].on_one_device().shape[0] == 3


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_matrix_of_a_layer_is_split(model_type):
    fields = fields_of(model_type) | GPT_FIELDS | OPT_FIELDS
    family = get_family(fields)
    specs = family.param_specs(family.config(fields))
    layer = layouts(specs, make_mesh(tensor=4))["layers"][0]
    splits = jax.tree.map(
        lambda spec, weight: all(
            spec.quantize <= ("tensor" in layout.sharding.spec) for layout in jax.tree.leaves(weight)
        ),
        specs["layers"][0],
        layer,
    )
    assert all(jax.tree.leaves(splits)), splits


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "use_qk_norm": False},
            r"q_proj\.weight: kv_heads of size 3 can be neither split nor repeated .* 4 devices .*tensor_parallel_size",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            r"o_proj\.weight: heads of size 6 .* 4 devices .*6 query heads, use 1, 2, 3 or 6",
        ),
        ({"intermediate_size": 70}, "ffn of size 70 .* 4 devices"),
        (
            # Falcon 7B
            {"model_type": "falcon", "new_decoder_architecture": False, "num_attention_heads": 71, "hidden_size": 284},
            r"self_attention\.dense\.weight: heads of size 71 .* 4 devices .*tensor_parallel_size",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(changes, numbers):
    fields = FIELDS | {"model_type": "llama"} | changes
    family = get_family(fields)
    specs = family.param_specs(family.config(fields))
    with pytest.raises(ConfigError, match=numbers):
        layouts(specs, make_mesh(tensor=4))
