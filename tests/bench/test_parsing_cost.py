"""`jaxserve bench parsing` on short inputs: the cost per character must not grow with their length."""

import pytest
from depths import quick_first

from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.bench import parsing_cost
from jaxserve.errors import InvalidRequest


def test_a_report_of_some_syntaxes():
    report = parsing_cost.run(names=["hermes", "gpt_oss", "qwen3_coder"], num_characters=400).splitlines()
    assert [line.split("|")[1].strip() for line in report[2:]] == ["hermes", "gpt_oss", "qwen3_coder"]
    with pytest.raises(InvalidRequest, match="no syntax 'x'"):
        parsing_cost.run(names=["x"], num_characters=400)


@pytest.mark.parametrize("name", quick_first(["hermes", "mistral", "qwen3_coder", "gpt_oss", "pythonic", "gemma4"], 2))
def test_reading_takes_time_in_proportion_to_the_text(name):
    """A text of eight times the length would take 64 times as long if it was looked at again with each character."""
    calls = TOOL_PARSERS[name][0]
    for text in parsing_cost._worst_inputs(calls).values():
        short, long = ((text * length)[:length] for length in (500, 4000))
        once, eight_times = (
            min(parsing_cost._seconds(calls, text, piece=1) for _ in range(3)) for text in (short, long)
        )
        assert eight_times < 30 * once + 0.05
