"""Scaled rotary embeddings equal transformers' (`make goldens SEED=n`), and so does the context that they serve."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.layers.rope import frequencies, rotations
from jaxserve.models import hf_config, llama, max_context, with_context

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
    rope = hf_config.rope(expected["fields"])
    if expected["length"] is not None:
        rope = rope.serving(expected["length"])
    np.testing.assert_allclose(frequencies(rope), expected["frequencies"], rtol=1e-5)
    cos, sin = rotations(rope, jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(cos**2 + sin**2, expected["attention_factor"] ** 2, rtol=1e-5)
    if name.startswith("yarn") and expected["score_factor"] is not None:
        np.testing.assert_allclose(rope.scaling.score_factor, expected["score_factor"], rtol=1e-12)


def test_dynamic_rope_stretches_only_for_a_context_beyond_the_original():
    plain = llama.Config.from_hf(FIELDS)
    config = llama.Config.from_hf(FIELDS | {"rope_parameters": DYNAMIC})
    assert max_context(config) == 2048
    for context in (7, 512):
        served = with_context(config, context)
        assert served.max_position_embeddings == context
        np.testing.assert_array_equal(frequencies(served.rope), frequencies(plain.rope))
    stretch = frequencies(plain.rope) / frequencies(with_context(config, 513).rope)
    assert stretch[0] == 1.0
    assert (stretch[1:] > 1.0).all()


def test_longrope_takes_long_factors_only_for_a_context_beyond_the_original():
    plain = llama.Config.from_hf(FIELDS)
    config = llama.Config.from_hf(FIELDS | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}})
    assert max_context(config) == 512
    for context, factors in ((64, "short_factor"), (65, "long_factor"), (512, "long_factor")):
        stretch = frequencies(plain.rope) / frequencies(with_context(config, context).rope)
        np.testing.assert_allclose(stretch, LONGROPE[factors], rtol=1e-6)


def test_yarn_serves_its_factor_times_the_original_context():
    config = llama.Config.from_hf(FIELDS | {"rope_parameters": YARN})
    assert max_context(config) == 2048
    assert with_context(config, 2048).rope == config.rope
    config = llama.Config.from_hf(FIELDS | {"rope_parameters": YARN, "max_position_embeddings": 4096})
    assert max_context(config) == 4096
    assert max_context(llama.Config.from_hf(FIELDS)) == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
        llama.Config.from_hf(FIELDS | changes)
