"""Phi 3 with LongRoPE: one list of factors within the original context, the other for models served beyond it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from golden_models import GOLDENS
from naive import naive_logits

from jaxserve.layers.params import init_params
from jaxserve.loading.huggingface import load_config
from jaxserve.models import phi3


def test_factors_follow_the_context_that_is_served():
    fields = next(load_config(path) for path in GOLDENS if path.name == "phi3_long_factors")
    config = phi3.Config.from_hf(fields)
    original = config.original_max_position_embeddings
    assert config.max_position_embeddings > original
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    params = init_params(phi3.param_specs(config), dtype=np.dtype(jnp.float32), mesh=mesh)
    token_ids = jnp.arange(original, dtype=jnp.int32)

    def logits(config):
        with jax.set_mesh(mesh):
            return np.asarray(naive_logits(params, config, phi3, token_ids))

    short = logits(dataclasses.replace(config, max_position_embeddings=original))
    np.testing.assert_array_equal(short, logits(dataclasses.replace(config, long_rope=config.rope)))
    assert np.abs(short - logits(config)).max() > 1e-4 * np.abs(short).max()
