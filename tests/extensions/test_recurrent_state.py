"""A cache kind with a recurrent state for each request, in layers alone and beside layers that attend.

The layer is a gated linear recurrence, h_t = d_t h_(t-1) + (1 - d_t) u_t; decay d and update u depend on the token.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_only
from engine_harness import Model, Result, drain, request, run
from naive import naive_greedy

from jaxserve.config import EngineConfig
from jaxserve.engine.startup import start_engine
from jaxserve.layers.linear import linear
from jaxserve.layers.params import ParamSpec
from jaxserve.loading.model_types import MODEL_TYPES
from jaxserve.models import FAMILIES, llama
from jaxserve.models.family import Family
from jaxserve.overview import needs

SIZE = 16


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """Declare one vector for each request."""

    size: int

    @property
    def sliding_window(self):
        return None

    @property
    def keeps_state(self):
        return True

    def abstract(self, sizes, *, dtype, mesh):
        whole = jax.NamedSharding(mesh, jax.P())
        return State(jax.ShapeDtypeStruct((sizes.num_slots, self.size), jnp.float32, sharding=whole))

    def describe(self):
        return f"a state of {self.size}"


class State(NamedTuple):
    """The state of each slot, donated."""

    values: Any

    def scan(self, decay, update, batch):
        """Return the state after each token, and the cache with those after each row's last one."""
        begins = batch.seq_lens == jnp.diff(batch.query_starts)
        before = self.values.at[batch.slots].get(mode="fill", fill_value=0)
        before = jnp.where(begins[:, None], 0, before)
        first, last = batch.query_starts[:-1], batch.query_starts[1:] - 1
        # A row's first token takes the state of its slot, and nothing of the row before it.
        carried = decay.at[first].get(mode="fill", fill_value=0) * before
        update, decay = update.at[first].add(carried, mode="drop"), decay.at[first].set(0, mode="drop")
        _, states = jax.lax.associative_scan(lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1]), (decay, update))
        return states, State(self.values.at[batch.slots].set(states[last], mode="drop"))


def naive_scan(cache, decay, update, batch):
    """Return the states of one whole sequence, token by token; nothing is kept."""

    def after(state, token):
        state = token[0] * state + token[1]
        return state, state

    return jax.lax.scan(after, jnp.zeros_like(update[0]), (decay, update))[1], cache


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """The block that takes the place of attention."""

    scan: Callable = State.scan
    rope: None = None
    why_not_fused: str = "the layer is recurrent"

    @property
    def cache_spec(self):
        return StateSpec(SIZE)

    def specs(self, prefix, hidden_size, names):
        del names
        shapes = {"decay": (SIZE, hidden_size), "update": (SIZE, hidden_size), "out": (hidden_size, SIZE)}
        return {
            name: ParamSpec(shape=shape, axes=(None, None), num_inputs=1, source=(f"{prefix}.{name}",))
            for name, shape in shapes.items()
        }

    def reader(self, params):
        del params

    def run(self, params, x, cache, batch, rotation, *, consumer):
        del rotation, consumer
        decay = jax.nn.sigmoid(linear(x, params["decay"]))
        states, cache = self.scan(cache, decay, (1 - decay) * linear(x, params["update"]), batch)
        return linear(states, params["out"]), cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    attends: tuple[bool, ...] = ()

    @classmethod
    def from_hf(cls, fields):
        attends = tuple(kind == "full_attention" for kind in fields["layer_types"])
        return dataclasses.replace(super().from_hf(fields), attends=attends)


def layers(config, *, scan=State.scan):
    recurrent = dataclasses.replace(config.layer, mixer=Recurrence(scan))
    return tuple(config.layer if attends else recurrent for attends in config.attends)


FAMILY = Family(Config=Config, layers=layers, doc=__doc__)
NAIVE = dataclasses.replace(FAMILY, layers=functools.partial(layers, scan=naive_scan))

FIELDS = {
    "model_type": "toy_recurrent",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LAYERS = {
    "beside attention": ["recurrent", "full_attention", "recurrent"],
    "alone": ["recurrent", "recurrent"],
}


def fields_of(kinds):
    return FIELDS | {"num_hidden_layers": len(kinds), "layer_types": kinds}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    FAMILIES["toy_recurrent"] = FAMILY
    MODEL_TYPES.add("toy_recurrent")
    yield
    MODEL_TYPES.remove("toy_recurrent")
    del FAMILIES["toy_recurrent"]


@pytest.fixture(scope="module", params=quick_only(LAYERS, "alone"))
def model(request):
    return Model(None, changes=fields_of(LAYERS[request.param]))


def jobs(seed, lengths):
    random = np.random.default_rng(seed)
    return {
        f"r{index}": (random.integers(0, FIELDS["vocab_size"], length).tolist(), 9 + index)
        for index, length in enumerate(lengths)
    }


def assert_naive(model, results, asked):
    for name, (prompt, max_tokens) in asked.items():
        expected = naive_greedy(model.params, model.config, NAIVE, prompt, max_tokens, padded_length=96)
        assert results[name].finish_reason == "length", (name, results[name].error)
        assert results[name].token_ids == expected, name
        assert results[name].num_cached_tokens == 0, name


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 2}], ids=["all at once", "two slots"])
def test_tokens_are_those_of_a_full_forward_pass(model, limits):
    """In batches, in chunks, and in slots that others have left."""
    engine = model.engine(max_num_batched_tokens=8, **limits)
    asked = jobs(1, [1, 6, 21, 40, 9, 30])
    assert_naive(model, run(engine, [request(name, *job) for name, job in asked.items()]), asked)


def test_a_preempted_request_begins_again(model):
    engine = model.engine(max_num_batched_tokens=8, max_num_seqs=2, policy="priority")
    asked = jobs(4, [9, 14, 11, 5])
    results = {name: Result() for name in asked}
    engine.add([request(name, *asked[name], priority=1) for name in ("r0", "r1")])
    while len(results["r0"].token_ids) < 3:
        for output in engine.step():
            results[output.request_id].add(output)
    engine.add([request(name, *asked[name], priority=0) for name in ("r2", "r3")])
    assert_naive(model, drain(engine, results), asked)
    assert engine.stats().num_preemptions == 2


def test_equal_prompts_and_siblings_begin_at_their_first_token(model):
    engine = model.engine(max_num_batched_tokens=8)
    [(prompt, _)] = jobs(2, [30]).values()
    for group in (None, "s0"):
        asked = {f"s{index}": (prompt, 5) for index in range(3)}
        ids = {} if group is None else {"group_id": group}
        assert_naive(model, run(engine, [request(name, *job, **ids) for name, job in asked.items()]), asked)


def test_a_request_that_ends_early_leaves_nothing_behind(model):
    engine = model.engine(max_num_batched_tokens=8, max_num_seqs=1)
    asked = jobs(3, [12, 12])
    engine.add([request("aborted", [5] * 20, 30)])
    for _ in range(6):
        engine.step()
    engine.abort(["aborted"])
    assert_naive(model, run(engine, [request(name, *job) for name, job in asked.items()]), asked)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", LAYERS.values(), ids=LAYERS)
def test_an_engine_starts(tmp_path, kinds):
    (tmp_path / "config.json").write_text(json.dumps(fields_of(kinds) | {"eos_token_id": 1}))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        warmup="none",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        block_size=4,
        kv_cache_memory=2**16,
    )
    engine, info = start_engine(config, mesh=None, progress=False)
    try:
        assert not info.enable_prefix_caching
        assert [kind.num_layers for kind in info.kv_kinds] == ([1] if "full_attention" in kinds else [])
        assert len(run(engine, [request("one", [3, 4, 5], 4)])["one"].token_ids) == 4
    finally:
        engine.runner.close()
    found = needs(str(tmp_path), memory=2**30)
    assert "2 with a state" in found.layers
    assert "a state of 16" in found.layers
    assert found.max_batch > 0
