"""Hidden states for a drafter: the residual stream entering some layers, as EAGLE-3's drafters read it."""

import functools

import jax
import numpy as np
import pytest
from depths import quick_first
from golden_models import GOLDENS, load_golden
from paged import empty_cache, make_batch, paged_logits

from jaxserve.layers.context import PLAIN
from jaxserve.layers.embedding import gathered

SEQUENCE = [5, 9, 17, 3, 11, 2]
# Plain layers, norms behind blocks, attention to latents, experts.
NAMES = ("gemma2_biases_no_caps", "mixtral_tied", "deepseek_v2_greedy", "gpt2_scales")
PATHS = quick_first([GOLDENS[0].with_name(name) for name in NAMES])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def tapped(family, config, taps, params, batch, cache):
    """Return the logits, the residual stream entering each layer of `taps`, and the cache."""
    states, first = [], 0
    x = family.embed(params, config, batch)
    for last in (*taps, config.num_layers):
        if last > first:
            x, cache = family.run(params, config, x, batch, cache, range(first, last))
        if last < config.num_layers:
            states.append(x)
        first = last
    return gathered(family.head(params, config, x, PLAIN)), states, cache


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_taps_change_nothing_and_depend_on_earlier_layers_only(path):
    params, config, family, _, mesh = load_golden(path)
    batch, _ = make_batch([(SEQUENCE, (1, 0), 0, 6)], num_tokens=8, num_rows=2, num_blocks=3)
    taps = tuple(sorted({0, config.num_layers // 2, config.num_layers - 1}))
    with jax.set_mesh(mesh):
        expected, _ = paged_logits(params, config, family, batch, empty_cache(family.kv_specs(config), 3, mesh))
        logits, states, _ = tapped(family, config, taps, params, batch, empty_cache(family.kv_specs(config), 3, mesh))
        embedded = family.embed(params, config, batch)
    np.testing.assert_allclose(np.asarray(logits)[:6], np.asarray(expected)[:6], rtol=1e-5, atol=2e-5)
    assert len(states) == len(taps)
    np.testing.assert_allclose(np.asarray(states[0]), np.asarray(embedded), rtol=1e-6, atol=1e-6)
    assert {state.shape[0] for state in states} == {8}
    changed = params | {"layers": [*params["layers"][:-1], jax.tree.map(lambda leaf: 2 * leaf, params["layers"][-1])]}
    with jax.set_mesh(mesh):
        _, again, _ = tapped(family, config, taps, changed, batch, empty_cache(family.kv_specs(config), 3, mesh))
    for state, same in zip(states, again, strict=True):
        np.testing.assert_array_equal(np.asarray(state), np.asarray(same))
