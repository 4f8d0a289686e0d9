"""POST /v1/embeddings: every form of input and answer, and what is refused."""

import base64
import json
import math
import struct
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from fake_client import HIDDEN_SIZE
from serving import assert_error, assert_well, running, synchronous

from jaxserve.engine.embedding import matryoshka_dimensions
from jaxserve.loading.sentence_transformers import Embedder

PATH = "/v1/embeddings"


def powers(base):
    return [float(base) ** i for i in range(HIDDEN_SIZE)]


def unit(vector):
    length = math.hypot(*vector)
    return pytest.approx([entry / length for entry in vector], rel=1e-6)


def vectors(answer):
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "list"
    assert body["model"] == "fake"
    assert [(entry["object"], entry["index"]) for entry in body["data"]] == [
        ("embedding", i) for i in range(len(body["data"]))
    ]
    return [entry["embedding"] for entry in body["data"]]


@pytest.mark.parametrize(("given", "last_tokens"), [([7, 9], [9]), ([[7, 9], [3]], [9, 3]), ([[5]] * 20, [5] * 20)])
def test_token_ids(server, given, last_tokens):
    assert vectors(server.post(PATH, {"input": given})) == [unit(powers(token)) for token in last_tokens]


def test_texts_and_usage(server):
    answer = server.post(PATH, {"input": ["ab", "xyz"], "model": "fake"})
    expected = [server.tokenizer.encode(text)[-1] for text in ("ab", "xyz")]
    assert vectors(answer) == [unit(powers(token)) for token in expected]
    assert answer.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7}  # BOS each
    assert vectors(server.post(PATH, {"input": "xyz"})) == [unit(powers(expected[1]))]


@pytest.mark.parametrize("source", [None, "1_Pooling/config.json"])
def test_the_operator_wins_over_the_models_pooling(tokenizer, source, caplog):
    caplog.set_level("INFO")
    own = Embedder(pooling=("mean", "last"), source=source, size=2 * HIDDEN_SIZE, normalizes=False)
    raw = [*powers(6), *powers(8)]
    with running(tokenizer) as server:
        server.frontend.embedder = own
        server.server.tell_choices()
        assert vectors(server.post(PATH, {"input": [4, 8]})) == [raw]
        assert vectors(server.post(PATH, {"input": [4, 8], "dimensions": 5, "normalize": True})) == [unit(raw[:5])]
        assert vectors(server.post(PATH, {"input": [4, 8], "pooling": "last"})) == [powers(8)]
    with running(tokenizer, pooling="last") as server:
        assert vectors(server.post(PATH, {"input": [4, 8], "pooling": "mean"})) == [unit(powers(6))]
        server.frontend.embedder = own
        server.server.tell_choices()
        assert vectors(server.post(PATH, {"input": [4, 8]})) == [powers(8)]
    told = {record.getMessage() for record in caplog.records if record.getMessage().startswith("pooling: ")}
    by_file = f"pooling: mean+last, by {source}"
    by_flag = f"pooling: last, by --pooling; {source} says mean+last"
    assert told == ({by_file, by_flag} if source else set())


def test_prompts_and_lowercase(tokenizer):
    with running(tokenizer) as server:
        prompts = {"query": "Q: ", "document": ""}
        server.frontend.embedder = Embedder(size=HIDDEN_SIZE, prompts=prompts, default_prompt="query", lowercases=True)
        for body in ({"input": "AB"}, {"input": "AB", "prompt_name": "document"}, {"input": [9]}):
            assert server.post(PATH, body).status_code == 200
        found = [server.tokenizer.decode(request.prompt_token_ids) for request in server.client.submitted[:2]]
        assert found == ["q: ab", "ab"]
        assert server.client.submitted[2].prompt_token_ids == [9]
        assert_error(server.post(PATH, {"input": "a", "prompt_name": "passage"}), 400, "prompt_name")
        assert_error(server.post(PATH, {"messages": [{"role": "user", "content": "a"}]}), 400, "messages")


def test_shortened_and_raw(server):
    assert vectors(server.post(PATH, {"input": [3], "dimensions": 2})) == [unit([1, 3])]
    assert vectors(server.post(PATH, {"input": [3], "normalize": False})) == [powers(3)]
    assert vectors(server.post(PATH, {"input": [3], "normalize": False, "dimensions": 1})) == [[1.0]]


def test_base64(server):
    (text,) = vectors(server.post(PATH, {"input": [3], "encoding_format": "base64", "normalize": False}))
    assert list(struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(text))) == powers(3)


def test_truncated(server):
    answer = server.post(PATH, {"input": [[5, 6, 7]], "truncate_prompt_tokens": 2})
    assert answer.json()["usage"]["prompt_tokens"] == 2
    long = list(range(10, 110)) * 8
    assert server.post(PATH, {"input": long, "truncate_prompt_tokens": -1}).json()["usage"]["prompt_tokens"] == 512


def test_the_whole_context(server):
    assert server.post(PATH, {"input": [5] * 512}).status_code == 200
    answer = server.post(PATH, {"input": [5] * 513})
    assert_error(answer, 400, "input")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert_error(server.post(PATH, {"input": [[5], [5] * 513]}), 400, "input[1]")


def test_openai_client(server):
    with synchronous(server) as client:
        answer = client.embeddings.create(model="fake", input=["ab", "b"], dimensions=3)
        plain = client.embeddings.create(model="fake", input="b", dimensions=3, encoding_format="float")
    assert answer.data[1].embedding == pytest.approx(plain.data[0].embedding)
    assert len(answer.data) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "x" * 600}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"dimensions": "2"}, "dimensions"),
        ({"encoding_format": "binary"}, "encoding_format"),
        ({"pooling": "median"}, "pooling"),
        ({"padding": "max_length"}, "padding"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"normalize": 1}, "normalize"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused(server, fields, param):
    assert_error(server.post(PATH, {"input": "a", **fields}), 400, param)
    assert not server.client.submitted
    assert_well(server)


MESSAGES = [{"role": "user", "content": "hello"}]


class TestMessages:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({}, "user\nhello\n"),
            ({"add_generation_prompt": True}, "user\nhello\nassistant\n"),
            ({"chat_template_kwargs": {"enable_thinking": True}}, "user\nhello\nTHINK"),
            ({"continue_final_message": True}, "user\nhello"),
            ({"truncate_prompt_tokens": 3}, "o\n"),
        ],
    )
    def test_what_a_template_reads(self, server, fields, text):
        assert server.post(PATH, {"messages": MESSAGES, **fields}).status_code == 200
        assert server.prompt(0, skip_special_tokens=True) == text

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"messages": MESSAGES, "input": "a"}, "messages"),
            ({}, "input"),
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ],
    )
    def test_refused(self, server, body, param):
        assert_error(server.post(PATH, body), 400, param)


DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("endianness", [None, "native", "little", "big"])
class TestBytes:
    """The vectors of two inputs, as bytes of each type in each order."""

    BODY: ClassVar = {"input": [[3], [5]], "normalize": False}

    def read(self, data, dtype, endianness):
        values = np.frombuffer(data, f"{'>' if endianness == 'big' else '<'}u{np.dtype(DTYPES[dtype]).itemsize}")
        native = values.astype(values.dtype.newbyteorder("="))
        return native.view(DTYPES[dtype]).astype(np.float32).tolist()

    def expected(self, server, dtype):
        plain = vectors(server.post(PATH, self.BODY))
        return [np.array(vector, np.float32).astype(DTYPES[dtype]).astype(np.float32).tolist() for vector in plain]

    def test_base64(self, server, dtype, endianness):
        body = self.BODY | {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
        data = server.post(PATH, body).json()["data"]
        found = [self.read(base64.b64decode(each["embedding"]), dtype, endianness) for each in data]
        assert found == self.expected(server, dtype)

    def test_bytes(self, server, dtype, endianness):
        body = self.BODY | {"encoding_format": "bytes", "embed_dtype": dtype, "endianness": endianness}
        answer = server.post(PATH, body)
        assert answer.headers["content-type"] == "application/octet-stream"
        metadata = json.loads(answer.headers["metadata"])
        assert metadata["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
        assert metadata["id"].startswith("embd-")
        found = []
        for index, part in enumerate(metadata["data"]):
            assert (part["index"], part["embed_dtype"]) == (index, dtype)
            piece = answer.content[part["start"] : part["end"]]
            found.append(self.read(piece, dtype, endianness))
            assert part["shape"] == [len(found[-1])]
        assert found == self.expected(server, dtype)
        only = server.post(PATH, body | {"encoding_format": "bytes_only"})
        assert "metadata" not in only.headers
        assert only.content == answer.content


def test_numbers_have_the_type_that_was_asked_for(server):
    (vector,) = vectors(server.post(PATH, {"input": [3], "embed_dtype": "fp8_e5m2"}))
    assert vector == np.array(vector, np.float32).astype(ml_dtypes.float8_e5m2).astype(np.float32).tolist()


def test_bytes_of_more_inputs_than_a_header_can_describe(server):
    body = {"input": [[3]] * 600, "encoding_format": "bytes"}
    assert_error(server.post(PATH, body), 400, "input")
    assert server.post(PATH, body | {"encoding_format": "bytes_only"}).status_code == 200


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_both_names_of_normalization(server, name):
    plain, normalized = (vectors(server.post(PATH, {"input": [3], name: value})) for value in (False, True))
    assert normalized == vectors(server.post(PATH, {"input": [3]}))
    assert plain != normalized
    contradiction = {"input": [3], "normalize": True, "use_activation": False}
    assert_error(server.post(PATH, contradiction), 400, "use_activation")


@pytest.mark.parametrize(
    ("trained_for", "works", "fails"), [(None, [4], [1, 2, 3]), ((2,), [2, 4], [1, 3]), ((), [1, 2, 3, 4], [])]
)
def test_dimensions_only_where_the_model_was_trained_for_them(tokenizer, trained_for, works, fails):
    with running(tokenizer, client_options={"embedding_dimensions": trained_for}) as server:
        for length in works:
            (vector,) = vectors(server.post(PATH, {"input": [3], "dimensions": length}))
            assert len(vector) == length
        for length in fails:
            answer = server.post(PATH, {"input": [3], "dimensions": length})
            assert_error(answer, 400, "dimensions")
            assert str(HIDDEN_SIZE) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [64, 128]}, (64, 128)),
        ({"matryoshka_dimensions": "all"}, None),
    ],
)
def test_what_a_config_says_of_dimensions(config, expected):
    assert matryoshka_dimensions(config) == expected
