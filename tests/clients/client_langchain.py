"""LangChain: ChatOpenAI and OpenAIEmbeddings."""

import asyncio
from typing import Literal

import pydantic
import pytest
from conftest import MODEL
from langchain_core.exceptions import ContextOverflowError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import BadRequestError


@tool
def sail(to: Literal["north", "south"]) -> str:
    """Sail away."""
    return f"off to the {to}"


class Ship(pydantic.BaseModel):
    """A ship."""

    masts: int = pydantic.Field(ge=1, le=5)
    is_old: bool


@pytest.fixture
def model(url):
    return ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=40, max_retries=0)


def test_invoke_and_stream(model):
    whole = model.invoke("Tell me of the sea.")
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream("Tell me of the sea.")) == whole.content


def test_batch(model):
    answers = asyncio.run(model.abatch(["A", "B", "A"]))
    assert answers[0].content == answers[2].content


def test_tools(model):
    answer = model.bind(max_tokens=200).bind_tools([sail], tool_choice="sail", strict=True).invoke("Sail!")
    (call,) = answer.tool_calls
    assert call["name"] == "sail"
    assert call["args"]["to"] in ("north", "south")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(url, method):
    model = ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=1, max_tokens=300, max_retries=0, seed=1)
    assert isinstance(model.with_structured_output(Ship, method=method, strict=True).invoke("A ship?"), Ship)


def test_responses(url):
    model = ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", use_responses_api=True, max_tokens=10, max_retries=0, temperature=0
    )
    answer = model.invoke("The sea")
    assert answer.response_metadata["id"].startswith("resp_")
    assert "".join(chunk.text for chunk in model.stream("The sea")) == answer.text


def test_completions(url):
    model = OpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=10, max_retries=0)
    assert model.invoke("The sea") == "".join(model.stream("The sea"))


def test_embeddings(url):
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=url, api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    assert [len(vector) for vector in embeddings.embed_documents(["the sea", "a hill"])] == [192, 192]
    assert len(embeddings.embed_query("the sea")) == 192


def test_what_does_not_fit_is_distinguished_from_other_refusals(url):
    """LangChain recognizes by the text of the message that a prompt is too long, and raises an error of its own
    then.
    """
    model = ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0)
    with pytest.raises(ContextOverflowError):
        model.invoke("sea " * 5000)
    with pytest.raises(BadRequestError) as caught:
        model.bind(temperature=-1).invoke("a")
    assert not isinstance(caught.value, ContextOverflowError)
