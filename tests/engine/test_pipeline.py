"""Stages on devices of their own: texts are those of one device, and as many plans are in flight as stages."""

import itertools

import jax
import numpy as np
import pytest
from engine_harness import GREEDY, Model, Result, assert_naive, drain, prompts, request, run
from meshes import make_mesh
from tiny_model import ascii_tokenizer

from jaxserve.errors import ConfigError
from jaxserve.sampling_params import SamplingParams, StructuredOutputs
from jaxserve.structured.grammar import make_grammar
from jaxserve.structured.matchers import Matchers

NAME = "llama_tied_llama3_rope"  # the embedding is needed by both stages


@pytest.fixture(scope="module")
def one_device():
    return Model(NAME)


@pytest.fixture(scope="module")
def model():
    return Model(NAME, mesh=make_mesh(pipe=2))


def test_each_stage_holds_its_layers_on_its_device(model, one_device):
    first, last = model.runner.states
    num_layers = model.config.num_layers
    for index, (state, device) in enumerate(zip((first, last), jax.devices(), strict=False)):
        assert {each for leaf in jax.tree.leaves(state) for each in leaf.devices()} == {device}
        has_layer = [layer is not None for layer in state["params"]["layers"]]
        assert has_layer == [(layer >= num_layers / 2) == bool(index) for layer in range(num_layers)]
        assert [pool is not None for pool in state["kv_cache"].pools] == has_layer
    assert "embed" in last["params"], "which is the head too"
    assert model.runner.bytes_per_block == one_device.runner.bytes_per_block


def test_as_many_plans_are_in_flight_as_stages(model, one_device):
    """Chunks of prompts, and rows that continue from tokens that the host has not seen."""
    asked = {f"r{i}": (prompt, 3 + 2 * i) for i, prompt in enumerate(prompts(model, [1, 2, 5, 16, 33, 40, 8]))}
    engine, flights = model.engine(), []
    engine.on_plan = lambda plan: flights.append((len(engine._in_flight), plan))
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    assert_naive(one_device, results, asked)
    assert max(count for count, _ in flights) == 3, "the third one waits for the first, which is then read"
    rows = [{row.request for row in plan.rows} for _, plan in flights]
    alone = next(index for index in range(len(rows)) if len(set().union(*rows[index:])) == 1)
    for (_, plan), (num_in_flight, following) in itertools.pairwise(flights[: alone + 1]):
        drawn = {row.request for row in plan.rows if row.samples and num_in_flight > 1}
        assert drawn.isdisjoint(row.request for row in following.rows)
    assert max(count for count, _ in flights[alone:]) == 3, "the last request leaves no stage to others"


def test_preemption_and_cached_prefixes(model, one_device):
    engine = model.engine(num_blocks=20)
    asked = {f"r{i}": (prompt, 28) for i, prompt in enumerate(prompts(model, [1, 6, 9, 32], seed=17))}
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    assert engine.stats().num_preemptions > 0
    asked["again"] = (asked["r3"][0] + [1, 2, 3], 5)
    results |= run(engine, [request("again", *asked["again"])])
    assert results["again"].num_cached_tokens == 32
    assert_naive(one_device, results, asked)


def test_a_grammar_follows_a_request_with_several_rows_in_flight(model, one_device):
    matchers = Matchers(ascii_tokenizer, vocab_size=one_device.vocab_size)
    asked = [request("r", [5, 6, 7], 9, grammar=make_grammar(StructuredOutputs(regex="(ab|cd){2,9}-[0-9]{3}")))]
    results = [run(each.engine(matchers=matchers), asked)["r"] for each in (model, one_device)]
    matchers.close()
    assert results[0].error is None
    assert results[0].token_ids == results[1].token_ids


def test_slots_of_aborted_requests_are_used_again_while_their_rows_are_in_flight(model, one_device):
    first, second = prompts(model, [7] * 8, seed=3), prompts(model, [9] * 8, seed=4)
    engine = model.engine()
    engine.add([request(f"a{i}", prompt, 60) for i, prompt in enumerate(first)])
    results = {f"a{i}": Result() for i in range(8)}
    for _ in range(9):
        for output in engine.step():
            results[output.request_id].add(output)
    assert len(engine._in_flight) == 2
    engine.abort([f"a{i}" for i in range(0, 8, 2)])
    asked = {f"b{i}": (prompt, 6) for i, prompt in enumerate(second)}
    engine.add([request(name, *job) for name, job in asked.items()])
    results |= {name: Result() for name in asked}
    drain(engine, results)
    assert_naive(one_device, results, asked | {f"a{i}": (first[i], 60) for i in range(1, 8, 2)})


def test_what_the_last_stage_does_besides(model, one_device):
    """Penalties, log probabilities of tokens and prompts, embeddings, and stop tokens that come while rows wait."""
    [prompt] = prompts(model, [21], seed=5)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=3, prompt_logprobs=2)
    stop = one_device.naive(prompt, 4)[-1]

    def answers(model):
        engine, vectors = model.engine(), []
        asked = [
            request("ranked", prompt, 6, params),
            request("stopped", prompt, 20, GREEDY, stop_token_ids=frozenset({stop})),
            request("vector", prompt, 1, pooling="mean"),
        ]
        engine.add(asked)
        results = {each.request_id: Result() for each in asked}
        while engine.has_work:
            for output in engine.step():
                results[output.request_id].add(output)
                if output.embedding:
                    vectors.append(np.frombuffer(output.embedding, "<f4"))
        return results, vectors

    (got, [vector]), (expected, [of_one]) = answers(model), answers(one_device)
    for name, mine in got.items():
        assert (mine.token_ids, mine.finish_reason) == (expected[name].token_ids, expected[name].finish_reason)
    for kind in ("logprobs", "prompt_logprobs"):
        pairs = zip(getattr(got["ranked"], kind), getattr(expected["ranked"], kind), strict=True)
        assert all(abs(one.logprob - other.logprob) < 1e-5 for one, other in pairs)
    np.testing.assert_allclose(vector, of_one, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("deepseek_v3_groups", {"pipe": 2, "tensor": 2}),
        ("gemma2_caps", {"pipe": 2}),
        ("gemma4_experts", {"pipe": 2}),
        ("qwen3_next_tied", {"pipe": 2}),
    ],
)
def test_other_families(name, axes):
    """Experts and latents, windows, and states by slot."""
    one_device, model = Model(name), Model(name, mesh=make_mesh(**axes), num_kept_states=8)
    asked = {f"r{i}": (prompt, 12) for i, prompt in enumerate(prompts(model, [1, 6, 21, 40], seed=14))}
    engine = model.engine(num_blocks=60)
    results = run(engine, [request(name, *job) for name, job in asked.items()])
    asked["again"] = (asked["r3"][0] + [1, 2, 3], 5)
    results |= run(engine, [request("again", *asked["again"])])
    assert results["again"].num_cached_tokens > 0
    assert_naive(one_device, results, asked)


def test_layers_that_read_what_other_stages_have_are_refused():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: layers of this model read .* tensor_parallel_size"):
        Model("gemma4_shared", mesh=make_mesh(pipe=2))
