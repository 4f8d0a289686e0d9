"""Responses that fail while they run: how a stream ends, and what is stored."""

import json
import sqlite3
import threading
import time

import pytest
from fake_client import Script
from serving import assert_error, response_events, running
from waiting import wait_until

from jaxserve.errors import RequestFailed
from jaxserve.server.protocol.responses import Reasoning, ResponseBody, ResponseError, TextConfig, TextFormat
from jaxserve.server.responses import answer
from jaxserve.server.responses.store import ResponseStore
from jaxserve.server.responses.writer import ResponseWriter

PATH = "/v1/responses"
UNAVAILABLE = {"code": "server_error", "message": "the server cannot take requests now"}


def failed(answer):
    """Return the response with which a stream has ended, which must have failed."""
    *_, closed, last = response_events(answer)
    assert closed["type"] == "response.output_item.done"
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
    return last["response"]


@pytest.mark.parametrize("store", [True, False])
def test_a_failure_in_the_middle_of_a_stream(server, store):
    server.play = lambda request: Script(token_ids=[70, 71], error="not a number")
    response = failed(server.post(PATH, {"input": "hi", "stream": True, "store": store}))
    assert response["error"] == {"code": "server_error", "message": "not a number"}
    kept = server.get(f"{PATH}/{response['id']}")
    assert (kept.json() if store else kept.status_code) == (response if store else 404)


def test_a_bug_in_the_middle_of_a_stream(server, monkeypatch):
    monkeypatch.setattr(ResponseWriter, "finish", lambda *_: 1 / 0)
    server.says("Hello")
    response = failed(server.post(PATH, {"input": "hi", "stream": True}))
    assert response["error"] == {"code": "server_error", "message": "internal server error"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_stored_comes_all_the_same(server, monkeypatch, caplog, stream):
    def put(*_args, **_options):
        raise sqlite3.OperationalError("the disk is full")

    monkeypatch.setattr(ResponseStore, "put", put)
    server.says("Hello")
    answer = server.post(PATH, {"input": "hi", "stream": stream})
    response = response_events(answer)[-1]["response"] if stream else answer.json()
    assert response["status"] == "completed"
    assert response["store"] is False
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert "the disk is full" in caplog.text
    assert_error(server.get(f"{PATH}/{response['id']}"), 404, "response_id", "not_found_error")


def test_a_response_in_the_background_that_cannot_be_stored(server, monkeypatch):
    """It is not begun, or is stored as soon as possible."""
    begin, replace, is_full = ResponseStore.begin, ResponseStore.replace, threading.Event()

    def unless_full(store):
        def method(*args, **options):
            if is_full.is_set():
                raise sqlite3.OperationalError("the disk is full")
            return store(*args, **options)

        return method

    monkeypatch.setattr(ResponseStore, "begin", unless_full(begin))
    monkeypatch.setattr(ResponseStore, "replace", unless_full(replace))
    monkeypatch.setattr(answer, "STORE_INTERVAL", 0.01)
    body = {"input": "hi", "background": True}
    is_full.set()
    assert_error(server.post(PATH, body), 503, None, "service_unavailable_error")
    wait_until(lambda: not server.server.state.responses.background)
    assert not server.client.submitted
    is_full.clear()
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    response_id = server.post(PATH, body).json()["id"]
    wait_until(lambda: server.client.num_output_tokens > 0)
    is_full.set()
    server.server.state.responses.store.cancel(response_id)
    wait_until(lambda: server.client.num_running == 0)
    time.sleep(0.1)
    is_full.clear()
    wait_until(lambda: server.get(f"{PATH}/{response_id}").json()["status"] == "cancelled")


@pytest.mark.parametrize(
    "end",
    [
        lambda server: server.server.stop_now(),
        lambda server: server.client.die("the device is gone"),
        lambda server: server.client.die("the device is gone", silently=True),
    ],
    ids=["stop", "death", "silent death"],
)
def test_a_stream_that_is_cut_by_the_end_of_the_server(tokenizer, monkeypatch, end):
    kept = {}
    monkeypatch.setattr(ResponseStore, "put", lambda _, key, stored, **_options: kept.update({key: stored}))
    with running(tokenizer) as server:
        server.play = lambda request: Script(token_ids=[70], hangs=True)
        has_ended = False

        def end_once(content):
            nonlocal has_ended
            if b"output_text.delta" in content and not has_ended:
                has_ended = True
                end(server)

        response = failed(server.stream(PATH, {"input": "hi", "stream": True}, on_data=end_once))
        assert response["error"] == UNAVAILABLE
        assert response["output"][0]["content"][0]["text"] == server.tokenizer.decode([70])
        assert b'"status":"failed"' in kept[response["id"]].body


def test_a_response_that_is_cut_while_it_is_stored(tokenizer, monkeypatch):
    """What is stored last is what the client was told."""
    kept = []
    with running(tokenizer) as server:

        def put(_, _key, stored, **_options):
            server.server.stop_now()
            wait_until(server.server.state.life.stopping.is_set)
            kept.append(json.loads(stored.body))

        monkeypatch.setattr(ResponseStore, "put", put)
        server.says("Hello")
        *_, last = response_events(server.post(PATH, {"input": "hi", "stream": True}))
        assert last["response"] == kept[-1]


def test_what_is_being_closed_is_not_closed_again(server, monkeypatch):
    """If a stream stops between the events that close an item, the remaining ones are sent once. It is stored
    before.
    """
    kept = []

    async def drain(_frames):
        assert kept == ["completed"]
        raise RequestFailed("the server stops")

    put = ResponseStore.put
    monkeypatch.setattr(
        ResponseStore,
        "put",
        lambda self, key, stored, **options: (
            kept.append(json.loads(stored.body)["status"]) or put(self, key, stored, **options)
        ),
    )
    monkeypatch.setattr("jaxserve.server.wire.streaming._Frames.drain", drain)
    server.says("ab")
    found = response_events(server.post(PATH, {"input": "hi", "stream": True}))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[-5:] == ["output_text.delta", "output_text.done", "content_part.done", "output_item.done", "failed"]
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "ab"
    assert kept == ["completed", "failed"]


@pytest.mark.parametrize("begin", ["text", "reasoning"])
def test_a_stream_that_stops_when_an_item_is_opened(begin):
    response = ResponseBody(
        id="resp_x",
        created_at=0,
        status="in_progress",
        background=False,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="m",
        output=[],
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=Reasoning(),
        store=True,
        temperature=1.0,
        text=TextConfig(format=TextFormat(type="text")),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
    )
    writer = ResponseWriter(response)
    told = next(writer.text("a", []) if begin == "text" else writer.reasoning("a"))
    assert told["type"] == "response.output_item.added"
    [closed] = writer.fail(ResponseError(code="server_error", message="it stops"))
    assert closed["type"] == "response.output_item.done"
    assert response.status == "failed"
