"""ChatGLM's `rope_ratio`, whose meaning depends on the model."""

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models import get_family

CHATGLM = {"model_type": "chatglm", "padded_vocab_size": 65024, "multi_query_attention": True, "seq_length": 32768}


def read(**fields):
    fields = CHATGLM | fields
    return get_family(fields).config(fields)


@pytest.mark.parametrize("name", [{}, {"_name_or_path": "x/chatglm2-6b-32k"}, {"_name_or_path": None}])
def test_a_ratio_that_may_divide_positions_is_refused(name):
    with pytest.raises(CheckpointError, match="rope_ratio 16 is not supported for ChatGLM 2"):
        read(rope_ratio=16, **name)


@pytest.mark.parametrize(
    "fields", [{"_name_or_path": "x/ChatGLM3-6b-32k"}, {"padded_vocab_size": 151552, "add_qkv_bias": True}]
)
def test_a_ratio_multiplies_the_base(fields):
    assert read(rope_ratio=50, **fields).rope != read(rope_ratio=1, **fields).rope


def test_a_ratio_of_one_is_that_of_all():
    assert read(rope_ratio=1) == read()
