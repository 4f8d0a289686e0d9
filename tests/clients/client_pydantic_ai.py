"""pydantic-ai: text, a stream, and output of a type, over chat completions."""

import asyncio

import pydantic
import pytest
from conftest import MODEL
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Ship(pydantic.BaseModel):
    """A ship."""

    masts: int = pydantic.Field(ge=1, le=5)
    is_old: bool


@pytest.fixture
def model(url):
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))


def test_text_and_a_stream(model):
    agent = Agent(model, model_settings={"temperature": 0.0, "max_tokens": 16})
    whole = agent.run_sync("Tell me of the sea.")
    assert whole.usage.output_tokens > 0

    async def streamed():
        async with agent.run_stream("Tell me of the sea.") as result:
            return [text async for text in result.stream_text(delta=True)]

    assert "".join(asyncio.run(streamed())) == whole.output


@pytest.mark.parametrize("kind", [NativeOutput, ToolOutput])
def test_output_of_a_type(model, kind):
    agent = Agent(model, output_type=kind(Ship), model_settings={"max_tokens": 300, "seed": 1})
    assert isinstance(agent.run_sync("A ship?").output, Ship)
