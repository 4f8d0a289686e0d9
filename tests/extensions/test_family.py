"""A family and a kind of cache that no room knows: layers in which a token meets the one before it alone."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_harness import Model, request, run
from naive import naive_greedy

from jaxserve.layers.linear import linear, residual_update
from jaxserve.layers.params import ParamSpec
from jaxserve.loading.model_types import MODEL_TYPES
from jaxserve.models import FAMILIES, llama
from jaxserve.models.family import Family

SIZE = 16
FIELDS = {
    "model_type": "neighbours",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


class Last(NamedTuple):
    """What each slot's last token has left, donated."""

    values: Any

    def before(self, values, batch):
        """Return what the token before each one has left, zeros before a text's first, and the updated cache."""
        first, last = batch.query_starts[:-1], batch.query_starts[1:] - 1
        begins = batch.seq_lens == jnp.diff(batch.query_starts)
        kept = self.values.at[batch.slots].get(mode="fill", fill_value=0)
        before = jnp.roll(values, 1, axis=0).at[first].set(jnp.where(begins[:, None], 0, kept), mode="drop")
        return before, Last(self.values.at[batch.slots].set(values[last], mode="drop"))


@dataclasses.dataclass(frozen=True)
class LastSpec:
    sliding_window = None
    keeps_state = True

    def abstract(self, sizes, *, dtype, mesh):
        sharding = jax.NamedSharding(mesh, jax.P())
        return Last(jax.ShapeDtypeStruct((sizes.num_slots, SIZE), dtype, sharding=sharding))

    def describe(self):
        return f"{SIZE} values of the last token"


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """The block: what a token and the one before it leave, projected forth and back."""

    is_naive: bool = False
    rope = None
    cache_spec = LastSpec()
    why_not_fused = "tokens meet their neighbours"

    def specs(self, prefix, hidden_size, names):
        del names
        shapes = {"in": (SIZE, hidden_size), "out": (hidden_size, SIZE)}
        return {
            name: ParamSpec(shape=shape, axes=(None, None), num_inputs=1, source=(f"{prefix}.{name}",))
            for name, shape in shapes.items()
        }

    def reader(self, params):
        return params["in"]

    def run(self, params, x, step, *, consumer):
        values = linear(x, params["in"])
        if self.is_naive:  # all tokens of one text are there
            before, cache = jnp.roll(values, 1, axis=0).at[0].set(0), step.cache
        else:
            before, cache = step.cache.before(values, step.batch)
        mixed = jax.nn.silu(values + before)
        return residual_update(mixed, params, "out", step.batch.context, consumer), cache


def family(*, is_naive):
    def layers(config):
        return (dataclasses.replace(config.layer, mixer=Neighbours(is_naive)),) * config.num_layers

    return Family(llama.Config, llama.DEFAULTS, layers=layers, doc=__doc__)


@pytest.mark.slow
def test_a_family_with_a_cache_of_its_own_is_served(monkeypatch):
    """In batches, in chunks, and in slots that others have left."""
    monkeypatch.setitem(FAMILIES, "neighbours", family(is_naive=False))
    monkeypatch.setattr("jaxserve.loading.model_types.MODEL_TYPES", {*MODEL_TYPES, "neighbours"})
    model = Model(None, changes=FIELDS)
    random = np.random.default_rng(0)
    asked = {
        f"r{index}": (random.integers(0, FIELDS["vocab_size"], length).tolist(), 9 + index)
        for index, length in enumerate((1, 6, 21, 40, 9))
    }
    engine = model.engine(max_num_batched_tokens=8, max_num_seqs=2)
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    for name, (prompt, max_tokens) in asked.items():
        naive = naive_greedy(model.params, model.config, family(is_naive=True), prompt, max_tokens, padded_length=96)
        assert (results[name].finish_reason, results[name].token_ids) == ("length", naive), name
