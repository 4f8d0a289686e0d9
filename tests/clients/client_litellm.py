"""LiteLLM, whose proxies and agents see the server as one more provider."""

import asyncio

import litellm
import pytest
from conftest import MODEL

litellm.suppress_debug_info = True
CHAT = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture
def options(url):
    return {"model": f"hosted_vllm/{MODEL}", "api_base": url, "api_key": "none", "num_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "text-completion-openai"])
def test_providers(url, provider):
    options = {"model": f"{provider}/{MODEL}", "api_base": url, "api_key": "none", "max_tokens": 12, "temperature": 0}
    if provider == "text-completion-openai":
        answer = litellm.text_completion(prompt="The sea", **options)
        assert isinstance(answer.choices[0].text, str)
    else:
        answer = litellm.completion(messages=CHAT, **options)
        assert isinstance(answer.choices[0].message.content, str)
    assert 0 < answer.usage.completion_tokens <= 12


def test_stream(options):
    whole = litellm.completion(messages=CHAT, max_tokens=16, temperature=0, **options)
    stream = litellm.completion(messages=CHAT, max_tokens=16, temperature=0, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


def test_asynchronous(options):
    async def ask():
        return await asyncio.gather(*(litellm.acompletion(messages=CHAT, max_tokens=4, **options) for _ in range(8)))

    assert len(asyncio.run(ask())) == 8


def test_tools(options):
    parameters = {"type": "object", "properties": {"to": {"enum": ["north"]}}, "required": ["to"]}
    parameters["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "sail", "parameters": parameters}}]
    answer = litellm.completion(messages=CHAT, tools=tools, tool_choice="required", max_tokens=200, **options)
    assert answer.choices[0].message.tool_calls[0].function.name == "sail"


def test_embeddings(url):
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["the sea"], api_base=url, api_key="none")
    assert len(answer.data[0]["embedding"]) == 192


def test_errors(options):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=CHAT, temperature=-1, **options)
