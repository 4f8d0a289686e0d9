"""What families read from a config.json, in the styles of transformers 4 and 5, and how they complain."""

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import KVSpec
from jaxserve.layers.rope import LinearScaling, Llama3Scaling, Rope
from jaxserve.models import FAMILIES, get_family

FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(model_type, **changes):
    fields = FIELDS | {"model_type": model_type} | changes
    return get_family(fields).Config.from_hf(fields)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_reads_the_common_fields(model_type):
    config = read(model_type, tie_word_embeddings=True)
    assert (config.vocab_size, config.num_layers, config.max_position_embeddings) == (100, 3, 128)
    assert config.tie_word_embeddings
    assert hash(config) == hash(read(model_type, tie_word_embeddings=True))
    specs = FAMILIES[model_type].kv_specs(config)
    assert [(spec.num_kv_heads, spec.head_dim) for spec in specs] == [(4, 12)] * 3


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"]
)
@pytest.mark.parametrize("value", [None, -1, "8"])
def test_missing_and_senseless_fields_are_named(model_type, name, value):
    with pytest.raises(CheckpointError, match=name):
        read(model_type, **{name: value})


def test_fields_that_old_checkpoints_lack():
    config = read("llama", head_dim=None, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads) == (8, 8)
    assert config.rope == Rope(head_dim=8, theta=10000.0)
    assert config.activation == "silu"


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_theta": 5e5}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
        ({"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None}, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, LinearScaling(factor=2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, Llama3Scaling(**LLAMA3)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3}, Llama3Scaling(**LLAMA3)),
    ],
)
def test_rope_of_both_styles(rope, scaling):
    assert read("llama", **rope).rope == Rope(head_dim=12, theta=5e5, scaling=scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'; known are default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"hidden_act": "gelu_fast"}, "hidden_act 'gelu_fast'; known are silu"),
        ({"num_key_value_heads": 3}, r"\(8\) is not a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, "head_dim must be even for rotary embedding, got 7"),
        ({"head_dim": None, "hidden_size": 60}, r"\(60\) is not a multiple of num_attention_heads \(8\)"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_what_cannot_be_served_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read("llama", **changes)


def test_unknown_family():
    with pytest.raises(CheckpointError, match="unknown model_type 'gpt2'; known are llama, mistral, qwen2, qwen3"):
        get_family({"model_type": "gpt2"})
    with pytest.raises(CheckpointError, match="unknown model_type None"):
        get_family({})


def windows(model_type, **changes):
    config = read(model_type, **changes)
    return [spec.sliding_window for spec in FAMILIES[model_type].kv_specs(config)]


def test_windows_of_mistral():
    assert windows("mistral") == [4096] * 3
    assert windows("mistral", sliding_window=16) == [16] * 3
    assert windows("mistral", sliding_window=None) == [None] * 3


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_of_qwen(model_type):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(model_type, sliding_window=16, max_window_layers=0) == [None] * 3
    used = {"use_sliding_window": True, "sliding_window": 16}
    assert windows(model_type, **used, max_window_layers=1) == [None, 16, 16]
    assert windows(model_type, **used, layer_types=kinds, max_window_layers=1) == [16, None, 16]
    assert windows(model_type, **(used | {"sliding_window": None}), layer_types=kinds) == [None] * 3
    with pytest.raises(CheckpointError, match=r"layer_types must name .* each of 3 layers"):
        windows(model_type, **used, layer_types=kinds[:2])
    with pytest.raises(CheckpointError, match="layer_types"):
        windows(model_type, **used, layer_types=[*kinds[:2], "chunked_attention"])


def test_llama_has_no_window():
    config = read("llama", sliding_window=16)
    assert FAMILIES["llama"].kv_specs(config) == (KVSpec(4, 12),) * 3


def test_qwen3_needs_its_head_dim():
    with pytest.raises(CheckpointError, match="head_dim is missing"):
        read("qwen3", head_dim=None)
