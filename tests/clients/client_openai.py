"""openai-python: whole, asynchronous, streamed, with tools, with a form, and with memory."""

import asyncio
import json
import math
from typing import Literal

import openai
import pydantic
import pytest
from conftest import MODEL

CHAT = [{"role": "user", "content": "Tell me of the sea."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "sail",
        "description": "Sail somewhere",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"enum": ["north", "south"]},
                "ships": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["to", "ships"],
            "additionalProperties": False,
        },
    },
}


class Wind(pydantic.BaseModel):
    direction: Literal["north", "east", "south", "west"]
    is_strong: bool


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_whole(client):
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, n=2, seed=1, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)
    text = client.completions.create(model=MODEL, prompt="The sea", max_tokens=8, temperature=0, echo=True)
    assert text.choices[0].text.startswith("The sea")


def test_streamed(client):
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=20, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert last.usage == whole.usage.model_copy(update={"prompt_tokens_details": last.usage.prompt_tokens_details})


def test_asynchronous(url):
    async def ask():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one(number):
                stream = await client.completions.create(
                    model=MODEL, prompt=f"Chapter {number}", max_tokens=16, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(i % 4) for i in range(16)))

    texts = asyncio.run(ask())
    assert texts[:4] * 4 == texts


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sail"}}])
def test_tools(client, choice):
    options = {"model": MODEL, "messages": CHAT, "tools": [TOOL], "tool_choice": choice, "max_tokens": 200, "seed": 2}
    whole = client.chat.completions.create(**options, parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "sail"
    assert arguments["to"] in ("north", "south")
    with client.chat.completions.stream(**options, parallel_tool_calls=False) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == arguments


def test_structured_output(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=CHAT, response_format=Wind, max_tokens=200, temperature=1.2, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Wind)
    response = client.responses.parse(model=MODEL, input="The wind?", text_format=Wind, max_output_tokens=200)
    assert isinstance(response.output_parsed, Wind)


def test_memory(client):
    first = client.responses.create(model=MODEL, input="Once upon a time", max_output_tokens=8, instructions="A tale.")
    *_, last = client.responses.create(
        model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=8, stream=True
    )
    second = last.response
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    running = client.responses.create(model=MODEL, input="Go on.", background=True, max_output_tokens=500)
    assert client.responses.cancel(running.id).status in ("cancelled", "completed", "incomplete")


def test_embeddings(client):
    answer = client.embeddings.create(model=MODEL, input=["the sea", "the sea", "a mountain"])
    same, again, other = (entry.embedding for entry in answer.data)
    assert math.isclose(math.hypot(*same), 1.0, rel_tol=1e-5)
    assert same == pytest.approx(again, abs=1e-5)
    assert same != pytest.approx(other, abs=1e-3)


def test_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    assert caught.value.param == "temperature"
