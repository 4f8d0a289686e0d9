"""Kinds of bad requests as data: what is sent, and the expected answer."""

import itertools
import json

from faults import BODY_LIMIT, CHAT, COMPLETIONS, EMBEDDINGS, GOOD, INPUT, JSON, KEY, RESPONSES, USER, Sent
from faults import head as head_of
from faults import post as post_of


def body(path, content, param, status=400):
    return Sent(post_of(path, content), status, param)


def fields(param, *values, paths=(COMPLETIONS, CHAT), **others):
    """Yield a good request with each of these values in the field that `param` begins with."""
    name = param.partition("[")[0].partition(".")[0]
    return [body(path, GOOD[path] | others | {name: value}, param) for path in paths for value in values]


def head(status, method, path, headers=(), **options):
    return Sent(head_of(method, path, [*length_of(b""), *headers], **options), status)


def length_of(content):
    return [("content-length", len(content))]


def chunked(data):
    return Sent(head_of("POST", COMPLETIONS, [*JSON, ("transfer-encoding", "chunked")]) + data)


def flat(*lists):
    return list(itertools.chain(*lists))


NUMBERS = ["temperature", "top_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"]
NUMBERS += ["top_n_sigma"]
INTEGERS = ["max_tokens", "n", "seed", "top_k", "min_tokens", "priority", "truncate_prompt_tokens"]
GOOD_JSON = json.dumps(GOOD[COMPLETIONS]).encode()

BODIES = {
    "null instead of the input": [body(p, GOOD[p] | {name: None}, name) for p, name in INPUT.items()],
    "no input": [body(path, {"max_tokens": 3}, name) for path, name in INPUT.items()],
    "text for a number": flat(*(fields(name, "1", "", [], {}, True) for name in NUMBERS + INTEGERS)),
    "fraction for an integer": flat(*(fields(name, 0.5, -3.75) for name in INTEGERS)),
    "huge integer": flat(*(fields(name, 2**63, 10**30, 2**200) for name in INTEGERS[:-1])),
    "negative integer": flat(*(fields(name, -2, -(10**6)) for name in ("max_tokens", "n", "min_tokens"))),
    "number out of range": [
        *fields("temperature", 101.0),
        *fields("top_p", 1.5, -0.5),
        *fields("frequency_penalty", 9),
        *fields("min_p", -1),
        *fields("top_k", -5),
        *fields("top_n_sigma", -2, 101),
        *fields("truncate_prompt_tokens", 0, -2),
    ],
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
    "lone surrogate": [body(COMPLETIONS, b'{"prompt": "a\\u%b"}' % half, None) for half in (b"d800", b"dfff", b"dbff")],
    "unknown model": [
        body(path, GOOD[path] | {"model": name}, "model", 404)
        for path in GOOD
        for name in ("gpt-9", "", "x" * 5000, "../etc")
    ],
    "too long a prompt": [
        body(path, GOOD[path] | {name: text if path != CHAT else [USER | {"content": text}]}, name)
        for path, name in INPUT.items()
        for text in ("x" * 200, "x" * 20_000)
    ],
    "prompt and output too long": fields("max_tokens", 128, 10**6, 2**31 - 1),
    "too many stops": fields("stop", ["x"] * 129, ["x"] * 300),
    "bad stop": [*fields("stop", [""], {}, "x" * 2000), *fields("stop[0]", [1])],
    "bad logit bias": fields(
        "logit_bias",
        *({str(i): 1 for i in range(301)}, {"three": 1}, {"3": "x"}, {"99999": 1}, [3], {"-1": 1}),
    ),
    "token ids out of the vocabulary": [
        body(path, GOOD[path] | {INPUT[path]: [5, token]}, INPUT[path])
        for path in (COMPLETIONS, EMBEDDINGS)
        for token in (-1, 288, 10**9, 2**63)
    ],
    "mixed prompts": [
        body(path, GOOD[path] | {INPUT[path]: value}, INPUT[path])
        for path in (COMPLETIONS, EMBEDDINGS)
        for value in (["a", 1], [1, 2.5], [True], [None], [[1], 2], [{}], [[]], [])
    ],
    "too many choices": [*fields("n", 129, 0), *fields("prompt", ["a"] * 1025, paths=[COMPLETIONS])],
    "too many logprobs": [*fields("logprobs", 21, paths=[COMPLETIONS]), *fields("prompt_logprobs", 99)],
    "bad messages": [
        body(CHAT, {"messages": messages}, param)
        for messages, param in (
            ([], "messages"),
            ("hello", "messages"),
            ([USER] * 4097, "messages"),
            (["hello"], "messages[0]"),
            ([USER, {"role": "", "content": "a"}], "messages[1].role"),
            ([{"role": "user", "content": 5}], "messages[0].content"),
            ([{"content": "a"}], "messages[0].role"),
        )
    ],
    "pictures and sounds": [
        body(CHAT, {"messages": [USER | {"content": [{"type": "text", "text": "look"}, part]}]}, param)
        for param in ("messages[0].content[1].type",)
        for part in (
            {"type": "image_url", "image_url": {"url": "file:///etc/secret.png"}},
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            {"type": "file", "file": {"file_id": "a"}},
        )
    ],
    "what is not supported": [
        *fields("suffix", "end", paths=[COMPLETIONS]),
        *fields("audio", {"voice": "a"}, paths=[CHAT]),
        *fields("functions", [{"name": "f"}], paths=[CHAT]),
        *fields("chat_template", "{{ ''.__class__ }}", paths=[CHAT]),
        *fields("use_beam_search", True, paths=[RESPONSES]),
        *fields("prompt_embeds", "gASVAAAA"),
        *fields("conversation", "c", paths=[RESPONSES]),
    ],
    "variables for the template": fields(
        "chat_template_kwargs",
        *({"messages": []}, {"__class__": "x"}, {"tools": "x"}),
        paths=[CHAT],
    ),
    "contradictions": [
        *fields("best_of", 2),
        *fields("min_tokens", 9),
        *fields("stream_options", {"include_usage": True}),
        *fields("prompt_logprobs", 1, stream=True),
    ],
    "bad embeddings": [
        *fields("dimensions", 0, 33, paths=[EMBEDDINGS]),
        *fields("pooling", "x", paths=[EMBEDDINGS]),
    ],
    "unknown response": fields("previous_response_id", "resp_1", "", "x" * 999, paths=[RESPONSES]),
    "bad tokens": [
        *(body("/detokenize", {"tokens": tokens}, "tokens") for tokens in ([-1], "x", [10**9])),
        body("/tokenize", {}, "prompt"),
        body("/tokenize", {"prompt": 5}, "prompt"),
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
    "two hosts": [head(400, "GET", "/v1/models", [("host", "test")])],
    "wrong content type": [
        Sent(head_of("POST", COMPLETIONS, [("content-type", kind), *length_of(GOOD_JSON)]) + GOOD_JSON, 415)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/xml", "")
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
