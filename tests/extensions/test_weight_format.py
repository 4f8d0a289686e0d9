"""A format of weights that no room knows: every matrix is a sum of two narrow arrays, and every family runs on it."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from golden_models import GOLDENS, load_golden
from paged import empty_cache, make_batch, paged_logits

from jaxserve.layers.weight import Dense, Weight

SEQUENCE = [5, 9, 17, 3, 11, 2]
# Plain layers, norms behind blocks, attention to latents, experts.
NAMES = ("gemma2_biases_no_caps", "mixtral_tied", "deepseek_v2_greedy", "gpt2_scales")
PATHS = quick_first([GOLDENS[0].with_name(name) for name in NAMES])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Halves(Weight):
    """A weight stored as its bfloat16 value and the bfloat16 value of what that leaves."""

    high: Any
    low: Any

    @classmethod
    def of(cls, values):
        high = values.astype(jnp.bfloat16)
        return cls(high, (values - high.astype(values.dtype)).astype(jnp.bfloat16))

    @property
    @override
    def shape(self):
        return self.high.shape

    @property
    @override
    def dtype(self):
        return jnp.dtype(jnp.float32)

    @property
    @override
    def sharding(self):
        return jax.typeof(self.high).sharding

    @override
    def array(self):
        return self.high.astype(jnp.float32) + self.low.astype(jnp.float32)

    @override
    def take(self, rows):
        return self.high[rows].astype(jnp.float32) + self.low[rows].astype(jnp.float32)

    @override
    def entry(self, index):
        return Halves(self.high[index], self.low[index])

    @property
    @override
    def stored_as(self):
        return "it is stored as halves"


def converted(params, convert):
    """The weights, each matrix replaced by what `convert` makes of its values, which bfloat16 does not hold."""
    return jax.tree.map(
        lambda weight: (
            convert(weight.values * (1 + 3 / 2**11)) if isinstance(weight, Dense) and weight.ndim > 1 else weight
        ),
        params,
        is_leaf=lambda node: isinstance(node, Weight),
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_logits_are_those_of_the_same_values_in_one_array(path):
    params, config, family, _, mesh = load_golden(path)
    batch, _ = make_batch([(SEQUENCE, (1, 0), 0, 6)], num_tokens=8, num_rows=2, num_blocks=3)

    def logits(convert):
        with jax.set_mesh(mesh):
            cache = empty_cache(family.kv_specs(config), 3, mesh)
            return np.asarray(paged_logits(converted(params, convert), config, family, batch, cache)[0])

    halves = logits(Halves.of)
    np.testing.assert_allclose(halves, logits(lambda values: Dense(Halves.of(values).array())), rtol=1e-5, atol=1e-5)
    high_only = logits(lambda values: Dense(values.astype(jnp.bfloat16).astype(values.dtype)))
    assert np.any(np.abs(halves - high_only) > 1e-4), "both halves count"
