"""POST /v1/embeddings: every form of input and answer, and what is refused."""

import base64
import math
import struct

import openai
import pytest
from engine.fake_client import HIDDEN_SIZE, Script
from server.serving import assert_error, assert_well, running
from waiting import PATIENCE

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


@pytest.mark.parametrize(
    ("given", "last_tokens"),
    [([7, 9], [9]), ([[7, 9], [3]], [9, 3]), ([[5]] * 20, [5] * 20)],
)
def test_token_ids(server, given, last_tokens):
    assert vectors(server.post(PATH, {"input": given})) == [unit(powers(token)) for token in last_tokens]


def test_texts_and_usage(server):
    answer = server.post(PATH, {"input": ["ab", "xyz"], "model": "fake"})
    expected = [server.tokenizer.encode(text)[-1] for text in ("ab", "xyz")]
    assert vectors(answer) == [unit(powers(token)) for token in expected]
    assert answer.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7}  # BOS each
    assert vectors(server.post(PATH, {"input": "xyz"})) == [unit(powers(expected[1]))]


def test_mean(server):
    assert vectors(server.post(PATH, {"input": [4, 8], "pooling": "mean"})) == [unit(powers(6))]


def test_the_operator_chooses_the_pooling(tokenizer):
    with running(tokenizer, pooling="mean") as server:
        assert vectors(server.post(PATH, {"input": [4, 8]})) == [unit(powers(6))]
        assert vectors(server.post(PATH, {"input": [4, 8], "pooling": "last"})) == [unit(powers(8))]


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


def test_openai_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
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
        ({"pooling": "max"}, "pooling"),
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


def test_without_input(server):
    assert_error(server.post(PATH, {}), 400, "input")


def test_unknown_model(server):
    assert_error(server.post(PATH, {"input": "a", "model": "gpt-9"}), 404, "model", "not_found_error")


def test_a_failure_of_the_engine(server):
    server.play = lambda request: Script(token_ids=[], error="the model's output for this request was not a number")
    answer = server.post(PATH, {"input": ["a", "b"]})
    assert answer.status_code == 500
    assert_well_after(server)


def assert_well_after(server):
    from engine.fake_client import echo

    server.play = echo
    assert_well(server)
