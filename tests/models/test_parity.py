"""The logits of every family equal those of transformers (`make goldens SEED=n`), without and with paged KV."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from naive import naive_greedy, naive_logits
from paged import chunked_logits

from jaxserve.layers.params import init_params
from jaxserve.loading.huggingface import load_config, load_params
from jaxserve.models import FAMILIES, get_family

GOLDENS = sorted(path.parent for path in (pathlib.Path(__file__).parents[1] / "goldens").glob("*/golden.npz"))
PADDED = 64
"""One length for the naive forwards of a golden, so that they compile once; causal attention does not see padding."""
TOLERANCE = 2e-5
"""Of the largest logit, in float32 (the engine promises 1e-4; transformers is matched to about 2e-6)."""


@pytest.fixture(scope="module", params=GOLDENS, ids=lambda path: path.name)
def golden(request):
    """(params, config, family, arrays of golden.npz) of one golden, on one device."""
    fields = load_config(request.param)
    family = get_family(fields)
    config = family.Config.from_hf(fields)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    params = load_params(
        request.param, family.param_specs(config), dtype=np.dtype(jnp.float32), mesh=mesh, progress=False
    )
    return params, config, family, np.load(request.param / "golden.npz"), mesh


def assert_close(logits, expected):
    assert logits.shape == expected.shape
    error, scale = np.abs(logits - expected).max(), np.abs(expected).max()
    assert scale > 1.0
    assert error <= TOLERANCE * scale, f"{error / scale:.1e} of the largest logit"


def test_every_family_has_goldens():
    assert {load_config(path)["model_type"] for path in GOLDENS} == set(FAMILIES)


def test_full_forward(golden):
    params, config, family, expected, mesh = golden
    length = len(expected["token_ids"])
    with jax.set_mesh(mesh):
        logits = naive_logits(params, config, family, jnp.asarray(np.pad(expected["token_ids"], (0, PADDED - length))))
    assert_close(np.asarray(logits)[:length], expected["logits"])


def test_chunked_prefill_and_decode_over_pages(golden):
    params, config, family, expected, mesh = golden
    length = len(expected["token_ids"])
    prompt_then_decode = [9, 8, 7, *[1] * (length - 24)]
    decode_then_prompt = [2, *[1] * 11, 3, length - 16]
    results = chunked_logits(
        params, config, family, expected["token_ids"], [prompt_then_decode, decode_then_prompt], mesh=mesh
    )
    for logits in results:
        assert_close(logits, expected["logits"])


def test_greedy_continuation(golden):
    params, config, family, expected, mesh = golden
    prompt = expected["token_ids"][: int(expected["prompt_length"])]
    with jax.set_mesh(mesh):
        continuation = naive_greedy(params, config, family, prompt, len(expected["greedy"]), padded_length=PADDED)
    assert continuation == expected["greedy"].tolist()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_random_weights(model_type):
    fields = next(fields for fields in map(load_config, GOLDENS) if fields["model_type"] == model_type)
    family = get_family(fields)
    config = family.Config.from_hf(fields)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    params = init_params(family.param_specs(config), dtype=np.dtype(jnp.float32), mesh=mesh)
    with jax.set_mesh(mesh):
        logits = np.asarray(naive_logits(params, config, family, jnp.arange(PADDED, dtype=jnp.int32)))
    assert np.isfinite(logits).all()
    assert (logits.std(axis=-1) > 0).all()
