"""The second half of the layers on a mesh of its own: the stages of a model run where their weights are."""

import functools

import jax
import numpy as np
import pytest
from depths import quick_only
from golden_models import GOLDENS, load_golden
from paged import empty_cache, make_batch, paged_logits

from jaxserve.layers.context import PLAIN
from jaxserve.layers.embedding import gathered

SEQUENCE = [5, 9, 17, 3, 11, 2]
NAMES = ("llama_untied", "gemma2_caps", "deepseek_v2_groups")


def only(span, entries):
    return [entry if index in span else None for index, entry in enumerate(entries)]


def on_mesh(tree, mesh):
    whole = jax.NamedSharding(mesh, jax.P())
    return jax.device_put(tree, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_only(NAMES, "llama_untied"))
def test_logits_are_those_of_one_mesh(name):
    params, config, family, _, mesh = load_golden(next(path for path in GOLDENS if path.name == name))
    batch, _ = make_batch([(SEQUENCE, (1, 0), 0, 6)], num_tokens=8, num_rows=2, num_blocks=3)
    with jax.set_mesh(mesh):
        expected, _ = paged_logits(params, config, family, batch, empty_cache(family.kv_specs(config), 3, mesh))
    cut = config.num_layers // 2
    spans = range(cut), range(cut, config.num_layers)
    meshes = [jax.make_mesh((1,), ("tensor",), devices=[device]) for device in jax.devices()[:2]]

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def begin(span, family, params, batch, cache):
        return family.run(params, config, family.embed(params, config, batch), batch, cache, span)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def finish(span, family, params, x, batch, cache):
        hidden, cache = family.run(params, config, x, batch, cache, span)
        return gathered(family.head(params, config, hidden, PLAIN)), cache

    parts, caches = [], []
    for span, own in zip(spans, meshes, strict=True):
        parts.append(on_mesh(params | {"layers": only(span, params["layers"])}, own))
        caches.append(empty_cache(family.kv_specs(config), 3, own))
    with jax.set_mesh(meshes[0]):
        x, _ = begin(spans[0], family, parts[0], on_mesh(batch, meshes[0]), caches[0])
    assert x.devices() == set(meshes[0].devices.flat)
    with jax.set_mesh(meshes[1]):
        x, batch = on_mesh((x, batch), meshes[1])
        got, after = finish(spans[1], family, parts[1], x, batch, caches[1])
    assert got.devices() == set(meshes[1].devices.flat)
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(after.pools[-1]))
    np.testing.assert_allclose(np.asarray(got)[:6], np.asarray(expected)[:6], atol=2e-5)
