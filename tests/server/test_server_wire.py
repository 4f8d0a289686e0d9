"""HTTP as it comes and goes: offers to change the protocol, however the bytes are cut, and answers to HTTP/1.0."""

import re
import socket

import pytest
from server.serving import assert_well
from waiting import PATIENCE

from jaxserve.server.http import HttpProtocol

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
    """The status, head and body of each answer, until the server closes the connection."""
    with socket.create_connection(server.server.address, timeout=PATIENCE) as connection:
        connection.sendall(sent)
        received = b"".join(iter(lambda: connection.recv(2**16), b""))
    parts = re.split(rb"HTTP/1\.1 (\d+) ", received)
    assert parts[0] == b""
    return [(int(status), *text.split(b"\r\n\r\n", 1)) for status, text in zip(parts[1::2], parts[2::2], strict=True)]


@pytest.fixture(params=[1, 7, 2**20])
def packets(request, monkeypatch):
    """Connections get so many bytes at a time."""
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
    assert len(frames) > 1
    assert all(frame.startswith(b"data: {") and frame.endswith(b"}") for frame in frames)
    assert (done, rest) == (b"data: [DONE]", b"")


def test_an_answer_over_http_1_0_has_a_length(server):
    ((status, head, body),) = answers(server, post(version=b"1.0"))
    assert status == 200
    assert b"content-length: %d\r\n" % len(body) in head
    assert b'"text":"ab"' in body
