"""Thoughts, and what follows them, are taken apart, however the text is cut; their tokens are counted."""

import re

import pytest
from event_cases import call, hermes, read, reader

from jaxserve.answers.parsing.events import Content, Reasoning
from jaxserve.answers.parsing.harmony import HarmonyReader
from jaxserve.answers.parsing.thought_counter import ReasoningCounter
from jaxserve.answers.syntaxes.syntax import Thoughts
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS


@pytest.mark.parametrize("parser", ["hermes", "glm45"])
@pytest.mark.parametrize(
    ("is_open", "text", "expected"),
    [
        (True, "\nHm, \n so.\n\n</think>\n\nYes. ", [Reasoning("Hm, \n so."), Content("Yes. ")]),
        (True, "<think>\nHm.</think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        (True, "never ends \n", [Reasoning("never ends")]),
        (True, "</think>\n\nYes.", [Content("Yes.")]),
        (False, "\n<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        (False, "<think>Hm.</thin</think>Yes.</think>", [Reasoning("Hm.</thin"), Content("Yes.")]),
        (True, "Hm.</think>\n\n</think>\nYes.</think> No.", [Reasoning("Hm."), Content("Yes. No.")]),
        (False, "Yes.</think> No.", [Content("Yes.</think> No.")]),
        (False, "A <think> in words.", [Content("A <think> in words.")]),
        (False, " <thing> Yes.", [Content(" <thing> Yes.")]),
        (False, "<thi", [Content("<thi")]),
        (False, "  ", [Content("  ")]),
    ],
)
def test_thoughts_and_answer(parser, is_open, text, expected):
    def parse():
        return reader(parser, thoughts=REASONING_PARSERS["qwen3"], is_open=is_open)

    assert read(parse(), [text]) == expected
    assert read(parse(), list(text)) == expected


@pytest.mark.parametrize(
    "name", sorted(name for name, row in REASONING_PARSERS.items() if row.opening and not row.stay)
)
def test_the_mark_that_ends_thoughts_is_not_shown_a_second_time(name):
    thoughts = REASONING_PARSERS[name]
    opening, closing = thoughts.opening[0], thoughts.closing[0].strip()
    text = f"{opening}A{closing}B{closing}C"
    shown = f"B{closing}C" if name == "granite" else "BC"  # they are words
    expected = [Reasoning("A"), Content(shown)]
    assert read(reader("hermes", thoughts=thoughts), [text]) == expected
    assert read(reader("hermes", thoughts=thoughts), list(text)) == expected


def test_thoughts_may_open_again():
    text = "<think>A</think>B<think>C</think>D"
    expected = [Reasoning("A"), Content("B"), Reasoning("C"), Content("D")]
    assert read(reader("glm45", thoughts=REASONING_PARSERS["glm45"]), list(text)) == expected
    closed = [Reasoning("A"), Content("B<think>C</think>D")]
    assert read(reader("hermes", thoughts=REASONING_PARSERS["qwen3"]), list(text)) == closed
    text = f"<think>A</think>{hermes('now', '{}')}\n<think>B</think>C"
    expected = [Reasoning("A"), *call("now"), Reasoning("B"), Content("C")]
    assert read(reader("hermes", thoughts=REASONING_PARSERS["qwen3"]), list(text)) == expected


@pytest.mark.parametrize(
    ("make", "pieces", "num_thoughts"),
    [
        (lambda: think(is_open=True), ["A", " b", "\n", "</think>", "\n\n", "Yes", " <think>", "."], 3),
        (lambda: think(is_open=False), ["<think>", "A", "</th", "ink>", "Yes", "<think>", "no"], 2),
        (lambda: think(is_open=False), ["Yes", "<think>", "no", "</think>"], 0),
        (lambda: think(is_open=True), ["never", " ends"], 2),
        (lambda: think(is_open=True), ["A", *hermes("now", "{}").partition("now"), "after"], 1),
        (
            lambda: HarmonyReader({}),
            re.findall(
                r"<.*?>|\w+| b",
                "<|channel|>analysis<|message|>A b<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            ),
            2,
        ),
    ],
)
def test_thoughts_are_counted(make, pieces, num_thoughts):
    counter = ReasoningCounter(make(), token_text=pieces.__getitem__)
    assert counter.count([]) + counter.count([0]) + counter.count(range(1, len(pieces))) == num_thoughts


def think(*, is_open):
    return reader("hermes", thoughts=REASONING_PARSERS["qwen3"], is_open=is_open)


def test_the_template_s_last_mark_says_whether_thoughts_are_open():
    for name in ("deepseek_r1", "qwen3"):
        assert REASONING_PARSERS[name].are_open("...<|Assistant|><think>\n") is True
        assert REASONING_PARSERS[name].are_open("<think>\n\n</think>\n\n") is False
        assert REASONING_PARSERS[name].are_open("Hello") is None


def test_thoughts_that_a_call_has_ended_leave_no_mark():
    text = f"<think>Hm.\n{hermes('now', '{}')}</think>\n\nSo."
    expected = [Reasoning("Hm."), *call("now"), Content("So.")]
    assert read(think(is_open=False), list(text)) == expected


def test_calls_behind_thoughts_and_only_so_many():
    def parser(max_calls):
        return reader("hermes", thoughts=Thoughts(), is_open=True, max_calls=max_calls)

    text = f"<tool_call> is a tag.</think>\n\n{hermes('now', '{}')}\n{hermes('f', '{}')}"
    assert read(parser(None), list(text)) == [Reasoning("<tool_call> is a tag."), *call("now"), *call("f")]
    assert read(parser(1), list(text)) == [Reasoning("<tool_call> is a tag."), *call("now")]
