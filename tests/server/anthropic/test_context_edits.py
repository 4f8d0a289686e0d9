"""Edits of a conversation that /v1/messages makes before the model reads it (`context_management`)."""

import pytest
from serving import running

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hello"}
EDIT_TURNS, EDIT_USES = {"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}


def turns(num_turns):
    """Return a conversation in which the assistant has thought and called a tool in each turn."""
    messages = []
    for turn in range(num_turns):
        call = TOOL_USE | {"id": f"toolu_{turn}", "name": f"tool_{turn % 2}"}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": f"result {turn} " + "and so on " * 9}
        thought = {"type": "thinking", "thinking": f"thought {turn}", "signature": ""}
        messages += [
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "reminder"}]},
            {"role": "assistant", "content": [{"type": "text", "text": f"answer {turn}"}]},
        ]
    return [*messages, USER]


SHOWS_ALL = (
    "{% for m in messages %}{{ m.role }} {{ m.reasoning_content or '' }} {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def shows_all(tokenizer):
    options = {"max_model_len": 2**16}
    with running(
        tokenizer.with_chat_template(SHOWS_ALL),
        client_options=options,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    ) as server:
        yield server


@pytest.mark.parametrize(
    ("edit", "cleared", "what"),
    [
        (EDIT_TURNS, 3, "thought"),
        (EDIT_TURNS | {"keep": "all"}, 0, "thought"),
        (EDIT_TURNS | {"keep": {"type": "all"}}, 0, "thought"),
        (EDIT_TURNS | {"keep": {"type": "thinking_turns", "value": 3}}, 1, "thought"),
        (EDIT_TURNS | {"keep": {"type": "thinking_turns", "value": 9}}, 0, "thought"),
        (EDIT_USES, 0, "result"),  # only prompts of more than 100,000 tokens
        (EDIT_USES | {"trigger": {"type": "input_tokens", "value": 100}}, 1, "result"),
        (EDIT_USES | {"trigger": {"type": "tool_uses", "value": 4}}, 0, "result"),
        (EDIT_USES | {"trigger": {"type": "tool_uses", "value": 3}}, 1, "result"),
        (
            EDIT_USES | {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 0}},
            4,
            "result",
        ),
    ],
    ids=str,
)
def test_old_parts_of_a_conversation_are_cleared(shows_all, edit, cleared, what):
    shows_all.says("Good.")
    body = {"model": "fake", "max_tokens": 10, "messages": turns(4), "context_management": {"edits": [edit]}}
    answer = shows_all.post(MESSAGES, body).json()
    prompt = shows_all.prompt()
    assert [turn for turn in range(4) if f"{what} {turn}" in prompt] == list(range(cleared, 4))
    other = "result" if what == "thought" else "thought"
    assert all(f"{other} {turn}" in prompt for turn in range(4))
    applied = answer["context_management"]["applied_edits"]
    assert len(applied) == bool(cleared)
    for each in applied:
        assert each["type"] == edit["type"]
        assert each["cleared_thinking_turns" if what == "thought" else "cleared_tool_uses"] == cleared
        assert each["cleared_input_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "results", "num_inputs"),
    [
        ({}, [2, 3], 4),
        ({"exclude_tools": ["tool_0"]}, [0, 2, 3], 4),
        ({"clear_tool_inputs": True}, [2, 3], 2),
        ({"clear_tool_inputs": ["tool_1"]}, [2, 3], 3),
        ({"clear_at_least": {"type": "input_tokens", "value": 20}}, [2, 3], 4),
        ({"clear_at_least": {"type": "input_tokens", "value": 2000}}, [0, 1, 2, 3], 4),
    ],
    ids=str,
)
def test_which_results_are_cleared(shows_all, options, results, num_inputs):
    edit = EDIT_USES | {"trigger": {"type": "tool_uses", "value": 2}, "keep": {"type": "tool_uses", "value": 2}}
    body = {"model": "fake", "max_tokens": 10, "messages": turns(4)}
    body["context_management"] = {"edits": [edit | options]}
    assert shows_all.post(MESSAGES, body).status_code == 200
    prompt = shows_all.prompt()
    assert [turn for turn in range(4) if f"result {turn}" in prompt] == results
    assert prompt.count("Oslo") == num_inputs
