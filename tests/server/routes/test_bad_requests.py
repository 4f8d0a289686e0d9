"""Everything that is refused: status, the field that is named, and that the server goes on."""

import json
import re

import pytest
from bad_fields import CASES, CHAT, COMPLETIONS, HUGE, USER
from depths import examples
from fake_client import echo
from fault_tables import FIELDS, TABLES
from faults import BODY_LIMIT, KEY, Wire
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import assert_error, assert_well, running

from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.protocol.completions import CompletionRequest

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, HUGE, 1e308, -0.5, 0.5, 1.5])
    | st.text(max_size=4),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("path", "kind", "good"),
    [(COMPLETIONS, CompletionRequest, {"prompt": "a"}), (CHAT, ChatRequest, {"messages": [USER]})],
)
def test_whatever_is_sent_gets_an_answer(shared_server, path, kind, good):
    """Any fields with any values: a result or a refusal, never a fault."""
    names = st.sampled_from(kind.__struct_fields__)

    @settings(max_examples=examples(150))
    @given(fields=st.dictionaries(names, JSON_VALUES, max_size=3))
    def check(fields):
        answer = shared_server.post(path, {**good, "max_tokens": 2, **fields})
        assert answer.status_code in (200, 400, 404), (fields, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["type"] == ("invalid_request_error" if answer.status_code == 400 else "not_found_error")
            assert error["param"] is None or re.match(r"\w+", error["param"])[0] in {*fields, *good, "max_tokens"}

    shared_server.play = echo
    check()
    assert_well(shared_server)


def name(case):
    path, body, _ = case
    return f"{path.rsplit('/', 1)[-1]} {json.dumps(body)[:60]}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_refused(server, case):
    path, body, param = case
    assert_error(server.post(path, body), 400, param)
    assert not server.client.submitted
    assert_well(server)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (COMPLETIONS, {"max_tokens": "5"}, "max_tokens must be an integer, got a text"),
        (COMPLETIONS, {"temperature": []}, "temperature must be a number, got a list"),
        (COMPLETIONS, {"seed": 1.5}, "seed must be an integer, got a number"),
        (COMPLETIONS, {"echo": 1}, "echo must be true or false, got an integer"),
        (COMPLETIONS, {"n": True}, "n must be an integer, got a boolean"),
        (COMPLETIONS, {"stop": 5}, "stop must be a text or a list, got an integer"),
        (COMPLETIONS, {"stop": ["a", None]}, "stop[1] must be a text, got null"),
        (CHAT, {"messages": {}}, "messages must be a list, got an object"),
        (CHAT, {"messages": [USER, 5]}, "messages[1] must be an object, got an integer"),
        (CHAT, {"messages": [{"role": 1}]}, "messages[0].role must be a text, got an integer"),
        (
            CHAT,
            {"reasoning_effort": "hard"},
            "reasoning_effort must be one of high, low, max, medium, minimal, none, xhigh, got 'hard'",
        ),
        (CHAT, {"reasoning": {"effort": "a\nb"}}, "reasoning.effort must be one of high, low"),
        (CHAT, {"tools": [{"function": {}}]}, "tools[0].function.name: this field is required"),
        ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input[0].content must be a text or a list"),
        ("/v1/responses", {"metadata": {"a": 5}}, "a value of metadata must be a text, got an integer"),
        ("/v1/responses", {"metadata": {"a" * 65: ""}}, "a key of metadata must be a text of at most 64 characters"),
        ("/v1/responses", {"cache_salt": ""}, "cache_salt must not be empty"),
        (COMPLETIONS, {"request_id": "a b"}, "request_id must be a text of 1 to 128 visible ASCII characters"),
        ("/v1/embeddings", {"endianness": "middle"}, "endianness must be one of big, little, native, got 'middle'"),
        ("/v1/messages", {"max_tokens": "5"}, "max_tokens must be an integer, got a text"),
    ],
)
def test_wrong_types_are_named_in_the_words_of_all_other_errors(server, path, fields, message):
    good = (
        {"messages": [USER]}
        if path in (CHAT, "/v1/messages")
        else {"input" if "completions" not in path else "prompt": "a"}
    )
    error = server.post(path, {**good, **fields}).json()["error"]
    assert error["message"].startswith(message)
    assert "`" not in error["message"]


@pytest.mark.parametrize(("content", "got"), [(b"[]", "a list"), (b"5", "an integer"), (b"null", "null")])
@pytest.mark.parametrize("path", [COMPLETIONS, "/detokenize", "/v1/messages"])
def test_a_body_that_is_no_object(server, path, content, got):
    answer = server.post(path, None, content=content, headers={"content-type": "application/json"})
    assert answer.json()["error"]["message"] == f"the request body must be an object, got {got}"


@pytest.fixture(scope="module")
def locked(tokenizer):
    with running(tokenizer, api_key=[KEY], max_body_size=BODY_LIMIT) as server:
        yield server


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind not in FIELDS])
async def test_what_is_bad_in_other_ways(locked, kind):
    """Each request on a connection of its own, and the next is answered as if nothing had been."""
    for sent in TABLES[kind]:
        wire = await Wire.open(locked.server.address)
        await sent.act(wire)
        wire.close()
    assert locked.get("/health").status_code == 200
    assert not locked.client.submitted


@pytest.mark.parametrize("number", [b"9" * 10_000, b"1e999", b"-" + b"9" * 400])
@pytest.mark.parametrize("field", [b"seed", b"temperature", b"max_tokens"])
def test_numbers_beyond_all_bounds(server, number, field):
    content = b'{"prompt": "a", "%b": %b}' % (field, number)
    answer = server.post(COMPLETIONS, None, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in (field.decode(), None)
    assert_well(server)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((path, {"prompt": "a"}) for path in (COMPLETIONS, "/tokenize")),
        *((path, {"input": "a"}) for path in ("/v1/responses", "/v1/embeddings")),
        *((CHAT, {"messages": [USER]}), ("/detokenize", {"tokens": []})),
    ],
)
def test_unknown_model(server, path, body):
    answer = server.post(path, body | {"model": "gpt-9"})
    assert_error(answer, 404, "model", "not_found_error")
    assert answer.json()["error"]["code"] == "model_not_found"
    assert_well(server)
