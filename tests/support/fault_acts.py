"""Kinds of bad requests that take their time, are cut off, or come in a row. Each takes a random generator."""

import asyncio
import json

from faults import BODY_LIMIT, CHAT, COMPLETIONS, EMBEDDINGS, GOOD, JSON, RECEIVE_TIMEOUT, RESPONSES, head, post
from waiting import PATIENCE


def long(path):
    return {"max_output_tokens" if path == RESPONSES else "max_tokens": 100, "ignore_eos": True}


def announced(path, length):
    return head("POST", path, [*JSON, ("content-length", length)])


async def chunked_body_over_the_cap(wire, _random):
    await wire.send(head("POST", COMPLETIONS, [*JSON, ("transfer-encoding", "chunked")]))
    chunk = b"a" * 2**16
    for _ in range(BODY_LIMIT // len(chunk)):
        await wire.send(b"%x\r\n%b\r\n" % (len(chunk), chunk))
    await wire.send(b"1\r\na")  # not a byte more than is read: unread bytes would cause a reset, ahead of the answer
    assert (await wire.answer()).status == 413


async def endless_head(wire, _random):
    await wire.send(b"GET / HTTP/1.1\r\n")
    try:
        for _ in range(64):
            await wire.send(b"x: " + b"y" * 2**13 + b"\r\n")
    except ConnectionError:
        return
    assert (await wire.answer()).status in (431, 0)


async def slow_head(wire, random):
    await wire.send(random.choice([b"", b"G", b"POST /v1/completions HTTP/1.1\r\nhost"]))
    assert (await wire.answer()).status in (408, 0)


async def slow_body(wire, random):
    await wire.send(announced(random.choice(list(GOOD)), 100) + b'{"prompt": ')
    assert (await wire.answer()).status == 408


async def dripping_body(wire, _random):
    """A byte now and then does not keep a request alive."""
    await wire.send(announced(COMPLETIONS, 1000))
    for _ in range(20):
        await asyncio.sleep(RECEIVE_TIMEOUT / 8)
        try:
            await wire.send(b" ")
        except ConnectionError:
            break
    assert (await wire.answer()).status in (408, 0)


async def leave_in_the_head(wire, random):
    await wire.send(b"POST /v1/completions HTTP/1.1\r\nauthor")
    random.choice([wire.close, wire.reset])()


async def leave_in_the_body(wire, random):
    await wire.send(announced(COMPLETIONS, 100) + b'{"prompt"')
    random.choice([wire.close, wire.reset])()


async def leave_before_the_answer(wire, random):
    path = random.choice(list(GOOD))
    await wire.send(post(path, GOOD[path] | ({} if path == EMBEDDINGS else long(path))))
    await asyncio.sleep(random.random() * 0.05)
    random.choice([wire.close, wire.reset])()


async def leave_in_the_stream(wire, random):
    path = random.choice([COMPLETIONS, CHAT, RESPONSES])
    number = {} if path == RESPONSES else {"n": random.choice([1, 3])}
    await wire.send(post(path, GOOD[path] | long(path) | number | {"stream": True}))
    async with asyncio.timeout(PATIENCE):
        assert (await wire.reader.readline()).startswith(b"HTTP/1.1 200")
        for _ in range(random.randint(0, 20)):
            await wire.reader.readline()
    random.choice([wire.close, wire.reset])()


async def a_reader_who_does_not_read(wire, _random):
    await wire.send(post(COMPLETIONS, GOOD[COMPLETIONS] | long(COMPLETIONS) | {"stream": True, "n": 4, "logprobs": 5}))
    await asyncio.sleep(0.3)
    wire.reset()


async def garbage_behind_a_good_request(wire, _random):
    await wire.send(post(COMPLETIONS, GOOD[COMPLETIONS]) + b"\x00\x01 garbage\r\n\r\n")
    assert [(await wire.answer()).status for _ in range(3)] == [200, 400, 0]


async def pipelined(wire, _random):
    """Pipelined requests, the middle one bad, are answered in order."""
    good = post(COMPLETIONS, GOOD[COMPLETIONS])
    await wire.send(good + post(COMPLETIONS, b"{}") + good)
    assert [(await wire.answer()).status for _ in range(3)] == [200, 400, 200]


async def duplicate_ids(wire, _random):
    """Two requests at once under one id, and two ids in one request."""
    content = json.dumps(GOOD[COMPLETIONS] | {"request_id": "same"}).encode()
    await wire.send(post(COMPLETIONS, content, [("x-request-id", "same"), ("x-request-id", "other")]))
    assert (await wire.answer()).status == 200


WAITING_ACTS = {act.__name__: act for act in (slow_head, slow_body, dripping_body)}
"""Acts that wait for the server's timeout, and cost nothing meanwhile."""

ACTS = {
    act.__name__: act
    for act in (
        chunked_body_over_the_cap,
        endless_head,
        leave_in_the_head,
        leave_in_the_body,
        leave_before_the_answer,
        leave_in_the_stream,
        a_reader_who_does_not_read,
        garbage_behind_a_good_request,
        pipelined,
        duplicate_ids,
    )
}
