"""What a request gets besides greedy tokens: draws that depend only on its seed, log probabilities, the NaN guard."""

import numpy as np
import pytest
from depths import quick_first
from engine_harness import MAX_MODEL_LEN, Model, request, run

from jaxserve.sampling_params import SamplingParams
from jaxserve.speculation import parse_speculation


@pytest.fixture(scope="module")
def model():
    return Model("llama_tied_llama3_rope")


def prompt_of(model, length, seed):
    return np.random.default_rng(seed).integers(0, model.vocab_size, length).tolist()


def neighbours(model, count, params, seed):
    return [request(f"n{i}", prompt_of(model, 5 + i, seed + i), 15 + i, params, seed=i) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    quick_first(
        [
            SamplingParams(temperature=1.3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=0.7, top_k=7, top_p=0.9, min_p=0.02),
            SamplingParams(temperature=1.0, logit_bias={3: 5.0}, allowed_token_ids=list(range(60)), min_tokens=4),
        ]
    ),
)
def test_same_seed_same_text_in_any_company(model, params):
    """Alone, among others, in chunks and after preemptions; another seed gives another text."""
    prompt = prompt_of(model, 21, 1)

    def text(seed, company=(), **limits):
        engine = model.engine(**limits)
        return run(engine, [*company, request("it", prompt, 24, params, seed=seed)])["it"].token_ids, engine.stats()

    alone, _ = text(5)
    assert len(alone) == 24
    assert text(5)[0] == alone
    assert text(5, overlap=False)[0] == alone
    assert text(5, neighbours(model, 7, SamplingParams(temperature=0.9), 40))[0] == alone
    assert text(5, neighbours(model, 3, params, 50), max_num_batched_tokens=5)[0] == alone
    crowded, stats = text(5, neighbours(model, 7, params, 60), num_blocks=26)
    assert stats.num_preemptions > 0
    assert crowded == alone
    assert text(6)[0] != alone
    assert text(-5)[0] != alone
    if params.allowed_token_ids:
        assert set(alone) <= set(params.allowed_token_ids)


@pytest.mark.parametrize("wants_all", [False, True])
def test_logprobs_are_those_of_the_model(model, wants_all):
    """Sampled tokens and the top, their ranks included, whatever the temperature and the penalties."""
    num_top = model.vocab_size if wants_all else 5
    params = SamplingParams(temperature=0.8, logprobs=num_top, repetition_penalty=1.3, top_n_sigma=2.0)
    prompt = prompt_of(model, 19, 2)
    company = neighbours(model, 4, SamplingParams(temperature=0.0), 70)
    result = run(model.engine(), [*company, request("it", prompt, 12, params, seed=9)])["it"]
    expected = model.naive_logprobs(prompt + result.token_ids)[len(prompt) - 1 : -1]
    assert len(result.logprobs) == 12
    for entry, token, row in zip(result.logprobs, result.token_ids, expected, strict=True):
        assert_entry(entry, token, row, num_top)


@pytest.mark.parametrize("limits", [{}, {"overlap": False}, {"num_blocks": 26}])
def test_logprobs_of_named_tokens(model, limits):
    """With any temperature and penalty, next to requests that name other tokens or none, through preemptions."""
    named = {"it": [3, 50, 3, 0], "other": [7], "all": list(range(min(128, model.vocab_size)))}
    prompts = {name: prompt_of(model, 19 + index, 2 + index) for index, name in enumerate(named)}
    engine = model.engine(**limits)
    company = neighbours(model, 4, SamplingParams(temperature=0.0, logprobs=2), 70)
    requests = [
        request(
            name,
            prompts[name],
            12,
            SamplingParams(temperature=0.8, repetition_penalty=1.3, logprob_token_ids=token_ids),
            seed=9,
        )
        for name, token_ids in named.items()
    ]
    results = run(engine, [*company, *requests])
    for name, token_ids in named.items():
        result = results[name]
        expected = model.naive_logprobs(prompts[name] + result.token_ids)[len(prompts[name]) - 1 : -1]
        assert len(result.logprobs) == 12
        for entry, token, row in zip(result.logprobs, result.token_ids, expected, strict=True):
            assert_entry(entry, token, row, 0)
            order = np.argsort(-row, kind="stable").tolist()
            assert [each for each, _, _ in entry.asked] == token_ids
            assert [logprob for _, logprob, _ in entry.asked] == pytest.approx(row[token_ids].tolist(), abs=2e-4)
            for token_id, _, rank in entry.asked:  # tokens whose logprobs differ by rounding may change places
                assert row[order[rank - 1]] == pytest.approx(row[token_id], abs=2e-4)
    assert all(not entry.asked for entry in results[company[0].request_id].logprobs)
    assert engine.stats().num_recompiles_after_warmup == 0
    if "num_blocks" in limits:
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 6}, {"num_blocks": 26}])
def test_prompt_logprobs(model, limits):
    """Each position once, in order: in chunks, after cached prefixes, through preemptions."""
    engine = model.engine(**limits)
    prompt = prompt_of(model, 45, 3)
    run(engine, [request("warm", prompt, 2)])
    params = SamplingParams(temperature=0.0, prompt_logprobs=3)
    results = run(engine, [*neighbours(model, 4, params, 80), request("it", prompt, 25, params)])
    expected = model.naive_logprobs(prompt)[:-1]
    entries = results["it"].prompt_logprobs
    assert len(entries) == len(prompt) - 1
    for entry, token, row in zip(entries, prompt[1:], expected, strict=True):
        assert_entry(entry, token, row, 3)
    assert results["it"].token_ids == model.naive(prompt, 25)
    if "num_blocks" in limits:
        assert engine.stats().num_preemptions > 0


def assert_entry(entry, token, row, num_top):
    order = np.argsort(-row, kind="stable")
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(row[token], abs=2e-4)
    assert entry.rank == order.tolist().index(token) + 1
    assert entry.top_ids == order[:num_top].tolist()
    assert entry.top_logprobs == pytest.approx(row[order[:num_top]].tolist(), abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1}])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_corrupted_request_fails_alone(overlap, drafts):
    """A token whose embedding is NaN fails its request; its blocks, with NaN in them, are then used by others
    unharmed.
    """
    if drafts is not None:
        drafts = drafts | {"num_speculative_tokens_per_batch_size": [[1, 8, 7]]}
    model = Model("llama_untied", corrupt_token=5, speculation=parse_speculation(drafts))
    healthy = [token for token in range(model.vocab_size) if token != 5]
    random = np.random.default_rng(4)
    good = {f"g{i}": random.choice(healthy, 6 + 5 * i).tolist() for i in range(5)}
    bad = [*random.choice(healthy, 20).tolist(), 5, *random.choice(healthy, 5).tolist()]
    engine = model.engine(overlap=overlap, num_blocks=26, max_num_batched_tokens=16)
    for _ in range(3):
        requests = [request(name, prompt, 12) for name, prompt in good.items()]
        results = run(engine, [request("bad", bad, 12), *requests])
        assert results["bad"].finish_reason == "error"
        assert "not a number" in results["bad"].error
        for name, prompt in good.items():
            assert results[name].finish_reason == "length"
            assert results[name].token_ids == run(engine, [request(name, prompt, 12)])[name].token_ids
    assert engine.stats().num_corrupted_requests == 3
    assert results["bad"].num_cached_tokens == 0  # nothing of a failed request stays in the prefix cache
    clean = Model("llama_untied")
    for name, prompt in good.items():
        if 5 not in results[name].token_ids:
            assert results[name].token_ids == clean.naive(prompt, 12)


def test_context_of_one_token_and_of_all(model):
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=0)
    results = run(
        model.engine(), [request("one", [7], 1, params), request("all", [7] * (MAX_MODEL_LEN - 1), 1, params)]
    )
    assert results["one"].prompt_logprobs == []
    assert len(results["all"].prompt_logprobs) == MAX_MODEL_LEN - 2
    assert all(len(result.token_ids) == 1 for result in results.values())
