"""The logits of every family equal those of transformers (`make goldens SEED=n`), without and with paged KV."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_only
from golden_models import (
    GOLDENS,
    ONE_OF_EACH,
    ONE_OF_EACH_DECODER,
    continued,
    full_logits,
    golden_error,
    load_golden,
    paged_chunk_logits,
)
from golden_weights import PROMPT_LENGTH
from naive import naive_logits

from jaxserve.layers.layouts import layouts, put
from jaxserve.loading.huggingface import load_config
from jaxserve.loading.model_types import MODEL_TYPES
from jaxserve.models import FAMILIES, get_family

TOLERANCE = 2e-5
"""Largest error in float32, relative to the largest logit: the engine promises 1e-4, and has about 2e-6."""

OVER_PAGES = quick_only(
    GOLDENS,
    *(GOLDENS[0].with_name(name) for name in ("deepseek_v3_groups", "gemma2_caps", "gpt_oss_clamped", "llama_untied")),
)
"""All goldens. Quick are grouped heads, windows with caps, sinks and experts, latents; one pass is of each family."""


@pytest.fixture(scope="module", params=ONE_OF_EACH, ids=lambda path: path.name)
def golden(request):
    return load_golden(request.param)


def assert_close(logits, golden):
    assert len(logits) == len(golden[3]["token_ids"])
    assert np.abs(golden[3]["logits"]).max() > 1.0
    assert golden_error(logits, golden) <= TOLERANCE


def assert_greedy(logits, golden):
    """Check the tokens that follow the prompt, each of which sees the same ones before it as in transformers."""
    begin, expected = PROMPT_LENGTH - 1, golden[3]["greedy"]
    assert np.asarray(logits)[begin : begin + len(expected)].argmax(axis=-1).tolist() == expected.tolist()


def test_every_family_has_goldens():
    assert {load_config(path)["model_type"] for path in GOLDENS} == set(FAMILIES) == MODEL_TYPES


def test_full_forward(golden):
    assert_close(full_logits(golden), golden)


@pytest.mark.parametrize("golden", ONE_OF_EACH_DECODER, indirect=True, ids=lambda path: path.name)
def test_greedy_continuation(golden):
    params, config, family, _, mesh = golden
    with jax.set_mesh(mesh):
        assert_greedy(naive_logits(params, config, family, jnp.asarray(continued(golden))), golden)


@pytest.mark.parametrize("golden", OVER_PAGES, indirect=True, ids=lambda path: path.name)
def test_chunked_prefill_and_decode_over_pages(golden):
    for logits in paged_chunk_logits(golden):
        assert_close(logits, golden)
    for logits in paged_chunk_logits(golden, continued(golden)):
        assert_greedy(logits, golden)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bloom", "deepseek_v3", "gpt_oss"])
def test_random_weights(model_type):
    """Dummy weights give numbers that are finite and differ.

    `init_params` would compile a program for each shape of these odd sizes; its own test is in tests/layers.
    """
    fields = next(fields for fields in map(load_config, GOLDENS) if fields["model_type"] == model_type)
    family = get_family(fields)
    config = family.config(fields)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    rng = np.random.default_rng(0)

    def draw(spec, layout):
        values = 1.0 if spec.init_scale is None else spec.init_scale * rng.standard_normal(spec.shape)
        return put(spec, layout, np.broadcast_to(values, spec.shape).astype(np.float32))

    specs = family.param_specs(config)
    params = jax.tree.map(draw, specs, layouts(specs, mesh))
    with jax.set_mesh(mesh):
        logits = np.asarray(naive_logits(params, config, family, jnp.arange(64, dtype=jnp.int32)))
    assert np.isfinite(logits).all()
    assert (logits.std(axis=-1) > 0).all()
