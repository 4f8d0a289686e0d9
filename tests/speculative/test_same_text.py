"""With speculation the text is the same, token for token, whatever is accepted and whatever else the engine does."""

import numpy as np
import pytest
from depths import examples
from drafting import Told, tell
from engine_harness import MAX_MODEL_LEN, Model, Result, drain, request, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import ascii_tokenizer

from jaxserve import speculative
from jaxserve.engine.engine import Engine
from jaxserve.sampling_params import SamplingParams, StructuredOutputs
from jaxserve.speculation import parse_speculation
from jaxserve.structured.grammar import make_grammar
from jaxserve.structured.matchers import Matchers

NAME = "llama_tied_llama3_rope"
NUM_TEXTS = 12
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 6, 2], [7, 8, 0]],
}
STEMS = [[1 + i * k % 9 for i in range(30)] for k in (1, 2, 4)]


@pytest.fixture(scope="module")
def plain():
    return Model(NAME)


@pytest.fixture(scope="module")
def drafting():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(speculative.PROPOSERS, "ngram", lambda options: Told(options.num_drafts, NUM_TEXTS))
        return Model(NAME, speculation=parse_speculation(DRAFTS))


@pytest.fixture(scope="module")
def texts():
    """The results without speculation, by all that they depend on: each request alone would have them."""
    return {}


PARAMS = st.one_of(
    st.just({"temperature": 0.0}),
    st.builds(lambda seed, more: {"temperature": 1.0, "seed": seed} | more, st.integers(0, 99), st.sampled_from([
        {}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_n_sigma": 1.0}, {"logprobs": 2},
        {"frequency_penalty": 0.5}, {"logit_bias": {3: 4.0, 5: -9.0}}, {"min_tokens": 6},
        {"allowed_token_ids": list(range(3, 40))},
        {"logprob_token_ids": [4, 9]}, {"prompt_logprobs": 1}, {"speculative_decoding": False},
    ])),
)  # fmt: skip
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "stem": st.integers(0, 2),
            "length": st.integers(1, 30),
            "last": st.integers(0, 20),
            "max_tokens": st.integers(1, 40),
            "params": PARAMS,
            "stops": st.sampled_from([(), (), (3, 7), tuple(range(40))]),
            "bad_word": st.sampled_from([(), (), (), (1, 2)]),
            "num_siblings": st.sampled_from([1, 1, 2]),
            "pooling": st.sampled_from([None] * 7 + ["last", "mean"]),
        }
    ),
    min_size=1,
    max_size=6,
)


def make_requests(asked):
    requests = []
    for index, ask in enumerate(asked):
        prompt = [*STEMS[ask["stem"]][: ask["length"] - 1], ask["last"]]
        for sibling in range(ask["num_siblings"]):
            params = SamplingParams(**({"temperature": 0.0} if ask["pooling"] else ask["params"]))
            requests.append(
                request(
                    f"{index}.{sibling}",
                    prompt,
                    1 if ask["pooling"] else ask["max_tokens"],
                    params,
                    group_id=f"{index}.0",
                    stop_token_ids=frozenset(ask["stops"]),
                    bad_word_ids=(ask["bad_word"],) if ask["bad_word"] else (),
                    seed=(params.seed or 0) + sibling,
                    pooling=ask["pooling"],
                )
            )
    return requests[:NUM_TEXTS]


def key(one):
    return repr((one.prompt_token_ids, one.params, one.max_tokens, one.stop_token_ids, one.seed, one.bad_word_ids))


def assert_same(result, expected, *, is_aborted=False):
    count = len(result.token_ids)
    assert result.token_ids == (expected.token_ids[:count] if is_aborted else expected.token_ids)
    assert is_aborted or (result.finish_reason, result.stop_reason) == (expected.finish_reason, expected.stop_reason)
    for got, wanted in ((result.logprobs, expected.logprobs[:count]), (result.prompt_logprobs, None)):
        if wanted is not None:
            assert [entry.token_id for entry in got] == [entry.token_id for entry in wanted]
            np.testing.assert_allclose([e.logprob for e in got], [e.logprob for e in wanted], atol=1e-4)
            assert [entry.top_ids for entry in got] == [entry.top_ids for entry in wanted]
            asked = [[[token_id for token_id, *_ in entry.asked] for entry in entries] for entries in (got, wanted)]
            assert asked[0] == asked[1]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    asked=REQUESTS,
    errors=st.sampled_from([0, 0, 1, 2, 4, 8]),
    overlap=st.booleans(),
    num_blocks=st.sampled_from([24, 30, 400]),
    budget=st.sampled_from([5, 16, 32]),
    enable_prefix_caching=st.booleans(),
    aborted=st.tuples(st.integers(0, 30), st.integers(0, 5)),
)
def test_any_requests(
    plain, drafting, texts, asked, errors, overlap, num_blocks, budget, enable_prefix_caching, aborted
):
    requests = make_requests(asked)
    missing = [one for one in requests if key(one) not in texts]
    for name, result in run(plain.engine(), missing, check=False).items():
        texts[key(next(one for one in missing if one.request_id == name))] = result
    tell(drafting.runner, [one.prompt_token_ids + texts[key(one)].token_ids for one in requests], errors=errors)
    engine = drafting.engine(
        overlap=overlap,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    )
    results = {one.request_id: Result() for one in requests}
    engine.add(requests)
    when, who = aborted
    for _ in range(when):
        for output in engine.step():
            results[output.request_id].add(output)
        engine.scheduler.check_integrity()
    is_aborted = {}
    if who < len(requests):
        name = requests[who].request_id
        is_aborted[name] = results[name].finish_reason is None
        engine.abort([name])
    drain(engine, results)
    for one in requests:
        if one.pooling is None:
            name = one.request_id
            assert_same(results[name], texts[key(one)], is_aborted=is_aborted.get(name, False))
    stats = engine.stats()
    assert stats.spec_decode_num_accepted_tokens <= stats.spec_decode_num_draft_tokens
    assert stats.kv_tokens_held == 0
    if errors == 8:
        assert stats.spec_decode_num_accepted_tokens <= stats.spec_decode_num_draft_tokens / 4


@pytest.mark.parametrize("overlap", [True, False])
def test_right_drafts_are_all_accepted(plain, drafting, overlap):
    requests = [request("a", STEMS[0][:9], 61), request("b", STEMS[1][:5], 60)]
    expected = run(plain.engine(), requests)
    tell(drafting.runner, [one.prompt_token_ids + expected[one.request_id].token_ids for one in requests], errors=0)
    engine = drafting.engine(overlap=overlap)
    results = run(engine, requests)
    assert [results[name].token_ids for name in "ab"] == [expected[name].token_ids for name in "ab"]
    stats = engine.stats()
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 80
    first, *rest = stats.spec_decode_num_accepted_tokens_per_pos
    assert len(rest) == 3
    assert first >= max(rest)
    assert stats.num_steps < 30  # 1.6 tokens a draft that may have fewer than four tokens, and 4.3 of the others


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_with_a_grammar_beside(plain, drafting, overlap):
    """They have no drafts, and those beside them do."""
    tokenizer = ascii_tokenizer()
    (eos,) = tokenizer.eos_token_ids
    grammar = make_grammar(StructuredOutputs(regex="(ab|cd){2,9}-[0-9]{3}"))
    requests = [
        request("free", STEMS[0][:9], 50),
        request("bound", [1, 2], 24, SamplingParams(temperature=0.0), grammar=grammar, stop_token_ids=frozenset([eos])),
    ]
    results = []
    for model in (plain, drafting):
        matchers = Matchers(lambda: tokenizer, vocab_size=model.vocab_size)
        bare = model.engine(overlap=overlap)
        if results:
            tell(model.runner, [requests[0].prompt_token_ids + results[0]["free"].token_ids], errors=1)
        engine = Engine(bare.scheduler, model.runner, overlap=overlap, matchers=matchers)
        results.append(run(engine, requests))
        matchers.close()
    for name in ("free", "bound"):
        assert_same(results[1][name], results[0][name])
    assert engine.stats().spec_decode_num_accepted_tokens > 10


def test_a_text_as_long_as_the_context(plain, drafting):
    asked = [request("a", STEMS[0][:20], MAX_MODEL_LEN - 20)]
    expected = run(plain.engine(), asked)
    tell(drafting.runner, [asked[0].prompt_token_ids + expected["a"].token_ids], errors=0)
    assert_same(run(drafting.engine(), asked)["a"], expected["a"])
