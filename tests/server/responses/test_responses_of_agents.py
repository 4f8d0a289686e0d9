"""Responses with thoughts and calls of functions."""

import json

import openai
import pytest
from serving import assert_error, response_events, running, synchronous

PATH = "/v1/responses"


WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather somewhere",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}


@pytest.fixture(scope="module")
def agent(tokenizer):
    """A server that reads thoughts as Qwen 3 writes them, and calls as Hermes does."""
    with running(tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


THOUGHTS_AND_CALLS = (
    "<think>Where?</think>I look."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)


def test_thoughts_and_calls(agent):
    agent.says(THOUGHTS_AND_CALLS)
    with synchronous(agent) as client:
        answer = client.responses.create(model="fake", input="Weather?", tools=[WEATHER])
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        num_thoughts = answer.usage.output_tokens_details.reasoning_tokens
        assert 0 < num_thoughts < answer.usage.output_tokens
        thought, message, *calls = answer.output
        assert thought.content[0].text.strip() == "Where?"
        assert message.content[0].text.strip() == "I look."
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("weather", {"city": "Rome"}),
            ("weather", {"city": "Bern"}),
        ]
        assert answer.tools[0].name == "weather"
        agent.says("Sunny.")
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
        following = client.responses.create(
            model="fake", input=outputs, tools=[WEATHER], previous_response_id=answer.id
        )
        assert following.output_text == "Sunny."
        with pytest.raises(openai.BadRequestError, match="call_id"):
            client.responses.create(model="fake", input=[{"type": "function_call_output", "output": "sun"}])


def test_stream_of_thoughts_and_calls(agent):
    agent.says(THOUGHTS_AND_CALLS, tokens_per_step=3)
    found = response_events(agent.post(PATH, {"input": "Weather?", "tools": [WEATHER], "stream": True}))
    kinds = [event["type"].removeprefix("response.") for event in found]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    part = ["output_item.added", "content_part.added"]
    assert once == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *(*part, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *(*call, *call, "completed"),
    ]
    output = found[-1]["response"]["output"]
    for index, item in enumerate(output):
        own = [event for event in found if event.get("output_index") == index]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert deltas == item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "tools[1].name"),
        (
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "a lot"}}, "reasoning.effort"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "http://127.0.0.1/x"}}}},
            "text.format.schema",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused_by_an_agent(agent, fields, param):
    answer = agent.post(PATH, {"input": "a", **fields})
    assert_error(answer, 400, param)
    if param != "tool_choice":
        assert answer.json()["error"]["message"].startswith(param), "in the words of the client"


def test_a_forced_call_whose_parameters_have_definitions(agent):
    parameters = {
        "$defs": {"Sky": {"enum": ["clear", "cloudy"]}},
        "type": "object",
        "properties": {"sky": {"$ref": "#/$defs/Sky"}},
    }
    agent.says('<tool_call>\n{"name": "report", "arguments": {"sky": "clear"}}\n</tool_call>')
    body = {
        "input": "Sky?",
        "tools": [{"type": "function", "name": "report", "parameters": parameters}],
        "tool_choice": "required",
    }
    (call,) = agent.post(PATH, body).json()["output"]
    assert json.loads(call["arguments"]) == {"sky": "clear"}
    assert "$defs" in agent.client.submitted[-1].grammar
