"""Beam search over a real engine finds what transformers finds (tests/goldens/make_beams.py)."""

import asyncio
import json
import pathlib

import numpy as np
import pytest
from engine_harness import tiny_config

from jaxserve import AsyncLLM, BeamSearchParams
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.local import LocalEngineClient
from jaxserve.errors import InvalidRequest
from jaxserve.llm import LLM

CASES = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "beams.json").read_text())


@pytest.fixture(scope="module")
def model(byte_level):
    client = LocalEngineClient.start(tiny_config("llama_untied", max_num_seqs=8, max_num_batched_tokens=64))
    llm = LLM.from_frontend(Frontend(client, byte_level))
    yield llm
    llm.close()


@pytest.fixture
def llm(model, monkeypatch):
    """Return the model as one that ends its texts with the given tokens."""

    def llm(eos_token_ids):
        monkeypatch.setattr(model._frontend, "_eos_token_ids", frozenset(eos_token_ids))
        return model

    return llm


def params(case, **changed):
    names = ("beam_width", "early_stopping", "length_penalty", "max_tokens")
    return BeamSearchParams(**{name: case[name] for name in names}, include_stop_str_in_output=True, **changed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['early_stopping']}-{case['length_penalty']}")
def test_sequences_and_scores_are_those_of_transformers(llm, case):
    prompt = case["prompt"]
    (found,) = llm(case["eos_token_ids"]).beam_search([prompt], params(case))
    assert [each.tokens[len(prompt) :] for each in found.sequences] == case["sequences"]
    np.testing.assert_allclose([each.score for each in found.sequences], case["scores"], rtol=1e-4)
    ended = [each.tokens[-1] in case["eos_token_ids"] for each in found.sequences]
    assert [each.finish_reason for each in found.sequences] == ["stop" if end else "length" for end in ended]


def test_prompts_side_by_side_find_the_same_in_any_order(llm):
    first, second = CASES[0], CASES[1]
    model = llm(first["eos_token_ids"])
    alone = [model.beam_search(case["prompt"], params(first))[0] for case in (first, second)]
    for limit in (None, 1):
        both = model.beam_search([second["prompt"], first["prompt"]], params(first), concurrency_limit=limit)
        assert [[each.tokens for each in one.sequences] for one in reversed(both)] == [
            [each.tokens for each in one.sequences] for one in alone
        ]
    assert both[0].num_cached_tokens > 0

    same = AsyncLLM.from_frontend(model._frontend)
    same._finalizer.detach()  # the engine is the other one's
    found = asyncio.run(same.beam_search(first["prompt"], params(first)))
    assert [each.tokens for each in found.sequences] == [each.tokens for each in alone[0].sequences]


def test_the_token_that_ends_a_sequence_is_left_out_unless_asked_for(llm):
    case = CASES[0]
    model = llm(case["eos_token_ids"])
    (found,) = model.beam_search(case["prompt"], BeamSearchParams(beam_width=2, max_tokens=12))
    assert found.sequences[0].tokens == case["prompt"] + case["sequences"][0][:-1]
    assert found.sequences[0].stop_reason == case["sequences"][0][-1]
    (endless,) = model.beam_search(case["prompt"], BeamSearchParams(beam_width=2, max_tokens=12, ignore_eos=True))
    assert {len(each.tokens) for each in endless.sequences} == {len(case["prompt"]) + 12}
    (short,) = model.beam_search([1] * 60, BeamSearchParams(beam_width=2, max_tokens=None, ignore_eos=True))
    assert {len(each.tokens) for each in short.sequences} == {64}


def test_bad_arguments_are_named(llm):
    model = llm([])
    for fields, name in (
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"),
    ):
        with pytest.raises(InvalidRequest, match=name):
            BeamSearchParams(**fields)
    with pytest.raises(InvalidRequest, match="beam_width 21 needs the log probabilities of 21 tokens, and 20"):
        model.beam_search("a", BeamSearchParams(beam_width=21))
    with pytest.raises(InvalidRequest, match="concurrency_limit"):
        model.beam_search("a", BeamSearchParams(beam_width=2), concurrency_limit=0)
