"""Scaled rotary embeddings equal transformers' (`make goldens SEED=n`), and so does the context that they serve."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import GOLDENS

from jaxserve.errors import CheckpointError
from jaxserve.layers.rope import LinearScaling, frequencies, rotations
from jaxserve.loading.huggingface import load_config
from jaxserve.models import FAMILIES, gemma3, hf_rope, llama, max_context, with_context

ROPES = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "ropes.json").read_text())
FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 2, 3, 4], "long_factor": [1.0, 5, 6, 7]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_factors(name):
    expected = ROPES[name]
    rope = hf_rope.rope(expected["fields"])
    if expected["length"] is not None:
        rope = rope.serving(expected["length"])
    np.testing.assert_allclose(frequencies(rope), expected["frequencies"], rtol=1e-5)
    cos, sin = rotations(rope, jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(cos**2 + sin**2, expected["attention_factor"] ** 2, rtol=1e-5)
    if name.startswith("yarn") and expected["score_factor"] is not None:
        np.testing.assert_allclose(rope.scaling.score_factor, expected["score_factor"], rtol=1e-12)


def test_dynamic_rope_stretches_only_for_a_context_beyond_the_original():
    plain = llama.FAMILY.config(FIELDS)
    config = llama.FAMILY.config(FIELDS | {"rope_parameters": DYNAMIC})
    assert max_context(config) == 2048
    for context in (7, 512):
        served = with_context(config, context)
        assert served.max_position_embeddings == context
        np.testing.assert_array_equal(frequencies(served.rope), frequencies(plain.rope))
    stretch = frequencies(plain.rope) / frequencies(with_context(config, 513).rope)
    assert stretch[0] == 1.0
    assert (stretch[1:] > 1.0).all()


def test_longrope_takes_long_factors_only_for_a_context_beyond_the_original():
    plain = llama.FAMILY.config(FIELDS)
    config = llama.FAMILY.config(FIELDS | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}})
    assert max_context(config) == 512
    for context, factors in ((64, "short_factor"), (65, "long_factor"), (512, "long_factor")):
        stretch = frequencies(plain.rope) / frequencies(with_context(config, context).rope)
        np.testing.assert_allclose(stretch, LONGROPE[factors], rtol=1e-6)


def test_yarn_serves_its_factor_times_the_original_context():
    config = llama.FAMILY.config(FIELDS | {"rope_parameters": YARN})
    assert max_context(config) == 2048
    assert with_context(config, 2048).rope == config.rope
    config = llama.FAMILY.config(FIELDS | {"rope_parameters": YARN, "max_position_embeddings": 4096})
    assert max_context(config) == 4096
    assert max_context(llama.FAMILY.config(FIELDS)) == 512


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(("factor", "context"), [(4.0, 2048), (2, 1024), (1.5, 768), (1, 512), (65536, 2**24)])
def test_linear_scaling_serves_its_factor_times_the_context(style, factor, context):
    config = llama.FAMILY.config(FIELDS | {style: {"rope_type": "linear", "factor": factor}})
    assert (config.max_position_embeddings, max_context(config)) == (512, context)
    assert with_context(config, context).rope == config.rope


def test_what_counts_the_scaling_already_is_not_stretched_twice():
    """Gemma 3 4B: a factor of 8, and 131,072 positions with it."""
    linear = {"rope_type": "linear", "factor": 8.0}
    config = gemma3.FAMILY.config({"rope_scaling": linear})
    assert (config.rope.scaling.factor, max_context(config)) == (8.0, 131_072)


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 2048),
        ({"max_sequence_length": 2048}, 2048),
        ({"max_sequence_length": 1024}, 1024),
        ({"max_sequence_length": 1024, "max_position_embeddings": 512}, 512),
        ({"max_sequence_length": 1024, "max_position_embeddings": None}, 1024),
    ],
)
def test_the_context_of_llama_1(changes, context):
    fields = {name: value for name, value in FIELDS.items() if name != "max_position_embeddings"}
    assert llama.FAMILY.config(fields | changes).max_position_embeddings == context


def test_what_rope_scaling_says_counts_where_both_styles_are_there():
    both = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
    assert llama.FAMILY.config(FIELDS | both).rope.scaling == LinearScaling(factor=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({style: {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}}, r"\(full_attention\)")
            for style in ("rope_parameters", "rope_scaling")
        ],
        (
            {"rope_parameters": {kind: {"rope_theta": 5e5} for kind in ("full_attention", "sliding_attention")}},
            r"rope_parameters by layer type \(full_attention, sliding_attention\) are not supported",
        ),
        ({"rope_parameters": {"rope_type": "mrope"}}, "unknown rope_type 'mrope'"),
        ({"rope_scaling": {"type": "su"}}, "unknown rope_type 'su'"),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, "unknown in rope_parameters or rope_scaling: alpha"),
        ({"rope_scaling": YARN | {"attn_factor": 0.5}}, "attn_factor 0.5 is not supported, only 1"),
        ({"rope_scaling": YARN | {"extrapolation_factor": 2.0}}, "extrapolation_factor 2.0 is not supported"),
        ({"rope_scaling": LONGROPE | {"long_mscale": 1.2}}, "unknown in rope_parameters or rope_scaling: long_mscale"),
        ({"rope_theta": 1.0}, "rope_theta must be greater than 1, got 1"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4.5, "high_freq_factor": 4.0}},
            r"low_freq_factor \(4.5\) is above high_freq_factor \(4.0\)",
        ),
        ({"rope_parameters": YARN | {"beta_fast": 0.5}}, r"beta_fast \(0.5\) must be at least beta_slow \(1.0\)"),
        ({"rope_parameters": YARN | {"factor": -1}}, "factor must be a positive number, got -1"),
        ({"rope_parameters": YARN | {"mscale": "1"}}, "mscale must be a positive number, got '1'"),
        ({"rope_parameters": YARN | {"truncate": 1}}, "truncate must be true or false, got 1"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor is missing"),
        ({"rope_parameters": DYNAMIC, "head_dim": 2}, "'dynamic' needs more than 2 rotated dimensions"),
    ],
)
def test_what_cannot_be_scaled_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        llama.FAMILY.config(FIELDS | changes)


WITHOUT_ROPE = {"bloom", "gpt2", "gptj", "kimi_linear", "mamba2", "nemotron_h", "opt"}
ROPES_BY_TYPE = {"gemma3_text", "gemma3n_text", "gemma4_text", "laguna", "mellum", "mimo_v2_flash", "olmo3"}
ONE_OF_EACH = {fields["model_type"]: fields for fields in map(load_config, GOLDENS)}


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - WITHOUT_ROPE - ROPES_BY_TYPE))
def test_ropes_by_layer_type_are_refused_by_every_family_that_has_one(model_type):
    ropes = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    fields = ONE_OF_EACH[model_type] | {"rope_parameters": ropes, "rope_scaling": None}
    with pytest.raises(CheckpointError, match=r"rope_parameters (by layer type|\{.* is not supported)"):
        FAMILIES[model_type].config(fields)


def test_layer_types_that_no_gemma_has():
    ropes = {"full_attention": {"rope_theta": 5e5}, "chunked_attention": {"rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="must be an object of full_attention and sliding_attention"):
        gemma3.FAMILY.config({"rope_parameters": ropes})
