"""openai-agents: an agent with a tool, over chat completions and over responses."""

import asyncio
from typing import Literal

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from conftest import MODEL
from openai import AsyncOpenAI

disable_tracing(True)


@function_tool
def sail(to: Literal["north", "south"]) -> str:
    """Sail away."""
    return f"off to {to}"


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def model(request, url):
    return request.param(model=MODEL, openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))


def test_an_answer_and_a_stream(model):
    async def run():
        agent = Agent(name="a", model=model, model_settings=ModelSettings(temperature=0, max_tokens=200))
        whole = await Runner.run(agent, "Tell me of the sea.")
        stream = Runner.run_streamed(agent, "Tell me of the sea.")
        events = [event async for event in stream.stream_events()]
        return whole.final_output, stream.final_output, events

    whole, streamed, events = asyncio.run(run())
    assert whole == streamed != ""
    assert events


def test_a_tool_is_called(model):
    async def run():
        settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="sail")
        # The model's chat template has no role for a tool's answer.
        agent = Agent(
            name="a", model=model, tools=[sail], model_settings=settings, tool_use_behavior="stop_on_first_tool"
        )
        return await Runner.run(agent, "Sail!", max_turns=2)

    assert asyncio.run(run()).final_output.startswith("off to")
