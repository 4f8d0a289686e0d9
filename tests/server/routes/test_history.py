"""Whatever the server has answered, it takes back; a turn is one message of the chat, on every route."""

import json
import time
from typing import ClassVar

import pytest
from serving import assert_error, response_events, running
from waiting import wait_until

from jaxserve.answers.tools.cut_json import as_object

USER = {"role": "user", "content": "hello"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}"
    "{% for call in m.tool_calls or [] %}|{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}]"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("{}", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1', {"a": 1}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b":', {"a": 1}),
        ('{"a": 1, "b": tr', {"a": 1}),
        ('{"a": "hel', {"a": "hel"}),
        ('{"a": "h\\', {}),
        ('{"a": {"b": [1, 2, {"c": "d"', {"a": {"b": [1, 2, {"c": "d"}]}}),
        ('{"a": ["x{", "}', {"a": ["x{", "}"]}),
        ("{", {}),
        ('{"', {}),
        ("5", {"arguments": "5"}),
        ("[1]", {"arguments": "[1]"}),
        ('"text"', {"arguments": '"text"'}),
        ("Bowtwiver", {"arguments": "Bowtwiver"}),
        ('{"a": 1}}', {"a": 1}),
        ('{"a": 1} and so on', {"a": 1}),
        (r'{"a": "\udc00 \ud83d\ude00 \\ud83d \ud83d", "b": 1}', {"a": "\ufffd \U0001f600 \\ud83d \ufffd", "b": 1}),
        ('{"a": "x\ny\t", "b": 1e400, "c": NaN, "d": 2', {"a": "x\ny\t", "b": "1e400", "c": "NaN", "d": 2}),
        (r'["\ud83d', {"arguments": r'["\ud83d'}),
    ],
)
def test_arguments_become_an_object(text, expected):
    assert as_object(text) == expected


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a": [' + "1," * 100_000, '"' * 100_000])
def test_arguments_of_any_text_take_their_time_by_its_length(text):
    start = time.thread_time()  # other work on the machine and in this process does not count
    assert isinstance(as_object(text), dict)
    assert time.thread_time() - start < 10


@pytest.fixture(scope="module")
def shows_all(tokenizer):
    """A server whose template shows thoughts, words and calls of each message."""
    with running(tokenizer.with_chat_template(TEMPLATE), tool_call_parser="hermes", reasoning_parser="qwen3") as server:
        yield server


def read_of(server, path, body):
    server.client.submitted.clear()
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return server.prompt(0)


ANSWERS = [
    "plain words",
    "",
    "<think>only thoughts, cut",
    "<think>thoughts</think>",
    "<think>thoughts</think>words",
    '<tool_call>\n{"name": "f", "arguments": {"a": "cut',
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    '<think>hm</think>Wait.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": 5}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {"b": [',
]


@pytest.mark.parametrize("text", ANSWERS, ids=lambda text: text[:40])
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_the_server_has_answered_it_takes_back(shows_all, text, is_cut):
    """In a chat, as the input of a response, and by its id; the model reads the same each time."""
    shows_all.says(text)
    limit = {"max_tokens": max(1, len(text))} if is_cut else {}
    message = shows_all.post(CHAT, {"messages": [USER], "tools": [TOOL]} | limit).json()["choices"][0]["message"]
    tools = [{"type": "function", **TOOL["function"]}]
    response = shows_all.post(RESPONSES, {"input": "hello", "tools": tools} | limit).json()
    after = {"role": "user", "content": "go on"}
    by_chat = read_of(shows_all, CHAT, {"messages": [USER, message, after]})
    by_items = read_of(shows_all, RESPONSES, {"input": [USER, *response["output"], after]})
    by_id = read_of(shows_all, RESPONSES, {"input": [after], "previous_response_id": response["id"]})
    references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
    by_reference = read_of(shows_all, RESPONSES, {"input": [USER, *references, after]})
    assert by_items == by_id == by_reference
    if response["output"] and text:
        assert by_chat == by_items


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "refusal": "I will not"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "annotations": [], "audio": None},
    ],
    ids=str,
)
def test_answers_without_words(shows_all, message):
    prompt = read_of(shows_all, CHAT, {"messages": [USER, message, USER]})
    assert ("I will not" in prompt) == ("I will not" in json.dumps(message))


def call(name="f"):
    return {"type": "function_call", "call_id": "c1", "name": name, "arguments": "{}"}


def words(text, role="assistant"):
    return {"type": "message", "role": role, "content": text}


def thoughts(text):
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


RESULT = {"type": "function_call_output", "call_id": "c1", "output": "5"}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([words("Wait."), call()], "[assistant||Wait.|f{}]"),
        ([thoughts("hm"), words("Wait."), call("f"), call("g")], "[assistant|hm|Wait.|f{}|g{}]"),
        ([thoughts("a"), call("f"), thoughts("b"), call("g")], "[assistant|a\nb||f{}|g{}]"),
        ([thoughts("a"), call(), RESULT, thoughts("b"), call("g")], "[assistant|a||f{}][tool||5][assistant|b||g{}]"),
        ([words("one"), words("two")], "[assistant||one][assistant||two]"),
        ([thoughts("a"), words("hi", "user")], "[assistant|a|][user||hi]"),
        ([words("a", "user"), call(), RESULT, words("b")], "[user||a][assistant|||f{}][tool||5][assistant||b]"),
    ],
)
def test_a_turn_is_one_message(shows_all, items, expected):
    prompt = read_of(shows_all, RESPONSES, {"input": items})
    assert prompt.replace("|None", "|") == expected


class TestReferences:
    def test_an_unknown_item_is_not_found(self, server):
        answer = server.post(RESPONSES, {"input": [USER, {"type": "item_reference", "id": "msg_nobody"}]})
        assert_error(answer, 404, "input[1].id", "not_found_error")
        assert "msg_nobody" in answer.json()["error"]["message"]

    def test_an_item_of_another_key_is_not_found(self, tokenizer):
        with running(tokenizer, api_key=["one", "two"]) as server:
            one, two = ({"x-api-key": key} for key in ("one", "two"))
            (item,) = server.post(RESPONSES, {"input": "hello"}, headers=one).json()["output"]
            body = {"input": [{"type": "item_reference", "id": item["id"]}, USER]}
            assert server.post(RESPONSES, body, headers=two).status_code == 404
            assert server.post(RESPONSES, body, headers=one).status_code == 200

    def test_items_go_with_their_response(self, server):
        response = server.post(RESPONSES, {"input": "hello"}).json()
        body = {"input": [{"id": response["output"][0]["id"]}, USER]}
        assert server.post(RESPONSES, body).status_code == 200
        assert server.request("DELETE", f"{RESPONSES}/{response['id']}").status_code == 200
        assert server.post(RESPONSES, body).status_code == 404

    def test_a_turn_that_was_referred_to_outlives_its_response(self, server):
        server.says("quokka")
        first = server.post(RESPONSES, {"input": "hello"}).json()
        body = {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}, USER]}
        second = server.post(RESPONSES, body).json()
        server.request("DELETE", f"{RESPONSES}/{first['id']}")
        prompt = read_of(server, RESPONSES, {"input": "go on", "previous_response_id": second["id"]})
        assert prompt.count("quokka") == 2


def test_what_comes_back_in_a_response(server):
    fields = {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "flex",
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    response = server.post(RESPONSES, {"input": "hello", **fields}).json()
    assert {name: response[name] for name in fields} == fields
    assert server.get(f"{RESPONSES}/{response['id']}").json()["user"] == "u"
    assert_error(server.post(RESPONSES, {"input": "hello", "user": "x" * 513}), 400, "user")


def test_instructions_as_a_list(server):
    server.says("ok")
    given = [words("Be brief.", "system"), words("Be kind.", "developer")]
    response = server.post(RESPONSES, {"input": "hello", "instructions": given}).json()
    read = server.prompt(0, skip_special_tokens=True)
    assert read.startswith("system\nBe brief.\nsystem\nBe kind.\nuser\nhello\n")
    assert response["instructions"] == given
    later = read_of(server, RESPONSES, {"input": "go on", "previous_response_id": response["id"]})
    assert "Be brief." not in later
    bad = server.post(RESPONSES, {"input": "hello", "instructions": [{"role": "system", "content": 5}]})
    assert_error(bad, 400, "instructions[0].content")


class TestBackgroundStreams:
    BODY: ClassVar = {"input": "hello", "background": True, "stream": True}

    def test_it_goes_on_without_its_reader(self, server, step_by_step):
        server.says("quokka")
        with pytest.raises(ConnectionAbortedError):
            server.stream(RESPONSES, self.BODY, on_data=self._leave)
        step_by_step.set()
        path = f"{RESPONSES}/{self.response_id}"
        wait_until(lambda: server.get(path).json()["status"] == "completed")
        assert server.get(path).json()["output"][0]["content"][0]["text"] == "quokka"

    def _leave(self, content):
        if b"response.in_progress" in content:
            self.response_id = json.loads(content.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
            raise ConnectionAbortedError

    def test_a_cancelled_one_says_so(self, server):
        server.says("quokka" * 50)
        server.client.pause, pause = (lambda: time.sleep(0.05)), server.client.pause
        cancelled = []

        def cancel(content):
            if b"response.in_progress" in content and not cancelled:
                response_id = json.loads(content.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
                cancelled.append(server.post(f"{RESPONSES}/{response_id}/cancel", {}))

        try:
            answer = server.stream(RESPONSES, self.BODY, on_data=cancel)
        finally:
            server.client.pause = pause
        assert cancelled[0].json()["status"] == "cancelled"
        assert response_events(answer)[-1]["type"] == "response.cancelled"
