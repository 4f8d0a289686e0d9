"""`jaxserve bench grammar`, with a few requests over a small vocabulary."""

import re

import pytest
from tiny_tokenizer import byte_level
from waiting import PATIENCE

from jaxserve.bench import grammar_cost
from jaxserve.errors import InvalidRequest
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("grammar", sorted(grammar_cost.GRAMMARS))
def test_masks_of_texts_that_end_and_begin_anew(tokenizer, grammar):
    times, num_masks = grammar_cost.measure(tokenizer, grammar=grammar, num_requests=4, num_steps=30, seed=0)
    assert len(times) == 30
    assert num_masks == 4 * 30
    assert all(0 < seconds < PATIENCE for seconds in times)


def test_report(tokenizer):
    report = grammar_cost.run(tokenizer, grammar="json_object", num_requests=[1, 2], num_steps=3, seed=0)
    assert re.findall(r"^\| (\d)", report, re.M) == ["1", "2"]
    with pytest.raises(InvalidRequest, match="num-requests"):
        grammar_cost.run(tokenizer, grammar="json_object", num_requests=[0], num_steps=3, seed=0)
