"""The tokenizer that tests of answers have in common."""

import pytest
from serving import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()
