"""The logits of every family equal those of transformers (`make goldens SEED=n`), without and with paged KV."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_only
from golden_models import (
    CASES,
    GOLDENS,
    ONE_OF_EACH_DECODER,
    PADDED,
    full_logits,
    golden_error,
    load_golden,
    paged_chunk_logits,
)
from naive import greedy_choices, naive_logits

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
GREEDY = quick_only(GOLDENS, *ONE_OF_EACH_DECODER)
"""All goldens. Of families with the same layers, one is quick."""


@pytest.fixture(scope="module", params=CASES, ids=lambda path: path.name)
def golden(request):
    return load_golden(request.param)


def assert_close(logits, golden):
    assert len(logits) == len(golden[3]["token_ids"])
    assert np.abs(golden[3]["logits"]).max() > 1.0
    assert golden_error(logits, golden) <= TOLERANCE


def test_every_family_has_goldens():
    assert {load_config(path)["model_type"] for path in GOLDENS} == set(FAMILIES) == MODEL_TYPES


def test_full_forward(golden):
    assert_close(full_logits(golden), golden)


@pytest.mark.parametrize("golden", OVER_PAGES, indirect=True, ids=lambda path: path.name)
def test_chunked_prefill_and_decode_over_pages(golden):
    for logits in paged_chunk_logits(golden):
        assert_close(logits, golden)


@pytest.mark.parametrize("golden", GREEDY, indirect=True, ids=lambda path: path.name)
def test_greedy_continuation(golden):
    params, config, family, expected, mesh = golden
    prompt = expected["token_ids"][: int(expected["prompt_length"])]
    with jax.set_mesh(mesh):
        chosen = greedy_choices(params, config, family, prompt, expected["greedy"], padded_length=PADDED)
    assert chosen == expected["greedy"].tolist()


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
        logits = np.asarray(naive_logits(params, config, family, jnp.arange(PADDED, dtype=jnp.int32)))
    assert np.isfinite(logits).all()
    assert (logits.std(axis=-1) > 0).all()
