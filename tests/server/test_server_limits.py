"""The key, the limits on a request's size, and paths and methods that do not exist."""

import socket

import openai
import pytest
from server.serving import assert_error, assert_well, running

KEY = "s3cret-\u00e9"
PATHS = ["/v1/completions", "/v1/models", "/metrics", "/version", "/tokenize", "/openapi.json", "/nothing", "/health/"]


@pytest.fixture(scope="module")
def locked(tokenizer):
    with running(tokenizer, api_key=KEY, max_body_size=10_000) as server:
        yield server


def bearer(key):
    return {"authorization": b"Bearer " + key.encode()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        {"authorization": "Bearer"},
        bearer(KEY + "x"),
        bearer(KEY[:-1]),
        {"authorization": KEY.encode()},
    ],
    ids=["none", "wrong", "empty", "longer", "shorter", "no scheme"],
)
def test_no_entry_without_the_key(locked, path, headers):
    for answer in (locked.get(path, headers=headers), locked.post(path, {"prompt": "a"}, headers=headers)):
        assert_error(answer, 401, None, "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert not locked.client.submitted


def test_entry_with_the_key(locked):
    assert locked.get("/v1/models", headers=bearer(KEY)).status_code == 200
    assert locked.get("/v1/models", headers={"authorization": b"bearer  " + KEY.encode()}).status_code == 200


@pytest.mark.parametrize("path", ["/live", "/health"])
def test_probes_need_no_key(locked, path):
    assert locked.get(path).status_code == 200


def test_openai_client_names_a_wrong_key(locked):
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.models.list()


def in_chunks(size):
    yield b'{"prompt": "'
    for _ in range(size // 1000):
        yield b"a" * 1000
    yield b'"}'


def test_body_over_the_cap(locked):
    answer = locked.post("/v1/completions", {"prompt": "a" * 10_000}, headers=bearer(KEY))
    assert_error(answer, 413, None)
    body = {"prompt": "ab", "max_tokens": 2}
    assert locked.post("/v1/completions", body, headers=bearer(KEY)).status_code == 200


def test_chunked_body_over_the_cap(locked):
    answer = locked.post("/v1/completions", None, content=in_chunks(20_000), headers=bearer(KEY))
    assert_error(answer, 413, None)


def test_the_rest_of_a_body_over_the_cap_is_not_read(locked):
    with socket.create_connection(locked.server.address, timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" % KEY.encode()
        )
        connection.sendall(b"3000\r\n" + b"a" * 0x3000 + b"\r\n")  # the chunk that ends the body never comes
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_body_under_the_cap(locked):
    answer = locked.post("/v1/completions", None, content=in_chunks(300), headers=bearer(KEY))
    assert answer.status_code == 200


def test_too_many_headers(server):
    assert_error(server.get("/v1/models", headers={f"x-{i}": "1" for i in range(200)}), 431, None)
    assert_well(server)


@pytest.mark.parametrize("size", [40_000, 150_000])
def test_too_long_headers(server, size):
    assert_error(server.get("/v1/models", headers={"x": "y" * size}), 431, None)
    assert_well(server)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/completions/x", "/docs"])
def test_unknown_paths(server, path):
    assert_error(server.get(path), 404, None, "not_found_error")
    assert_error(server.post(path, {}), 404, None, "not_found_error")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/completions"), ("DELETE", "/v1/chat/completions"), ("POST", "/v1/models"), ("PUT", "/health")],
)
def test_wrong_methods(server, method, path):
    answer = server.request(method, path)
    assert_error(answer, 405, None)
    assert answer.headers["allow"]


def test_not_http_at_all(server):
    with socket.create_connection(server.server.address, timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    assert_well(server)
