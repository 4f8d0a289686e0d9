"""What families read from a config.json, in the styles of transformers 4 and 5, and how they complain."""

import pytest
from golden_models import GOLDENS

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import KVSpec
from jaxserve.layers.rope import LinearScaling, Llama3Scaling, LongRopeScaling, Rope
from jaxserve.loading.huggingface import load_config
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
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read(model_type, **changes):
    fields = FIELDS | {"model_type": model_type} | changes
    return get_family(fields).Config.from_hf(fields)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_llama_and_qwen_read_the_same_fields(model_type):
    config = read(model_type, tie_word_embeddings=True)
    assert (config.vocab_size, config.num_layers, config.max_position_embeddings) == (100, 3, 128)
    assert config.tie_word_embeddings
    assert hash(config) == hash(read(model_type, tie_word_embeddings=True))
    specs = FAMILIES[model_type].kv_specs(config)
    assert [(spec.num_kv_heads, spec.head_dim) for spec in specs] == [(4, 12)] * 3


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.name)
def test_senseless_fields_are_named_or_not_read(path):
    fields = load_config(path)
    family = get_family(fields)
    config = family.Config.from_hf(fields)
    assert hash(config) == hash(family.Config.from_hf(fields))
    complaints = {}
    for name, value in fields.items():
        senseless = -1 if isinstance(value, int | float) and not isinstance(value, bool) else "senseless"
        try:
            assert family.Config.from_hf(fields | {name: senseless}) == config, f"{name} is not checked"
        except CheckpointError as error:
            complaints[name] = str(error)
    assert {"vocab_size", "tie_word_embeddings"} < complaints.keys()
    assert [name for name, complaint in complaints.items() if name not in complaint] == []


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.name)
def test_sizes_have_no_defaults(path):
    fields = load_config(path)
    family = get_family(fields)
    for name in SIZES & fields.keys():
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            family.Config.from_hf({key: value for key, value in fields.items() if key != name})


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
    with pytest.raises(CheckpointError, match=f"unknown model_type 'gpt1'; known are {', '.join(FAMILIES)}"):
        get_family({"model_type": "gpt1"})
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


def test_windows_of_gemma():
    assert windows("gemma") == [None] * 3
    assert windows("gemma2", sliding_window=16) == [16, None, 16]
    assert windows("gemma3_text", sliding_window=16) == [16] * 3
    assert windows("gemma3_text", sliding_window=16, sliding_window_pattern=3) == [16, 16, None]
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    for model_type in ("gemma2", "gemma3_text"):
        assert windows(model_type, sliding_window=16, layer_types=kinds) == [None, None, 16]


@pytest.mark.parametrize(
    "ropes",
    [
        {"rope_theta": 3e5, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            }
        },
    ],
)
def test_ropes_of_gemma3_in_both_styles(ropes):
    config = read("gemma3_text", **ropes)
    assert config.rope == Rope(head_dim=12, theta=3e5, scaling=LinearScaling(factor=8.0))
    assert config.local_rope == Rope(head_dim=12, theta=2e3)
    config = read("gemma3_text")
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)


def test_gemma_of_the_first_releases():
    assert read("gemma", hidden_act="gelu").activation == "gelu_pytorch_tanh"


LONGROPE = {"type": "su", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2, 4]}


def test_longrope_as_phi3_writes_it():
    config = read(
        "phi3",
        partial_rotary_factor=0.5,
        rope_scaling=LONGROPE,
        original_max_position_embeddings=16,
        max_position_embeddings=256,
    )
    attention_factor = 2**0.5  # sqrt(1 + log 16 / log 16)
    assert config.rope == Rope(
        head_dim=6,
        theta=10000.0,
        scaling=LongRopeScaling(factors=(1.0, 1.1, 1.2), attention_factor=attention_factor),
    )
    assert config.long_rope.scaling == LongRopeScaling(factors=(1.0, 2.0, 4.0), attention_factor=attention_factor)
    assert config.original_max_position_embeddings == 16


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 16}, "short_factor must be .* 6 num"),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear'; known are default, longrope",
        ),
        ("glm4", {"partial_rotary_factor": 0.3}, "must be even for rotary embedding, got 12 times .* 0.3"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("gemma3_text", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a positive number"),
    ],
)
def test_what_one_family_cannot_serve_is_refused(model_type, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read(model_type, **changes)
