"""/v1/responses through the openai client and directly: turns, streams, the background, and what is refused."""

import threading

import httpx
import openai
import pydantic
import pytest
from fake_client import Script
from serving import assert_error, assert_well, response_events, running
from waiting import PATIENCE, wait_until

from jaxserve.errors import QueueFull
from jaxserve.server.wire.body import MAX_PARTS

PATH = "/v1/responses"


def test_an_answer(server, openai_client):
    server.says("Hello, world")
    answer = openai_client.responses.create(model="fake", input="hi", instructions="Be nice.", temperature=0.5)
    assert answer.output_text == "Hello, world"
    assert (answer.status, answer.object, answer.model) == ("completed", "response", "fake")
    assert answer.temperature == 0.5
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in server.prompt()
    assert answer.usage.output_tokens == len("Hello, world")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_an_answer_of_several_choices_of_items(server, openai_client):
    server.says("ok")
    openai_client.responses.create(
        model="fake",
        input=[
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "c", "annotations": []}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"role": "assistant", "content": "e"},
            {"role": "user", "content": "d"},
        ],
    )
    expected = "system\nD|user\na\nb|assistant\nc\ne|user\nd|assistant\n"
    assert server.prompt().replace("<|im_end|>\n<|im_start|>", "|").removeprefix("<s><|im_start|>") == expected


def test_too_short_a_limit(server, openai_client):
    server.says("abcdef")
    answer = openai_client.responses.create(model="fake", input="hi", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "abc")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


def test_turns(server, openai_client):
    server.says("one")
    first = openai_client.responses.create(model="fake", input="1?", instructions="Count.")
    server.says("two")
    second = openai_client.responses.create(model="fake", input="2?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    text = server.prompt()
    assert "Count." not in text  # instructions are of one turn
    assert text.index("1?") < text.index("assistant\none") < text.index("2?")
    third = openai_client.responses.create(model="fake", input="3?", previous_response_id=second.id)
    assert all(part in server.prompt() for part in ("1?", "one", "2?", "two", "3?"))
    for options in ({}, {"limit": 2}, {"order": "asc"}, {"order": "asc", "limit": 1}):
        items = openai_client.responses.input_items.list(third.id, **options)
        texts = ["1?", "one", "2?", "two", "3?"]
        assert [item.content[0].text for item in items] == (texts if "order" in options else texts[::-1])
    for query in ("limit=0", "limit=101", "limit=a", f"limit={'0' * 5000}1", "order=up", "after=nothing"):
        assert_error(server.get(f"{PATH}/{third.id}/input_items?{query}"), 400, query.partition("=")[0])


def test_input_items_with_nulls_and_more_than_is_known(server):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "content": "what is this?"}
    items = [
        {"id": None, "type": None, "role": "user", "content": "a", "status": None},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    answer = server.post(PATH, {"input": items})
    assert answer.status_code == 200, answer.text
    found = server.get(f"{PATH}/{answer.json()['id']}/input_items?order=asc").json()
    assert (found["first_id"], found["last_id"]) == ("item_0", "item_2")
    assert [item["type"] for item in found["data"]] == ["message", "function_call", "function_call_output"]
    assert found["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    assert found["data"][1]["content"] == call["content"]


def test_input_items_of_one_id(server):
    items = [{"id": "same", "role": "user", "content": text} for text in "abc"]
    answer = server.post(PATH, {"input": items}).json()
    found = server.get(f"{PATH}/{answer['id']}/input_items?order=asc").json()
    assert [item["id"] for item in found["data"]] == ["same", "item_1", "item_2"]


def test_a_conversation_of_too_many_parts(server):
    """Each turn has as many parts as a request may have, and decoding them all would take ever longer."""
    turn = {"input": [{"role": "user", "content": "hi", "unknown": [{"a": 12}] * (MAX_PARTS[b"{"] - 10)}]}
    first = server.post(PATH, turn).json()
    second = server.post(PATH, turn | {"previous_response_id": first["id"]}).json()
    third = server.post(PATH, turn | {"previous_response_id": second["id"]})
    assert_error(third, 400, "previous_response_id")
    assert third.json()["error"]["code"] == "too_many_parts"
    assert_well(server)


def test_later_turns_are_without_log_probabilities(server):
    server.says("kept")
    asked = {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    first = server.post(PATH, asked).json()
    assert len(first["output"][0]["content"][0]["logprobs"]) == 4
    assert server.get(f"{PATH}/{first['id']}").json() == first
    second = server.post(PATH, {"input": "go on", "previous_response_id": first["id"]}).json()
    _, message, _ = server.get(f"{PATH}/{second['id']}/input_items").json()["data"]
    first["output"][0]["content"][0]["logprobs"] = []
    assert message == first["output"][0]


def test_retrieve_and_delete(server, openai_client):
    server.says("kept")
    answer = openai_client.responses.create(model="fake", input="hi", metadata={"topic": "test"})
    found = openai_client.responses.retrieve(answer.id)
    assert found.model_dump() == answer.model_dump()
    assert found.metadata == {"topic": "test"}
    openai_client.responses.delete(answer.id)
    for path in (f"{PATH}/{answer.id}", f"{PATH}/{answer.id}/input_items"):
        assert_error(server.get(path), 404, "response_id", "not_found_error")
    assert_error(server.request("DELETE", f"{PATH}/{answer.id}"), 404, "response_id", "not_found_error")
    assert_error(server.post(f"{PATH}/{answer.id}/cancel", {}), 404, "response_id", "not_found_error")
    body = {"input": "more", "previous_response_id": answer.id}
    assert_error(server.post(PATH, body), 400, "previous_response_id")


def test_not_stored(server, openai_client):
    answer = openai_client.responses.create(model="fake", input="hi", store=False)
    assert answer.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(answer.id)


def test_a_server_that_stores_nothing(tokenizer):
    with running(tokenizer, max_stored_responses=0) as server:
        answer = server.post(PATH, {"input": "hi"}).json()
        assert answer["store"] is False
        assert_error(server.get(f"{PATH}/{answer['id']}"), 404, "response_id", "not_found_error")
        assert_error(server.post(PATH, {"input": "hi", "background": True}), 400, "background")


def test_stream_with_the_client(server, openai_client):
    server.says("Hello")
    with openai_client.responses.stream(model="fake", input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "Hello"
    assert deltas
    assert openai_client.responses.retrieve(final.id).output_text == "Hello"


def test_events_of_a_stream(server, step_by_step):
    server.says("ab")
    body = {"input": "hi", "stream": True, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    found = response_events(
        server.stream(PATH, body, on_data=lambda content: b"output_text.delta" in content and step_by_step.set())
    )
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    created, last = found[0]["response"], found[-1]["response"]
    assert created["id"] == last["id"]
    assert created["output"] == []
    (message,) = last["output"]
    assert message["content"][0]["text"] == found[6]["text"] == "ab"
    assert {event["item_id"] for event in found if "item_id" in event} == {message["id"]}
    assert [len(event["logprobs"][0]["top_logprobs"]) for event in found[4:6]] == [2, 2]
    assert len(message["content"][0]["logprobs"]) == 2
    assert found[2]["item"]["content"] == []
    assert found[3]["part"]["text"] == ""


def test_an_empty_answer(server):
    server.says("")
    found = response_events(server.post(PATH, {"input": "hi", "stream": True}))
    assert found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["output"] == []


def test_in_the_background(server, openai_client):
    server.says("slowly")
    answer = openai_client.responses.create(model="fake", input="hi", background=True)
    assert answer.status == "queued"
    wait_until(lambda: openai_client.responses.retrieve(answer.id).status == "completed")
    assert openai_client.responses.retrieve(answer.id).output_text == "slowly"
    following = openai_client.responses.create(model="fake", input="and?", previous_response_id=answer.id)
    assert following.status == "completed"
    assert openai_client.responses.cancel(answer.id).status == "completed"  # too late


def test_cancelled_in_the_background(server, openai_client):
    server.play = lambda request: Script(token_ids=[70, 71], hangs=True)
    answer = openai_client.responses.create(model="fake", input="hi", background=True)
    wait_until(lambda: server.client.num_running == 1)
    with pytest.raises(openai.BadRequestError, match="previous response is"):
        openai_client.responses.create(model="fake", input="and?", previous_response_id=answer.id)
    assert openai_client.responses.cancel(answer.id).status == "cancelled"
    assert server.client.num_running == 0
    assert openai_client.responses.retrieve(answer.id).output_text == server.tokenizer.decode([70, 71])


def test_cancelled_while_its_beginning_is_saved(server, openai_client, monkeypatch):
    """What is saved last says how it ended, however long the first save takes."""
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    responses = server.server.state.responses.store
    replace, begun, gate = responses.replace, threading.Event(), threading.Event()

    def slow(response_id, stored, *, is_complete=True):
        if not is_complete:
            begun.set()
            gate.wait(PATIENCE)
        replace(response_id, stored, is_complete=is_complete)

    monkeypatch.setattr(responses, "replace", slow)
    answer = openai_client.responses.create(model="fake", input="hi", background=True)
    assert begun.wait(PATIENCE)
    responses.cancel(answer.id)
    wait_until(lambda: server.client.num_running == 0)
    threading.Timer(0.3, gate.set).start()
    wait_until(lambda: not server.server.state.responses.background)
    assert gate.is_set()
    assert openai_client.responses.retrieve(answer.id).status == "cancelled"


def test_deleted_in_the_background(server, openai_client):
    server.play = lambda request: Script(token_ids=[70, 71], hangs=True)
    answer = openai_client.responses.create(model="fake", input="hi", background=True)
    wait_until(lambda: server.client.num_running == 1)
    openai_client.responses.delete(answer.id)
    wait_until(lambda: server.client.num_running == 0 and not server.server.state.responses.background)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(answer.id)


def test_failed_in_the_background(server, openai_client):
    server.client.refusal = QueueFull("full")
    answer = openai_client.responses.create(model="fake", input="hi", background=True)
    wait_until(lambda: openai_client.responses.retrieve(answer.id).status == "failed")
    assert openai_client.responses.retrieve(answer.id).error.message == "full"


def test_the_background_ends_with_the_server(tokenizer):
    with running(tokenizer) as server:
        server.play = lambda request: Script(token_ids=[70], hangs=True)
        assert server.post(PATH, {"input": "hi", "background": True}).status_code == 200
        wait_until(lambda: server.client.num_running == 1)
    assert server.exit_code == 0
    assert server.client.num_running == 0


def test_only_the_background_can_be_cancelled(server, openai_client):
    answer = openai_client.responses.create(model="fake", input="hi")
    assert_error(server.post(f"{PATH}/{answer.id}/cancel", {}), 400, "response_id")


def test_a_client_that_leaves(server):
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    with httpx.stream("POST", server.url + PATH, json={"input": "hi", "stream": True}, timeout=PATIENCE) as answer:
        assert next(answer.iter_lines()) == "event: response.created"
    wait_until(lambda: server.client.num_running == 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": 5, "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a"}, {"type": []}]}, "input[1].type"),
        ({"instructions": [{"type": {}}]}, "instructions[0].type"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": 5}]}}, "tool_choice.tools[0].type"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "mode": 5}]}},
            "tool_choice.tools[0].mode",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "computer_call", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": "x" * 600}, "input"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input"),
        ({"instructions": 5}, "instructions"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": "all"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_serch"}]}, "tools[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {}}}, "text.format.type"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["x"] * 129}, "stop"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused(server, fields, param):
    assert_error(server.post(PATH, {"input": "a", **fields}), 400, param)
    assert not server.client.submitted
    assert_well(server)


def test_a_stored_response_cannot_be_streamed(server, openai_client):
    answer = openai_client.responses.create(model="fake", input="hi")
    assert_error(server.get(f"{PATH}/{answer.id}?stream=maybe"), 400, "stream")
    assert_error(server.get(f"{PATH}/{answer.id}?stream=true&starting_after=-2"), 400, "starting_after")


def test_structured_output(server, openai_client):
    class Answer(pydantic.BaseModel):
        city: str
        degrees: int

    server.says('{"city": "Rome", "degrees": 30}')
    answer = openai_client.responses.parse(model="fake", input="Weather?", text_format=Answer)
    assert answer.output_parsed == Answer(city="Rome", degrees=30)
    assert server.client.submitted[-1].grammar
