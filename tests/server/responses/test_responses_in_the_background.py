"""How many responses may run in the background, and how further ones are refused."""

import asyncio
import concurrent.futures
import threading

import httpx
from fake_client import Script
from serving import assert_error, running
from waiting import PATIENCE, wait_until

from jaxserve.errors import Draining
from jaxserve.server.responses import answer as answers
from jaxserve.server.responses.store import ResponseStore, StoredResponse

PATH = "/v1/responses"
BODY = {"input": "hi", "background": True}


def burst(server, number):
    """Return the answers to `number` requests sent at once."""

    async def ask():
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, verify=False) as client:
            return await asyncio.gather(*(client.post(PATH, json=BODY) for _ in range(number)))

    return asyncio.run(ask())


def status(server, answer):
    return server.get(f"{PATH}/{answer.json()['id']}").json()["status"]


def assert_limit(server, limit):
    """Send twice as many requests as `limit`: `limit` of them are accepted and answered, and then new ones are
    accepted.
    """
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    answers = burst(server, 2 * limit)
    taken = [answer for answer in answers if answer.status_code == 200]
    assert len(taken) == limit
    for answer in answers:
        if answer not in taken:
            assert_error(answer, 429, None, "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
    wait_until(lambda: server.client.num_running == limit)
    server.says("enough")
    assert server.post(PATH, {"input": "hi"}).status_code == 200  # others are answered meanwhile
    assert server.post(f"{PATH}/{taken[0].json()['id']}/cancel", {}).json()["status"] == "cancelled"
    wait_until(lambda: len(server.server.state.responses.background) < limit)
    (another,) = burst(server, 1)
    wait_until(lambda: status(server, another) == "completed")
    wait_until(lambda: {status(server, answer) for answer in taken[1:]} == {"in_progress"})


def test_a_burst(server, monkeypatch):
    monkeypatch.setattr("jaxserve.server.responses.answer.MAX_IN_BACKGROUND", 8)
    assert_limit(server, 8)
    for request in list(server.client.submitted):
        server.server.state.responses.store.cancel(request.request_id.removesuffix("-0"))
    wait_until(lambda: not server.server.state.responses.background)


def test_no_more_than_can_be_stored(tokenizer):
    with running(tokenizer, max_stored_responses=5) as server:
        assert_limit(server, 5)


def test_what_other_workers_run_counts_too(server, monkeypatch):
    monkeypatch.setattr("jaxserve.server.responses.answer.MAX_IN_BACKGROUND", 2)
    store = server.server.state.responses.store
    elsewhere = StoredResponse(b"{}", b"[]", 1)
    for name in "ab":
        store.begin(name, elsewhere, owner="", max_incomplete=2)
    assert_error(server.post(PATH, BODY), 429, None, "rate_limit_error")
    wait_until(lambda: not server.server.state.responses.background)
    assert not server.client.submitted
    store.replace("a", elsewhere)
    server.says("enough")
    answer = server.post(PATH, BODY)
    wait_until(lambda: status(server, answer) == "completed")
    store.delete("b", owner="")


def test_one_whose_caller_goes_before_it_has_an_id_is_forgotten(server, monkeypatch):
    callers, is_begun, may_return = [], threading.Event(), threading.Event()
    start, begin = answers.Answer.start_in_background, ResponseStore.begin

    async def watched(answer):
        task = asyncio.create_task(start(answer))
        callers.append((answer.response.id, task))
        await asyncio.wait({task})
        assert task.cancelled()
        raise Draining("the caller is gone")

    def slow(*args, **options):
        has_room = begin(*args, **options)
        is_begun.set()
        assert may_return.wait(PATIENCE)
        return has_room

    monkeypatch.setattr(answers.Answer, "start_in_background", watched)
    monkeypatch.setattr(ResponseStore, "begin", slow)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, PATH, BODY)
        assert is_begun.wait(PATIENCE)
        ((response_id, task),) = callers
        task.get_loop().call_soon_threadsafe(task.cancel)
        assert answer.result().status_code == 503
        assert server.get(f"{PATH}/{response_id}").status_code == 200
        may_return.set()
    wait_until(lambda: not server.server.state.responses.background)
    assert server.get(f"{PATH}/{response_id}").status_code == 404
    assert not server.client.submitted
