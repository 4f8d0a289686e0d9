"""llama-index: OpenAILike, whole and streamed, completions and chat."""

import pytest
from conftest import MODEL
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


@pytest.fixture
def model(url):
    return OpenAILike(
        model=MODEL, api_base=url, api_key="none", is_chat_model=True, temperature=0, max_tokens=16, max_retries=0
    )


def test_chat(model):
    messages = [ChatMessage(role="user", content="Tell me of the sea.")]
    whole = model.chat(messages).message.content
    assert whole
    assert "".join(part.delta or "" for part in model.stream_chat(messages)) == whole


def test_completion(model):
    model.is_chat_model = False
    whole = model.complete("The sea").text
    assert whole
    assert "".join(part.delta or "" for part in model.stream_complete("The sea")) == whole
