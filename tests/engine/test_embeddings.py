"""Embeddings from the engine equal the hidden states of a plain forward pass, however the prompt is cut up."""

import functools

import numpy as np
import pytest
from engine_harness import MAX_MODEL_LEN, Model, Result, drain, request
from naive import naive_hidden

from jaxserve.engine.embedding import finish_embedding
from jaxserve.errors import ContextLengthExceeded
from jaxserve.execution.programs.spec import ON_GPU
from jaxserve.loading.sentence_transformers import Embedder

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
POOLED = {
    "last": lambda hidden: hidden[-1],
    "mean": lambda hidden: hidden.mean(axis=0),
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.max(axis=0),
    "weightedmean": lambda hidden: np.average(hidden, axis=0, weights=np.arange(1, len(hidden) + 1)),
    "mean_sqrt_len": lambda hidden: hidden.sum(axis=0) / len(hidden) ** 0.5,
}
"""The definitions of sentence-transformers."""


@pytest.fixture(scope="module")
def model():
    return Model("llama_tied_llama3_rope", num_blocks=60, traits=ON_GPU)


@functools.cache
def expected(model, prompt, pooling):
    padded = np.zeros(MAX_MODEL_LEN, np.int32)
    padded[: len(prompt)] = prompt
    hidden = np.asarray(naive_hidden(model.params, model.config, model.family, padded), np.float64)[: len(prompt)]
    return POOLED[pooling](hidden)


class Embedding:
    """What one pooling request has returned so far."""

    def __init__(self):
        self.vector, self.num_cached_tokens = None, None

    def add(self, output):
        assert self.vector is None, "output after the last"
        assert output.new_token_ids == []
        assert output.finish_reason == "stop"
        self.vector = np.frombuffer(output.embedding, "<f4")
        self.num_cached_tokens = output.num_cached_tokens


def pooling_request(name, prompt, pooling):
    return request(name, prompt, 1, pooling=pooling)


def prompts(model, lengths, seed=0):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, model.vocab_size, length).tolist()) for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("overlap", [False, True])
def test_in_chunks_and_in_company(model, pooling, overlap):
    """Prompts longer than a step's budget, up to the whole context, in parallel with each other and with
    generations.
    """
    engine = model.engine(overlap=overlap)
    texts = prompts(model, [1, 5, 33, 64, MAX_MODEL_LEN])
    others = prompts(model, [7, 20], seed=1)
    results = {f"e{i}": Embedding() for i in range(len(texts))}
    results |= {f"g{i}": Result() for i in range(len(others))}
    engine.add([request(f"g{i}", prompt, 12) for i, prompt in enumerate(others)])
    engine.add([pooling_request(f"e{i}", prompt, pooling) for i, prompt in enumerate(texts)])
    drain(engine, results)
    for i, prompt in enumerate(texts):
        np.testing.assert_allclose(results[f"e{i}"].vector, expected(model, prompt, pooling), **TOLERANCE)
    for i, prompt in enumerate(others):
        assert results[f"g{i}"].token_ids == model.naive(prompt, 12)


def test_all_kinds_in_one_step(model):
    engine = model.engine()
    (prompt,) = prompts(model, [9])
    results = drain(engine, _added(engine, {pooling: (prompt, pooling) for pooling in POOLED}))
    for pooling in POOLED:
        np.testing.assert_allclose(results[pooling].vector, expected(model, prompt, pooling), **TOLERANCE)


@pytest.mark.parametrize("pooling", POOLED)
def test_prompts_of_one_token(model, pooling):
    """Their steps look like those of decoding."""
    engine = model.engine()
    texts = prompts(model, [1, 1, 1])
    results = drain(engine, _added(engine, {str(i): (prompt, pooling) for i, prompt in enumerate(texts)}))
    for i, prompt in enumerate(texts):
        np.testing.assert_allclose(results[str(i)].vector, expected(model, prompt, pooling), **TOLERANCE)


def test_only_the_last_token_may_come_after_a_cached_prefix(model):
    engine = model.engine()
    (prompt,) = prompts(model, [40])
    for pooling, cached in (("last", [0, 36]), ("mean", [0, 0]), ("cls", [0, 0]), ("max", [0, 0])):
        engine.scheduler.reset_prefix_cache()
        for num_cached in cached:
            results = drain(engine, _added(engine, {"a": (prompt, pooling)}))
            assert results["a"].num_cached_tokens == num_cached
            np.testing.assert_allclose(results["a"].vector, expected(model, prompt, pooling), **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_pooling_starts_over_after_a_preemption(model, pooling):
    """A pool that is too small for two: in the middle of its prompt it gives way to a request of better priority."""
    engine = model.engine(num_blocks=26, max_num_batched_tokens=16, policy="priority")
    long, other = prompts(model, [80, 50])
    engine.add([request("e", long, 1, pooling=pooling, priority=1)])
    engine.step()
    engine.step()
    engine.add([request("g", other, 40)])
    results = drain(engine, {"g": Result(), "e": Embedding()})
    assert engine.stats().num_preemptions == 1
    np.testing.assert_allclose(results["e"].vector, expected(model, long, pooling), **TOLERANCE)


def test_the_static_scheduler(model):
    engine = model.engine(kind="static")
    texts = prompts(model, [3, 17])
    results = drain(engine, _added(engine, {"a": (texts[0], "mean"), "b": (texts[1], "last")}))
    np.testing.assert_allclose(results["a"].vector, expected(model, texts[0], "mean"), **TOLERANCE)
    np.testing.assert_allclose(results["b"].vector, expected(model, texts[1], "last"), **TOLERANCE)


def test_a_prompt_beyond_the_context(model):
    engine = model.engine()
    (prompt,) = prompts(model, [MAX_MODEL_LEN + 1])
    with pytest.raises(ContextLengthExceeded):
        engine.add([pooling_request("a", prompt, "last")])


def test_vectors_for_callers():
    pooled = np.array([3.0, 4.0, 12.0], "<f4").tobytes()
    embedder = Embedder(size=3)
    assert finish_embedding(pooled, embedder, normalize=False).tolist() == [3, 4, 12]
    np.testing.assert_allclose(finish_embedding(pooled, embedder), [3 / 13, 4 / 13, 12 / 13], rtol=1e-6)
    np.testing.assert_allclose(finish_embedding(pooled, embedder, dimensions=2), [0.6, 0.8], rtol=1e-6)
    assert finish_embedding(np.zeros(2, "<f4").tobytes(), embedder).tolist() == [0, 0]
    assert finish_embedding(np.full(2, 3e38, "<f4").tobytes(), embedder).tolist() == pytest.approx([0.5**0.5] * 2)


def _added(engine, requests):
    engine.add([pooling_request(name, *fields) for name, fields in requests.items()])
    return {name: Embedding() for name in requests}
