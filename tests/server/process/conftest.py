"""Servers of several processes, which all end with their test."""

import pytest
import tiny_tokenizer
from server_processes import Serving


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_tokenizer.byte_level(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model):
    started = []

    def start(*flags, **options):
        started.append(Serving(model, *flags, **options))
        return started[-1]

    yield start
    for serving in started:
        serving.close()
