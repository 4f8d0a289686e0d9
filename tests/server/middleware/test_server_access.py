"""Access control: API keys from all sources, the admin's, web pages of other origins, and TLS."""

import ssl
import subprocess

import httpx
import openai
import pytest
from certificates import make_certificate
from serving import assert_error, assert_well, running
from waiting import PATIENCE, wait_until

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.server.app import ADMIN_PATHS, ROUTES
from jaxserve.server.middleware.keys import admin_keys, client_keys
from jaxserve.server.process.access import check_access
from jaxserve.server.process.tls import ssl_context
from jaxserve.server.routes import pages
from jaxserve.server.routes.admin import NOT_IMPLEMENTED

KEY = "s3cret-\u00e9"
ADMIN_KEY = "root-0"
OPEN = {"/live", "/health", "/ping", *pages.FILES}
PATHS = [*sorted({route.path.replace("{model:path}", "fake") for route in ROUTES} - OPEN), "/nothing", "/health/"]


@pytest.fixture(scope="module")
def locked(tokenizer):
    with running(tokenizer, api_key=[KEY, "another"], admin_api_key=[ADMIN_KEY], profile_dir="/profiles") as server:
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
    for_a_proxy = {"authorization": b"Basic YTpi", "x-api-key": KEY.encode()}
    assert locked.get("/v1/models", headers=for_a_proxy).status_code == 200


@pytest.mark.parametrize("path", ["/live", "/health", "/ping"])
def test_probes_need_no_key(locked, path):
    assert locked.get(path).status_code == 200


def test_openai_client_names_a_wrong_key(locked):
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0, timeout=PATIENCE) as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.models.list()


def test_any_of_several_keys(locked):
    assert locked.get("/v1/models", headers=bearer("another")).status_code == 200
    for key in (ADMIN_KEY, KEY + "another", "anothe", KEY + "\n" + "another".replace("\n", "")):
        assert_error(
            locked.get("/v1/models", headers=bearer(key.replace("\n", " "))), 401, None, "authentication_error"
        )


def test_keys_from_files_and_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("one\n\n  two  \r\n")
    monkeypatch.setenv("JAXSERVE_API_KEY", "three")
    keys = client_keys(ServerConfig(api_key=["zero"], api_key_file=str(tmp_path / "keys")))
    assert len({keys.owner(b"Bearer " + key) for key in (b"zero", b"one", b"two", b"three")} - {None}) == 4
    assert {keys.owner(key) for key in (b"Bearer ", b"Bearer", b"", b"Bearer four", b"Basic one", b"one")} == {None}
    assert not admin_keys(ServerConfig())


def test_a_source_without_a_key_authorizes_nobody(tmp_path, monkeypatch):
    (tmp_path / "empty").write_text(" \n")
    for field, value, message in (
        ("api_key", [" "], "must not be empty"),
        ("api_key_file", str(tmp_path / "none"), "cannot read"),
        ("api_key_file", str(tmp_path / "empty"), "has no key"),
    ):
        with pytest.raises(ConfigError, match=message):
            client_keys(ServerConfig(**{field: value}))
    with pytest.raises(ConfigError, match="list of texts"):
        ServerConfig(api_key="secret")
    monkeypatch.setenv("JAXSERVE_API_KEY", "")
    with pytest.raises(ConfigError, match="is set, but empty"):
        client_keys(ServerConfig())


def test_a_server_that_is_open_to_others_says_so(caplog):
    for host in ("127.0.0.1", "localhost", "::1"):
        check_access(ServerConfig(host=host))
    check_access(ServerConfig(host="0.0.0.0", api_key=["a"]))
    assert not caplog.records
    check_access(ServerConfig(host="0.0.0.0"))
    assert "--api-key" in caplog.text
    with pytest.raises(ConfigError):
        check_access(ServerConfig(admin_api_key_file="/none"))


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_admin_routes_are_off_by_default(server, path):
    answer = server.post(path, {})
    assert_error(answer, 404, None, "not_found_error")
    assert "--admin-api-key" in answer.json()["error"]["message"]
    assert_well(server)


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_admin_routes_have_a_key_of_their_own(locked, path):
    for headers in ({}, bearer(KEY), bearer("another"), bearer(ADMIN_KEY + "0")):
        assert_error(locked.post(path, {}, headers=headers), 401, None, "authentication_error")
    assert_error(locked.get("/v1/models", headers=bearer(ADMIN_KEY)), 401, None, "authentication_error")


@pytest.mark.parametrize("path", sorted(NOT_IMPLEMENTED))
def test_what_is_not_there_says_so_and_asks_for_no_admin_key(server, locked, path):
    assert_error(locked.post(path, {}), 401, None, "authentication_error")
    assert locked.post(path, {}, headers=bearer(KEY)).status_code == 501
    answer = server.post(path, {})
    assert_error(answer, 501, None, "not_implemented_error")
    assert NOT_IMPLEMENTED[path] in answer.json()["error"]["message"]


def test_reset_of_the_prefix_cache(locked):
    assert locked.post("/reset_prefix_cache", {}, headers=bearer(ADMIN_KEY)).json() == {"status": "ok"}
    assert locked.get("/reset_prefix_cache", headers=bearer(ADMIN_KEY)).status_code == 405


def test_profiles(locked):
    admin = bearer(ADMIN_KEY)
    assert_error(locked.post("/stop_profile", {}, headers=admin), 400, None)
    assert locked.post("/start_profile", {}, headers=admin).status_code == 200
    assert_error(locked.post("/start_profile", {}, headers=admin), 400, None)
    assert locked.post("/stop_profile", {}, headers=admin).status_code == 200
    assert locked.client.profiles == ["/profiles (done)"]


def test_no_profile_without_a_directory(tokenizer):
    with running(tokenizer, admin_api_key=[ADMIN_KEY]) as server:
        answer = server.post("/start_profile", {}, headers=bearer(ADMIN_KEY))
        assert_error(answer, 400, None)
        assert "--profile-dir" in answer.json()["error"]["message"]
        with pytest.raises(InvalidRequest):
            server.client.stop_profile()


def test_a_response_is_there_for_the_key_that_made_it(locked):
    mine, other = bearer(KEY), bearer("another")
    path = "/v1/responses"
    done = locked.post(path, {"input": "secret"}, headers=mine).json()["id"]
    running = locked.post(path, {"input": "secret", "background": True}, headers=mine).json()["id"]
    for response_id in (done, running):
        one = f"{path}/{response_id}"
        for answer in (
            locked.get(one, headers=other),
            locked.get(f"{one}/input_items", headers=other),
            locked.post(f"{one}/cancel", {}, headers=other),
            locked.request("DELETE", one, headers=other),
        ):
            assert_error(answer, 404, "response_id", "not_found_error")
    more = {"input": "more", "previous_response_id": done}
    assert_error(locked.post(path, more, headers=other), 400, "previous_response_id")
    assert locked.get(f"{path}/{done}", headers=mine).status_code == 200
    assert locked.post(path, more, headers=mine).status_code == 200
    wait_until(lambda: not locked.server.state.responses.background)
    assert locked.request("DELETE", f"{path}/{running}", headers=mine).status_code == 200


def test_pages_of_other_origins(tokenizer):
    origin = {"origin": "https://example.org"}
    preflight = origin | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with running(tokenizer, api_key=[KEY], allowed_origins=["https://example.org"]) as server:
        answer = server.request("OPTIONS", "/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        delete = preflight | {"access-control-request-method": "DELETE"}
        assert server.request("OPTIONS", "/v1/responses/resp_1", headers=delete).status_code == 200
        refused = server.post("/v1/completions", {}, headers=origin)
        assert_error(refused, 401, None, "authentication_error")  # which the page may read
        assert refused.headers["access-control-allow-origin"] == "https://example.org"
        other = server.get("/v1/models", headers=bearer(KEY) | {"origin": "https://x"})
        assert "access-control-allow-origin" not in other.headers
        server.client.refusal = KeyError("a bug")
        failed = server.post("/v1/completions", {"prompt": "a"}, headers=bearer(KEY) | origin)
        assert_error(failed, 500, None, "internal_error")
        assert failed.headers["access-control-allow-origin"] == "https://example.org"


@pytest.mark.parametrize(("allowed", "may_read"), [("https://example.org", True), ("*", True), ("https://x", False)])
def test_pages_may_read_what_is_refused_before_it_is_a_request(tokenizer, wire_clock, allowed, may_read):
    with (
        running(tokenizer, allowed_origins=[allowed], receive_timeout=10) as server,
        server.connection() as connection,
    ):
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: https://example.org\r\n"
            b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        )
        connection.sendall(head)
        wait_until(lambda: wire_clock.num_received == len(head))
        wire_clock.advance(10)
        answer = connection.makefile("rb").read().lower()
        assert answer.startswith(b"http/1.1 408 ")
        assert (b"access-control-allow-origin: https://example.org\r\n" in answer) == may_read


def test_no_page_of_another_origin_by_default(server):
    answer = server.get("/v1/models", headers={"origin": "https://example.org"})
    assert "access-control-allow-origin" not in answer.headers


def test_tls(tokenizer, tmp_path):
    certificate, key = make_certificate(tmp_path, "server")
    with running(tokenizer, ssl_certfile=certificate, ssl_keyfile=key) as server:
        trusted = ssl.create_default_context(cafile=certificate)
        url = server.url.replace("http:", "https:")
        body = {"prompt": "ab", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, verify=trusted, timeout=PATIENCE)
        assert answer.json()["choices"][0]["text"] == "ab"
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(url, verify=ssl.create_default_context(), timeout=PATIENCE)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(server.url, timeout=PATIENCE)


def test_tls_with_certificates_of_clients(tokenizer, tmp_path):
    authority, _ = make_certificate(tmp_path, "authority")
    certificate, key = make_certificate(tmp_path, "server", authority="authority")
    of_client = make_certificate(tmp_path, "client", authority="authority")
    with running(tokenizer, ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=authority) as server:
        url = f"{server.url.replace('http:', 'https:')}/live"
        context = ssl.create_default_context(cafile=authority)
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
            httpx.get(url, verify=context, timeout=PATIENCE)
        context.load_cert_chain(*of_client)
        assert httpx.get(url, verify=context, timeout=PATIENCE).status_code == 200


def test_tls_that_cannot_be(tmp_path):
    certificate, key = make_certificate(tmp_path, "server")
    other, _ = make_certificate(tmp_path, "other")
    with pytest.raises(ConfigError, match="need ssl_certfile"):
        ServerConfig(ssl_keyfile=key)
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", encrypted]
    subprocess.run(command, check=True, capture_output=True)
    for fields, named in (
        ({"ssl_certfile": str(tmp_path / "none")}, f"ssl_certfile {tmp_path}/none: No such file"),
        ({"ssl_certfile": other, "ssl_keyfile": key}, f"ssl_certfile {other}, ssl_keyfile {key}: "),
        ({"ssl_certfile": certificate}, f"ssl_certfile {certificate}: "),
        ({"ssl_certfile": certificate, "ssl_keyfile": str(encrypted)}, "the private key is encrypted"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": key}, f"ssl_ca_certs {key}: "),
    ):
        with pytest.raises(ConfigError, match=f"TLS: {named}"):
            ssl_context(ServerConfig(**fields))
    assert ssl_context(ServerConfig()) is None
