"""With speculation the text is the same, token for token, whatever is accepted and whatever else the engine does."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import drawn, examples, quick_first
from drafting import Told, tell
from engine_harness import MAX_MODEL_LEN, Model, Result, request, run
from golden_folder import GOLDENS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_model import ascii_tokenizer

from jaxserve import speculative
from jaxserve.engine.output import RequestGroup
from jaxserve.loading.huggingface import load_config
from jaxserve.request import EngineOutput
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
FEWER = {"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 8, 2]]}
GLM, GLM_CHANGES = "glm4_moe_qk_norm", {"num_hidden_layers": 3, "vocab_size": 123}
STATES = {
    "delta rule": (
        "qwen3_next_biases",
        {"vocab_size": 123, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "decays by channel": ("kimi_linear_plain", {"vocab_size": 123}),
    "short convolutions": ("lfm2_biases", {"vocab_size": 123}),
    "Mamba-2 beside attention": ("falcon_h1_multipliers", {"vocab_size": 123}),
    "Mamba-2 alone": ("mamba2_limits", {"vocab_size": 123}),
}
BESIDE_STATES = ("mtp beside states", "draft model beside states")
EAGLE3 = {
    "layer": {
        "vocab_size": 123, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 96,
    },
    "taps": [0, 1, 2], "draft_vocab_size": 60, "target_hidden_size": None, "norm_before_residual": False,
    "prefix": "midlayer", "has_embedding": False, "has_lm_head": True,
}  # fmt: skip
STEMS = [[1 + i * k % 9 for i in range(30)] for k in (1, 2, 4)]


@pytest.fixture(scope="module")
def plain():
    return Model(NAME)


def told(name, changes=None, **options):
    """Return a model with a proposer that is told the texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(speculative.PROPOSERS, "ngram", lambda options: Told(options.num_drafts, NUM_TEXTS))
        return Model(name, changes=changes, speculation=parse_speculation(DRAFTS), **options)


@pytest.fixture(scope="module")
def drafting():
    return told(NAME)


@pytest.fixture(scope="module")
def matchers(plain):
    matchers = Matchers(lambda: TOKENIZER, vocab_size=plain.vocab_size)
    yield matchers
    matchers.close()


@pytest.fixture(scope="module")
def texts():
    """The results of a model without speculation, by all that they depend on: each request alone would have them.

    A function has a short representation: hypothesis prints the arguments of its tests, and refuses long ones.
    """
    return functools.cache(lambda _: {})


@pytest.fixture(scope="module")
def models(plain, drafting):
    """Return a function from the way in which tokens are drafted to a model without and one with it. A draft model is a
    copy of its target; the others have random weights.
    """

    def with_weights(name, changes, drafter=None, num_kept_states=0, **options):
        options = DRAFTS | {"method": "mtp", "prompt_lookup_min": None} | options
        speculation = parse_speculation({name: value for name, value in options.items() if value is not None})
        return Model(name, changes=changes, speculation=speculation, drafter=drafter, num_kept_states=num_kept_states)

    def draft_model():
        model = with_weights(NAME, None, load_config(GOLDENS / NAME), method="draft_model", model="x",
                             draft_sample_method="probabilistic", **FEWER)  # fmt: skip
        model.runner.state["params"]["drafter"] = plain.params
        return plain, model

    @functools.cache
    def plain_glm():
        return Model(GLM, changes=GLM_CHANGES)

    @functools.cache
    def plain_with_states(kind):
        name, changes = STATES[kind]
        return Model(name, changes=changes, num_kept_states=8)

    @functools.cache
    def of(kind):
        if kind == "told":
            return plain, drafting
        if kind == "draft model":
            return draft_model()
        if kind in STATES:
            name, changes = STATES[kind]
            return plain_with_states(kind), told(name, changes, num_kept_states=8)
        if kind == "mtp beside states":
            name, changes = STATES["delta rule"]
            model = with_weights(name, changes, num_kept_states=8, draft_sample_method="probabilistic", **FEWER)
            return plain_with_states("delta rule"), model
        if kind == "draft model beside states":
            name, changes = STATES["Mamba-2 alone"]
            options = {"method": "draft_model", "model": "x", "num_kept_states": 8}
            model = with_weights(name, changes, load_config(GOLDENS / NAME), **options)
            return plain_with_states("Mamba-2 alone"), model
        if kind == "mtp":
            return plain_glm(), with_weights(GLM, GLM_CHANGES)
        return plain_glm(), with_weights(GLM, GLM_CHANGES, EAGLE3, method="eagle3", model="x")

    return of


PARAMS = st.one_of(
    st.just({"temperature": 0.0}),
    st.builds(lambda seed, more: {"temperature": 1.0, "seed": seed} | more, st.integers(0, 99), st.sampled_from([
        {}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_n_sigma": 1.0}, {"logprobs": 2},
        {"frequency_penalty": 0.5}, {"logit_bias": {3: 4.0, 5: -9.0}}, {"min_tokens": 6},
        {"allowed_token_ids": list(range(3, 40))},
        {"logprob_token_ids": [4, 9]}, {"prompt_logprobs": 1}, {"speculative_decoding": False},
    ])),
)  # fmt: skip
TOKENIZER = ascii_tokenizer()
GRAMMARS = [
    make_grammar(constraint)
    for constraint in (
        StructuredOutputs(regex="(ab|cd){2,9}-[0-9]{3}"),
        StructuredOutputs(regex="(a word and [0-9] more of them; ){1,3}"),
        StructuredOutputs(
            json={
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 5}, "count": {"type": "integer", "maximum": 99}},
                "required": ["name", "count"],
            }
        ),
    )
]
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
            "grammar": st.sampled_from(["", "", "", *GRAMMARS]),
            "stop": st.sampled_from([None, None, "1", ["!", "ab", "cd-"]]),
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
            fields = {"temperature": 0.0} if ask["pooling"] else ask["params"] | {"stop": ask["stop"]}
            params = SamplingParams(**fields)
            grammar = "" if ask["pooling"] else ask["grammar"]
            requests.append(
                request(
                    f"{index}.{sibling}",
                    prompt,
                    1 if ask["pooling"] else ask["max_tokens"],
                    params,
                    group_id=f"{index}.0",
                    stop_token_ids=frozenset([*ask["stops"], *(TOKENIZER.eos_token_ids if grammar else ())]),
                    grammar=grammar,
                    bad_word_ids=(ask["bad_word"],) if ask["bad_word"] else (),
                    seed=(params.seed or 0) + sibling,
                    pooling=ask["pooling"],
                )
            )
    return requests[:NUM_TEXTS]


def key(one):
    fixed = one.prompt_token_ids, one.params, one.max_tokens, sorted(one.stop_token_ids), one.seed, one.bad_word_ids
    return repr((*fixed, one.grammar))


def group_of(one):
    """Return the caller's side of a request: text and stop strings."""
    return RequestGroup(one.request_id, None, [one], TOKENIZER)


def seen(group):
    """Return what the caller has in the end."""
    output = group.result().outputs[0]
    return output.text, output.token_ids, output.finish_reason, output.stop_reason


def token_by_token(one, result):
    """Return what the caller sees of a request whose tokens come one by one."""
    group = group_of(one)
    *first, last = ({"request_id": one.request_id, "new_token_ids": [token_id]} for token_id in result.token_ids)
    for fields in (*first, last | {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}):
        if group.push([EngineOutput(**fields)]):
            break
    return seen(group)


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


# Where types are checked, other threads draw from `random` meanwhile, which hypothesis takes for strategies that do.
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    asked=REQUESTS,
    errors=st.sampled_from([0, 0, 1, 2, 4, 8]),
    token_cost=st.sampled_from([0.0, 0.0, 0.02]),
    overlap=st.booleans(),
    num_blocks=st.sampled_from([24, 30, 400]),
    budget=st.sampled_from([5, 16, 32]),
    enable_prefix_caching=st.booleans(),
    aborted=st.tuples(st.integers(0, 30), st.integers(0, 5)),
    kind=st.sampled_from(drawn(["told", "told", "draft model", "mtp", "eagle3", *STATES, *BESIDE_STATES], 3)),
)
def test_any_requests(
    models,
    matchers,
    texts,
    asked,
    errors,
    token_cost,
    overlap,
    num_blocks,
    budget,
    enable_prefix_caching,
    aborted,
    kind,
):
    plain, drafting = models(kind)
    texts = texts(plain)
    requests = make_requests(asked)
    missing = [one for one in requests if key(one) not in texts]
    for name, result in run(plain.engine(matchers=matchers), missing, check=False).items():
        texts[key(next(one for one in missing if one.request_id == name))] = result
    if kind in ("told", *STATES):
        tell(drafting.runner, [one.prompt_token_ids + texts[key(one)].token_ids for one in requests], errors=errors)
    engine = drafting.engine(
        overlap=overlap,
        matchers=matchers,
        token_cost=token_cost,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    )
    results = {one.request_id: Result() for one in requests}
    groups = {one.request_id: group_of(one) for one in requests if not one.pooling}
    engine.add(requests)
    when, who = aborted
    is_aborted, is_stopped = {}, set()
    for index in itertools.count():
        if index == when and who < len(requests):
            name = requests[who].request_id
            is_aborted[name] = results[name].finish_reason is None
            engine.abort([name])
        if not engine.has_work:
            break
        for output in engine.step():
            name = output.request_id
            results[name].add(output)
            if name in groups and groups[name].push([output]):
                is_stopped.add(name)
                engine.abort([name])
        engine.scheduler.check_integrity()
    for one in requests:
        if one.pooling is None:
            name, expected = one.request_id, texts[key(one)]
            is_cut = is_aborted.get(name, False)
            assert_same(results[name], expected, is_aborted=is_cut or name in is_stopped)
            if not is_cut:
                assert seen(groups[name]) == token_by_token(one, expected)
    stats = engine.stats()
    assert stats.spec_decode_num_accepted_tokens <= stats.spec_decode_num_draft_tokens
    assert stats.kv_tokens_held == 0
    metrics = [found for group in groups.values() if (found := group.result().metrics) is not None]
    for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"):
        assert sum(getattr(one, name) for one in metrics) == getattr(stats, name)
    for one in metrics:
        assert one.spec_decode_num_accepted_tokens == sum(one.spec_decode_num_accepted_tokens_per_pos)
        assert one.spec_decode_num_drafts >= max(one.spec_decode_num_accepted_tokens_per_pos)
    if kind == "told" and errors == 8:
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


@pytest.mark.parametrize("kind", quick_first(STATES))
def test_states_advance_by_what_is_accepted(models, kind):
    """Prompts in chunks, some of one token, and in the second run from states that were kept."""
    plain, drafting = models(kind)
    sampled = SamplingParams(temperature=1.0, seed=3)
    requests = [
        request("a", STEMS[0], 30),
        request("b", [5], 24, sampled),
        request("c", [*STEMS[0][:21], 7], 20),
        request("d", STEMS[1][:9], 26, sampled),
    ]
    expected = run(plain.engine(max_num_batched_tokens=8), requests)
    told = [one.prompt_token_ids + expected[one.request_id].token_ids for one in requests]
    for errors, overlap in ((0, True), (2, True), (2, False), (8, True)):
        tell(drafting.runner, told, errors=errors)
        engine = drafting.engine(overlap=overlap, max_num_batched_tokens=16, max_num_seqs=3)
        for _ in range(2):
            results = run(engine, requests)
            for name, result in results.items():
                assert_same(result, expected[name])
        assert results["a"].num_cached_tokens >= 24
        stats = engine.stats()
        share = stats.spec_decode_num_accepted_tokens / stats.spec_decode_num_draft_tokens
        assert {0: share == 1, 2: 0.1 < share < 0.9, 8: share < 0.25}[errors], (errors, share)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_copy_of_the_model_is_always_right(models, overlap):
    """A draft model takes in texts in chunks, cached prefixes, most likely tokens and drawn ones."""
    plain, drafting = models("draft model")
    sampled = SamplingParams(temperature=1.0, seed=3, top_p=0.9)
    requests = [
        request("a", STEMS[0], 40),
        request("b", STEMS[1][:5], 30, sampled),
        request("c", [*STEMS[0][:21], 7], 30, sampled),
    ]
    expected = run(plain.engine(), requests)
    engine = drafting.engine(overlap=overlap, num_blocks=30, max_num_batched_tokens=16)
    for _ in range(2):
        results = run(engine, requests)
        assert [results[name].token_ids for name in "abc"] == [expected[name].token_ids for name in "abc"]
    assert results["c"].num_cached_tokens >= 20
    stats = engine.stats()
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 80


def silenced(params):
    """Return a model's weights with layers that add nothing, and a further layer that reads tokens alone: it agrees."""

    def silence(path, leaf):
        names = {str(getattr(key, "key", "")).removesuffix("_bias") for key in path}
        return jnp.zeros_like(leaf) if names & {"out", "down"} else leaf

    params = jax.tree_util.tree_map_with_path(silence, params)
    joined = params["drafter"]["joined"]
    identity = jnp.eye(*joined.values.shape, dtype=joined.values.dtype)
    return params | {"drafter": params["drafter"] | {"joined": dataclasses.replace(joined, values=identity)}}


def test_a_further_layer_that_agrees_is_always_right(models):
    """Beside layers with states: prompts in chunks, one of one token, then from states that were kept."""
    _, drafting = models("mtp beside states")
    drafting.runner.state["params"] = silenced(drafting.params)
    sampled = SamplingParams(temperature=1.0, seed=3, top_p=0.9)
    requests = [request("a", STEMS[0], 30), request("b", [5], 24, sampled), request("c", STEMS[1][:9], 20, sampled)]
    engine = drafting.engine(max_num_batched_tokens=16)
    for _ in range(2):
        results = run(engine, requests)
    assert [len(results[name].token_ids) for name in "abc"] == [30, 24, 20]
    stats = engine.stats()
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 80
    drafting.runner.state["params"] = drafting.params


@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_grammar_forces_is_accepted(plain, drafting, matchers, overlap):
    """Nobody has told the proposer these texts."""
    stops = frozenset(TOKENIZER.eos_token_ids)
    requests = [request(str(i), [1, 2], 60, grammar=GRAMMARS[i], stop_token_ids=stops) for i in (1, 2)]
    expected = run(plain.engine(matchers=matchers), requests)
    tell(drafting.runner, [], errors=0)
    engine = drafting.engine(overlap=overlap, matchers=matchers, token_cost=0.02)
    results = run(engine, requests)
    for name, result in results.items():
        assert_same(result, expected[name])
    assert engine.stats().spec_decode_num_accepted_tokens > 40


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("errors", "least", "most"), [(8, 1, 60), (0, 60, 120)])
def test_drafts_that_do_not_pay_are_not_verified(plain, drafting, overlap, errors, least, most):
    """A batch in which nobody drafts takes steps of one token a row."""
    requests = [request("a", STEMS[0][:9], 61), request("b", STEMS[1][:5], 60)]
    expected = run(plain.engine(), requests)
    told = [one.prompt_token_ids + expected[one.request_id].token_ids for one in requests]
    tell(drafting.runner, told, errors=errors)
    engine = drafting.engine(overlap=overlap, token_cost=0.02)
    plans = []
    engine.on_plan = plans.append
    results = run(engine, requests)
    assert [results[name].token_ids for name in "ab"] == [expected[name].token_ids for name in "ab"]
    assert least <= engine.stats().spec_decode_num_draft_tokens <= most
    drafting_steps = [index for index, plan in enumerate(plans) if any(row.num_drafts for row in plan.rows)]
    assert (len(drafting_steps) > 10) == (errors == 0)
    assert errors == 0 or max(drafting_steps) < 12


def test_a_text_as_long_as_the_context(plain, drafting):
    asked = [request("a", STEMS[0][:20], MAX_MODEL_LEN - 20)]
    expected = run(plain.engine(), asked)
    tell(drafting.runner, [asked[0].prompt_token_ids + expected["a"].token_ids], errors=0)
    assert_same(run(drafting.engine(), asked)["a"], expected["a"])
