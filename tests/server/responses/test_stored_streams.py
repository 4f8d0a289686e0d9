"""GET /v1/responses/{id}?stream=true: the events of a stored response, past and future ones."""

import json
import threading

import pytest
from fake_client import Script
from waiting import PATIENCE, wait_until

PATH = "/v1/responses"


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def stream(server, response_id, query=""):
    return events(server.get(f"{PATH}/{response_id}?stream=true{query}").text)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
def test_a_complete_response_is_told_again(server, fields):
    server.says("Hello there")
    created = server.post(PATH, {"input": "hi"} | fields)
    response_id = events(created.text)[0]["response"]["id"] if "stream" in fields else created.json()["id"]
    wait_until(lambda: server.get(f"{PATH}/{response_id}").json()["status"] == "completed")
    told = stream(server, response_id)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [told[0]["type"], told[-1]["type"]] == ["response.created", "response.completed"]
    assert "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta") == "Hello there"
    assert told[-1]["response"] == server.get(f"{PATH}/{response_id}").json()
    items = {event["item"]["id"] for event in told if event["type"] == "response.output_item.added"}
    assert items == {item["id"] for item in told[-1]["response"]["output"]}
    assert stream(server, response_id, "&starting_after=3") == told[4:]
    if fields == {"background": True, "stream": True}:
        assert told == events(created.text)


def test_a_running_response_is_followed_to_its_end(server, monkeypatch):
    go_on = threading.Event()
    server.play = lambda request: Script(token_ids=[70] * 8)
    monkeypatch.setattr(server.client, "pause", lambda: go_on.wait(PATIENCE))
    response_id = server.post(PATH, {"input": "hi", "background": True}).json()["id"]
    begun = threading.Event()
    found = []

    def follow():
        found.extend(stream(server, response_id))
        begun.set()

    thread = threading.Thread(target=follow)
    thread.start()
    wait_until(lambda: server.server.state.responses.store.events(response_id, 1))
    assert not begun.is_set()
    go_on.set()
    thread.join(PATIENCE)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert len(deltas) >= 2
    assert "".join(deltas) == "b" * 8
    assert found[-1]["type"] == "response.completed"


def test_one_that_is_cancelled_or_fails_ends_its_stream(server):
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    response_id = server.post(PATH, {"input": "hi", "background": True}).json()["id"]
    wait_until(lambda: server.client.num_running)
    server.post(f"{PATH}/{response_id}/cancel", {})
    assert stream(server, response_id)[-1]["type"] == "response.cancelled"
    assert server.get(f"{PATH}/nothing?stream=true").status_code == 404
