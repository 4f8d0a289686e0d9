"""The patterns of a reader match what their docstrings show."""

import pytest

from jaxserve.answers.parsing.marks import Marks
from jaxserve.answers.syntaxes.table import TOOL_PARSERS
from jaxserve.answers.syntaxes.thought_table import REASONING_PARSERS

# Pattern, syntax of calls, text, what is found in it, the group that says what it is.
EXAMPLES = [
    ("in_words", "hermes", "Let me look.<tool_call>", "<tool_call>", "call"),
    ("in_words", "hermes", "Sure.</think>", "</think>", "closing"),
    ("in_thoughts", "hermes", "Hm.</think>", "</think>", "closing"),
    ("bare", "llama3_json", '{"name"', "{", None),
    ("opening", "hermes", "<tool_call>", "<tool_call>", "call"),
    ("opening", "deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", "section"),  # noqa: RUF001
    ("opening", "mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "call"),
    ("preface", "mistral", 'Let me see. [{"name"', "Let me see. ", None),
    ("ending", "hermes", "</tool_call>", "</tool_call>", "end"),
    ("ending", "hermes", "```json\n", "```json", None),
    ("closing", "hermes", "\n</tool_call>", "\n</tool_call>", None),
    ("leftover", "hermes", "First: <tool_call>", "<tool_call>", "call"),
    ("spare", "hermes", "</tool_call>]```", "</tool_call>]```", None),
    ("nothing", "hermes", "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", None),
    ("nothing", "mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", None),
    ("after_name", "mistral", "[ARGS]", "[ARGS]", "mark"),
    ("after_name", "kimi_k2", ":0<|tool_call_argument_begin|>", ":0", "index"),
    ("nameless", "kimi_k2", "functions:0<|tool_call_argument_begin|>", None, None),
    ("arguments", "qwen3_coder", "<parameter=city>", "<parameter=", None),
    ("ends", "hermes", "</tool_call>", "</tool_call>", None),
    ("key", "qwen3_coder", "<parameter=city>", "<parameter=", "key"),
    ("key", "glm45", "<arg_key>city", "<arg_key>", "key"),
    ("key_end", "glm45", "city</arg_key>", "city</arg_key>", None),
    ("value", "glm45", "<arg_value>Rome", "<arg_value>", None),
    ("value_end", "glm45", "Rome</arg_value>", "</arg_value>", "value"),
]


@pytest.mark.parametrize(("pattern", "parser", "text", "found", "group"), EXAMPLES)
def test_examples(pattern, parser, text, found, group):
    marks = Marks(TOOL_PARSERS[parser][0], REASONING_PARSERS["qwen3"])
    match = getattr(marks, pattern).search(text)
    assert match is not None
    assert match[0] == (text if found is None else found)
    if group is not None:
        assert match.lastgroup == group


def test_names():
    marks = Marks(TOOL_PARSERS["kimi_k2"][0], None)
    assert [pattern.match(text)["name"] for pattern, text in zip(marks.names, ("functions.f:0", "f:0"), strict=True)]
