"""HTTP on the wire: offers to change the protocol, however the bytes are cut, and answers to HTTP/1.0."""

import contextlib
import re
import socket
import struct
import threading
import time

import pytest
from fake_client import Script, echo
from serving import assert_well
from waiting import wait_until

from jaxserve.server.wire import http
from jaxserve.server.wire.http import MAX_HEAD_BYTES, HttpProtocol

OFFERS = {
    "http2": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n",
    "several": b"upgrade: websocket\r\nCONNECTION: keep-alive, upgrade\r\nUPGRADE: h2c\r\n",
    "empty": b"Upgrade: h2c\r\nConnection: Upgrade\r\nX-Empty:\r\n",
}
BODY = b'{"prompt": "ab", "max_tokens": 2}'
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE = b"Connection: close\r\n"


def post(headers=b"", body=BODY, *, version=b"1.1"):
    head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\n" % version
    return head + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def post_in_chunks(headers):
    head, _, body = post(headers).partition(b"\r\n\r\n")
    head = re.sub(b"Content-Length: .*", b"Transfer-Encoding: chunked", head)
    return head + b"\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (body[:5], len(body) - 5, body[5:])


def answers(server, sent):
    """Return the status, head and body of each answer, until the server closes the connection."""
    with server.connection() as connection:
        connection.sendall(sent)
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    parts = re.split(rb"HTTP/1\.1 (\d+) ", received)
    assert parts[0] == b""
    return [(int(status), *text.split(b"\r\n\r\n", 1)) for status, text in zip(parts[1::2], parts[2::2], strict=True)]


@pytest.fixture(params=[1, 7, 2**20])
def packets(request, monkeypatch):
    """Deliver a given number of bytes at a time to connections."""
    receive = HttpProtocol.data_received

    def receive_in_packets(protocol, data):
        for start in range(0, len(data), request.param):
            receive(protocol, data[start : start + request.param])

    monkeypatch.setattr(HttpProtocol, "data_received", receive_in_packets)


@pytest.mark.usefixtures("packets")
@pytest.mark.parametrize("make", [post, post_in_chunks])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_an_offer_to_change_the_protocol_is_ignored(server, offer, make):
    sent = make(offer) + b"GET /version HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n" + make(offer) * 2 + post(CLOSE)
    statuses, _, bodies = zip(*answers(server, sent), strict=True)
    assert statuses == (200,) * 5
    assert [b'"text":"ab"' in body for body in bodies] == [True, False, True, True, True]
    assert_well(server)


@pytest.mark.usefixtures("packets")
def test_an_offer_can_come_with_the_last_request(server):
    offer = b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"
    ((status, head, body),) = answers(server, post(offer))
    assert status == 200
    assert b"connection: close" in head
    assert b'"text":"ab"' in body


@pytest.mark.usefixtures("packets")
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_a_body_behind_an_offer_is_no_request(server, offer):
    found = answers(server, post(offer, SMUGGLED) + post(CLOSE))
    assert [status for status, _, _ in found] == [400, 200]
    assert_well(server)


@pytest.mark.usefixtures("packets")
def test_an_offer_does_not_excuse_a_body_of_unknown_length(server):
    found = answers(server, b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: gzip\r\n" + OFFERS["http2"] + b"\r\n")
    assert [status for status, _, _ in found] == [400]


@pytest.mark.usefixtures("packets")
@pytest.mark.parametrize("target", [b"example.com:443", b"/version", b"http://x/version"])
def test_nothing_is_read_behind_connect(server, target):
    head = b"CONNECT %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (target, len(SMUGGLED))
    ((status, head, body),) = answers(server, head + SMUGGLED)
    assert status == 400
    assert b"connection: close" in head
    assert b"CONNECT" in body
    assert_well(server)


@pytest.mark.parametrize("headers", [b"", b"Connection: keep-alive\r\n", OFFERS["http2"]])
def test_a_stream_over_http_1_0_is_not_in_chunks(server, headers):
    server.says("naïve 🙂 text")
    body = b'{"prompt": "ab", "stream": true}'
    ((status, head, stream),) = answers(server, post(headers, body, version=b"1.0"))
    assert status == 200
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    *frames, done, rest = stream.split(b"\n\n")
    assert frames
    assert all(frame.startswith(b"data: {") and frame.endswith(b"}") for frame in frames)
    assert (done, rest) == (b"data: [DONE]", b"")


def test_an_answer_over_http_1_0_has_a_length(server):
    ((status, head, body),) = answers(server, post(version=b"1.0"))
    assert status == 200
    assert b"content-length: %d\r\n" % len(body) in head
    assert b'"text":"ab"' in body


def hosts(*values):
    return b"".join(b"Host: %b\r\n" % value for value in values)


@pytest.mark.parametrize(
    ("status", "first", "headers"),
    [
        (400, b"GET /version HTTP/1.1", b""),
        (400, b"GET /version HTTP/1.1", hosts(b"x", b"x")),
        (400, b"GET /version HTTP/1.0", hosts(b"x", b"y")),
        (400, b"GET /version HTTP/1.1", hosts(b"a b")),
        (400, b"GET /version HTTP/1.1", hosts(b"x/y")),
        (400, b"GET /version HTTP/1.1", hosts(b"user@x")),
        (400, b"GET /live HTTP/1.1", b""),
        (200, b"GET /version HTTP/1.1", hosts(b"")),
        (200, b"GET /version HTTP/1.1", hosts(b"[::1]:8000")),
        (200, b"GET /version HTTP/1.1", hosts(b"ex-ample.org:80")),
        (200, b"GET /version HTTP/1.0", b""),
        (505, b"GET /version", b""),
        (505, b"GET /version HTTP/0.9", hosts(b"x")),
        (505, b"GET /version HTTP/2.0", hosts(b"x")),
    ],
)
def test_versions_and_hosts(server, status, first, headers):
    ((found, head, body),) = answers(server, first + b"\r\n" + headers + CLOSE + b"\r\n")
    assert found == status
    if status != 200:
        assert b"content-type: application/json" in head
        assert b'"type":"invalid_request_error"' in body
    assert_well(server)


@pytest.mark.parametrize(
    "line", [b"GET /version\r\n", b"GET /version HTTP/0.9\r\n", b"GET /version HTTP/2.0\r\nHost: x\r\n"]
)
def test_a_first_line_of_another_version_is_answered_at_once(server, line):
    """Nothing may follow it: a client of HTTP/0.9 has sent everything."""
    ((status, _, body),) = answers(server, line)
    assert status == 505
    assert b"HTTP/1.1" in body
    assert_well(server)


@pytest.mark.parametrize(
    ("encoding", "status"), [(b"gzip", 415), (b"br", 415), (b"identity, gzip", 415), (b"Identity", 200), (b"", 200)]
)
def test_a_body_that_is_called_compressed(server, encoding, status):
    ((found, head, _),) = answers(server, post(b"Content-Encoding: %b\r\n" % encoding + CLOSE))
    assert found == status
    assert (b"accept-encoding: identity" in head) == (status == 415)
    assert_well(server)


GARBAGE = {
    "no request": b"\x00\x01 garbage\r\n\r\n",
    "an unknown version": b"GET / HTTP/1.3\r\n\r\n",
    "a broken body": b"POST /version HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a proxy's": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.usefixtures("packets")
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_request_is_answered_before_the_garbage_behind_it(server, garbage):
    found = answers(server, post() + post(b"", b"{}") + post() + garbage)
    assert [status for status, _, _ in found] == [200, 400, 200, 400]
    assert b'"text":"ab"' in found[2][2]
    assert_well(server)


def test_a_request_is_answered_before_the_endless_head_behind_it(server):
    endless = b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"y" * MAX_HEAD_BYTES
    assert [status for status, _, _ in answers(server, post() + endless)] == [200, 431]


def test_a_refusal_does_not_come_into_a_stream(server, step_by_step):
    """Nor does anything that is sent after a refused request become a request."""
    stream = post(b"", b'{"prompt": "ab", "max_tokens": 3, "stream": true}')
    with server.connection() as connection:
        connection.sendall(stream)
        received = connection.recv(2**16)
        connection.sendall(GARBAGE["no request"] + post())
        step_by_step.set()
        received += b"".join(iter(lambda: connection.recv(2**16), b""))
    first, second = received.split(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1") == 2
    assert_well(server)


HANGS = b'{"prompt": "ab", "max_tokens": 400}'
HANGING_STREAM = b'{"prompt": "ab", "max_tokens": 400, "stream": true}'


@pytest.mark.parametrize("body", [HANGS, HANGING_STREAM])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(
    "behind",
    [
        post(),
        post() * 30,
        post()[:-5],
        post(b"", b'{"prompt": "%b"}' % (b"x" * 100_000)),
        post(b"", b'{"prompt": "%b"}' % (b"x" * 2**22)),
        b"GET /ver",
        b"\x00",
    ],
    ids=[
        *("a request", "many", "a part of one", "a large one", "one too large to be received", "a part of a head"),
        *("none",),
    ],
)
def test_a_client_that_has_sent_more_and_leaves_is_noticed(server, caplog, monkeypatch, behind, version, body):
    monkeypatch.setattr(http, "ASK_INTERVAL", 0.05)
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    with server.connection() as connection:
        connection.sendall(post(b"", body, version=version))
        wait_until(lambda: server.client.num_running == 1)
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while behind:
                behind = behind[connection.send(behind) :]
        time.sleep(0.05)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", version == b"1.0", 0))
    wait_until(lambda: server.client.num_running == server.server.state.life.num_inside == 0)
    assert len(server.client.submitted) == 1
    assert not [record for record in caplog.records if record.exc_info]
    server.play = echo
    assert_well(server)


def test_requests_sent_at_once_that_nobody_waits_for(server, caplog, monkeypatch):
    monkeypatch.setattr(http, "ASK_INTERVAL", 0.05)
    server.play = lambda request: Script(token_ids=[70], hangs=True)
    for _ in range(30):
        with server.connection() as connection:
            connection.sendall(post(b"", HANGING_STREAM) * 5)
    wait_until(lambda: server.client.num_running == server.server.state.life.num_inside == 0)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("body", [b'{"prompt": "ab", "max_tokens": 2, "stream": true}', BODY])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_who_ends_only_his_side_has_his_answers(server, step_by_step, monkeypatch, version, body):
    monkeypatch.setattr(http, "ASK_INTERVAL", 0.01)
    is_stream, number = b"stream" in body, 2 if version == b"1.1" else 1
    overlooked = b"\n:\n\n" if is_stream else http.CONTINUE if version == b"1.1" else b""
    with server.connection() as connection:
        connection.sendall(post(b"", body, version=version) * number)
        wait_until(lambda: server.client.num_running == 1)
        received = connection.recv(2**16) if is_stream else b""
        connection.shutdown(socket.SHUT_WR)
        while overlooked not in received:
            received += connection.recv(2**16)
        step_by_step.set()
        received += b"".join(iter(lambda: connection.recv(2**16), b""))
    assert received.count(b"HTTP/1.1 200 ") == number
    assert received.replace(http.CONTINUE, b"").startswith(b"HTTP/1.1 200 ")
    assert received.count(b"data: [DONE]" if is_stream else b'"text":"ab"') == number
    wait_until(lambda: server.client.num_running == server.server.state.life.num_inside == 0)


@pytest.mark.parametrize("size", [10_000, 100_000, 1_000_000])
def test_who_ends_his_side_has_the_answer_to_a_large_request_too(server, step_by_step, size):
    large = post(b"", b'{"prompt": "ab", "max_tokens": 2, "user": "%b"}' % (b"x" * size))
    with server.connection() as connection:
        connection.sendall(post())
        wait_until(lambda: server.client.num_running == 1)
        sending = threading.Thread(
            target=lambda: (connection.sendall(large + post()), connection.shutdown(socket.SHUT_WR))
        )
        sending.start()
        time.sleep(0.05)
        step_by_step.set()
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
        sending.join()
    assert received.count(b'"text":"ab"') == 3


@pytest.mark.parametrize("path", [b"/live", b"/health", b"/version", b"/metrics"])
def test_who_ends_his_side_at_once_has_a_quick_answer(server, path):
    with server.connection() as connection:
        connection.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"GET /ver", post()[:-3], post() + post()[:-3]])
def test_who_ends_his_side_in_a_request_has_no_answer_to_that(server, sent):
    with server.connection() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert received.count(b"HTTP/1.1 200 ") == (sent.count(BODY))
    assert_well(server)
