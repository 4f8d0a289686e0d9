"""A tokenizer of bytes, and LLMs on engines that play scripts."""

import pytest
import tiny_tokenizer
from fake_client import FakeEngineClient, echo

from jaxserve.engine.frontend import Frontend
from jaxserve.llm import LLM
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture
def start(tokenizer):
    """Start an LLM on a fake engine that plays the given scripts; all are closed at the end."""
    llms = []

    def start(play=echo, *, default_sampling=None, **options):
        client = FakeEngineClient(play, **options)
        llm = LLM.from_frontend(Frontend(client, tokenizer, seed=0, default_sampling=default_sampling))
        llms.append(llm)
        return llm, client

    yield start
    for llm in llms:
        llm.close()
