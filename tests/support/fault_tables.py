"""Kinds of bad requests as data: what is sent, and the expected answer. Those of fields are in `bad_fields`."""

import json

from bad_fields import CASES
from faults import BODY_LIMIT, CHAT, COMPLETIONS, GOOD, INPUT, JSON, KEY, RESPONSES, Sent
from faults import head as head_of
from faults import post as post_of


def body(path, content, param, status=400):
    return Sent(post_of(path, content), status, param)


def head(status, method, path, headers=(), **options):
    return Sent(head_of(method, path, [*length_of(b""), *headers], **options), status)


def length_of(content):
    return [("content-length", len(content))]


def chunked(data):
    return Sent(head_of("POST", COMPLETIONS, [*JSON, ("transfer-encoding", "chunked")]) + data)


NOT_JSON = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/xml", "")
GOOD_JSON = json.dumps(GOOD[COMPLETIONS]).encode()

FIELDS: dict[str, list[Sent]] = {}
"""By the path and the field that is named."""
for _path, _content, _param in CASES:
    FIELDS.setdefault(f"{_path} {_param.replace('[', '.').partition('.')[0]}", []).append(body(_path, _content, _param))

BODIES = FIELDS | {
    "null instead of the input": [body(p, GOOD[p] | {name: None}, name) for p, name in INPUT.items()],
    "no input": [body(path, {"max_tokens": 3}, name) for path, name in INPUT.items()],
    "not a number": [
        body(COMPLETIONS, b'{"prompt": "a", "temperature": %b}' % literal, None)
        for literal in (b"NaN", b"Infinity", b"-Infinity", b"0x10", b"1e", b"01", b"+1")
    ],
    "number beyond floats": [
        body(COMPLETIONS, b'{"prompt": "a", "temperature": %b}' % literal, "temperature")
        for literal in (b"1e999", b"-1e400", b"9" * 5000)
    ],
    "malformed JSON": [
        body(path, text, None)
        for path in GOOD
        for text in (b"", b"{", b"}", b"nul", b"{'a': 1}", b'{"a" 1}', b'{"a": 1,}', b"\x00", b"[1, 2", b'"text')
    ],
    "JSON of another kind": [body(path, value, None) for path in GOOD for value in ([], [1], "text", 5, None, True)],
    "garbage behind the JSON": [body(COMPLETIONS, GOOD_JSON + more, None) for more in (b"x", b"{}", b"\x00", b"]")],
    "deep arrays": [
        body(COMPLETIONS, b'{"prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}", None)
        for depth in (2_000, 20_000, 200_000)
    ],
    "deep objects": [
        body(CHAT, b'{"messages": [], "x": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}", None)
        for depth in (2_000, 20_000, 100_000)
    ],
    "invalid UTF-8": [
        body(COMPLETIONS, b'{"prompt": "a%b"}' % bad, None)
        for bad in (b"\xff", b"\xc3(", b"\xe2\x82", b"\xf8\x88\x80\x80\x80", b"\xed\xa0\x80")
    ],
    "a name that is not UTF-8": [
        body(COMPLETIONS, b'{"prompt": "a", "\xff": 1}', None),
        body(COMPLETIONS, b'{"prompt": "a", "stream": true, "stream_options": {"\xff": 1}}', None),
        body("/detokenize", b'{"tokens": [5], "\xff": 1}', None),
    ],
    "lone surrogate": [body(COMPLETIONS, b'{"prompt": "a\\u%b"}' % half, None) for half in (b"d800", b"dfff", b"dbff")],
    "unknown model": [
        body(path, GOOD[path] | {"model": name}, "model", 404)
        for path in GOOD
        for name in ("gpt-9", "", "x" * 5000, "../etc")
    ],
    "body over the cap": [
        body(COMPLETIONS, b'{"prompt": "' + b"a" * (BODY_LIMIT + more) + b'"}', None, 413) for more in (1, 99)
    ],
    "compressed body": [
        Sent(post_of(COMPLETIONS, content, [("content-encoding", "gzip")]), 415)
        for content in (b"\x1f\x8b\x08\x00" + b"\x01" * 50, GOOD_JSON)
    ],
}

HEADS = {
    "absent response": [
        Sent(head_of(method, f"{RESPONSES}/resp_1{rest}", length_of(b"")), 404, "response_id")
        for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))
    ],
    "announced body over the cap": [
        Sent(head_of("POST", COMPLETIONS, [*JSON, ("content-length", length)]), 413) for length in (2**21, 2**40, 2**62)
    ],
    "too many headers": [
        head(431, "GET", "/v1/models", [(f"x-{i}", "1") for i in range(number)]) for number in (101, 900)
    ],
    "too long headers": [head(431, "GET", "/v1/models", [("x", "y" * size)]) for size in (33_000, 100_000, 200_000)],
    "unknown path": [
        head(404, method, path)
        for method in ("GET", "POST")
        for path in ("/v1", "/v1/nothing", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/doc", "/%00", "//")
    ],
    "wrong method": [
        head(405, *request)
        for request in (
            ("GET", COMPLETIONS),
            ("DELETE", CHAT),
            ("PUT", "/health"),
            ("POST", "/v1/models"),
            ("PATCH", "/tokenize"),
        )
    ],
    "wrong key": [
        head(401, "POST", path, key=key)
        for key in ("", "x", KEY + "x", KEY[:-1], "\xff", "x" * 5000)
        for path in (*GOOD, "/v1/models", "/metrics", "/nothing", "/sleep")
    ],
    "admin without a key": [head(404, "POST", f"/{name}") for name in ("reset_prefix_cache", "start_profile")],
    "not there at all": [head(501, "POST", path) for path in ("/sleep", "/update_weights", "/v1/load_lora_adapter")],
    "at a path of Anthropic's API": [
        Sent(head_of("POST", "/v1/messages", [*JSON, ("content-length", 2**40)]), 413),
        head(431, "POST", "/v1/messages", [("x", "y" * 33_000)]),
        head(404, "POST", "/v1/messages/batches"),
        head(405, "GET", "/v1/messages/count_tokens"),
        head(401, "POST", "/v1/messages?beta=true", key="x"),
        head(400, "POST", "/v1/messages", [("host", "test")]),
        head(400, "POST", "/v1/messages", [("x\x00", "a")]),
    ],
    "two hosts": [head(400, "GET", "/v1/models", [("host", "test")])],
    # Any web page may make a browser send such a body; the one with the right name, only after a preflight.
    "wrong content type": [
        Sent(head_of("POST", path, [*kind, *length_of(GOOD_JSON)]) + GOOD_JSON, 415)
        for path in (*GOOD, "/tokenize")
        for kind in ([], *([("content-type", name)] for name in NOT_JSON))
    ],
    "upgrade to something else": [
        head(
            405,
            "GET",
            COMPLETIONS,
            [
                ("connection", "upgrade"),
                ("upgrade", protocol),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
                ("sec-websocket-version", "13"),
            ],
        )
        for protocol in ("websocket", "h2c")
    ],
}

NOT_HTTP = {
    "not HTTP": [
        Sent(first + b"\r\n\r\n")
        for first in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-x", b"\x00" * 20, b"EHLO x", b"GET")
    ],
    "bad request line": [
        Sent(line + b"\r\nhost: x\r\n\r\n")
        for line in (b"GET / HTTP/9.9", b"GET /a b HTTP/1.1", b"GE\x7fT / HTTP/1.1", b"GET / HTTP/x", b" / HTTP/1.1")
    ],
    "bad content length": [
        Sent(head_of("POST", COMPLETIONS, [("content-length", length) for length in lengths]))
        for lengths in (["x"], ["-5"], ["1", "2"], ["0x10"], ["9" * 40], ["5, 6"])
    ],
    # Content-Length together with chunks: how requests are smuggled past proxies.
    "two lengths": [
        Sent(
            head_of("POST", COMPLETIONS, [*JSON, ("content-length", "5"), ("transfer-encoding", "chunked")])
            + b"0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n"
        )
    ],
    "bad chunk": [
        chunked(size + b"\r\nhello\r\n0\r\n\r\n") for size in (b"zz", b"-1", b"fffffffffffffffffff", b"5;x\x00")
    ],
    # Without a key it may not enter either way.
    "control characters in a header": [
        Sent(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + value + b"\r\n\r\n", (400, 401))
        for value in (b"a\x00b", b"a\rb", b"a\x0bb")
    ],
}

TABLES = BODIES | HEADS | NOT_HTTP
