"""The playground's routes, and the rules its files keep: they need nothing from elsewhere and no inline script."""

import asyncio
import html.parser
import pathlib
import re
import threading
import time

import httpx
import msgspec
import pytest
from fake_client import FakeEngineClient, Script
from serving import assert_error, running
from waiting import PATIENCE, wait_until

import jaxserve.server
from jaxserve.server.engine_view import MAX_AGE, EngineState, EngineView

STATIC = pathlib.Path(jaxserve.server.__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.suffix in TYPES)
VENDORED = [name for name in FILES if name.startswith("vendor/")]
OURS = [name for name in FILES if name not in VENDORED]


class _Page(html.parser.HTMLParser):
    """What the page refers to, and what its policy would forbid."""

    def __init__(self, text):
        super().__init__()
        self.references, self.ids, self.wrong = [], [], []
        self.labelled, self.fields = set(), []
        self._inside_label = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.references += [attributes[name] for name in ("src", "href") if name in attributes]
        self.wrong += [f"{tag} {name}" for name in attributes if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in attributes):
            self.wrong.append(f"inline {tag}")
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "label":
            self._inside_label += 1
            self.labelled.add(attributes.get("for"))
        if tag in ("input", "textarea") and not (self._inside_label or "aria-label" in attributes):
            self.fields.append(attributes.get("id"))

    def handle_endtag(self, tag):
        self._inside_label -= tag == "label"


@pytest.fixture(scope="module")
def page():
    return _Page((STATIC / "index.html").read_text())


def test_the_page_and_its_files_are_served_with_a_strict_policy(server):
    paths = {"/": "index.html"} | {f"/static/{name}": name for name in FILES}
    for path, name in paths.items():
        answer = server.get(path)
        assert answer.status_code == 200
        assert answer.content == (STATIC / name).read_bytes()
        assert answer.headers["content-type"].startswith(TYPES[pathlib.Path(name).suffix])
        policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
        assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
        assert policy.pop("frame-ancestors") == "'none'"
        assert set(policy.values()) == {"'self'"}, "no unsafe-inline, no other host"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_has_not_changed_is_not_sent_again(server):
    etag = server.get("/").headers["etag"]
    again = server.get("/", headers={"if-none-match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert server.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/static/", "/static/nothing.js", "/static/../app.py", "/static/%2e%2e/app.py"])
def test_nothing_else_is_served(server, path):
    assert server.get(path).status_code == 404


def test_the_page_needs_no_key_and_the_state_does(tokenizer):
    with running(tokenizer, api_key=("sesame",)) as server:
        assert server.get("/").status_code == 200
        assert server.get("/static/app.js").status_code == 200
        assert_error(server.get("/engine/state"), 401, None, kind="authentication_error")
        answer = server.get("/engine/state", headers={"authorization": "Bearer sesame"})
        assert answer.status_code == 200


def test_nothing_comes_from_elsewhere(page):
    for name in OURS:
        text = (STATIC / name).read_text()
        text = re.sub(r"http://www.w3.org/(2000/svg|1998/Math/MathML)", "", text)
        assert not re.search(r"(?i:https?:|//[a-z0-9-]+\.[a-z]|@import)|\burl\(", text), name
    assert all(reference.startswith(("static/", "#")) for reference in page.references)
    assert {reference.removeprefix("static/") for reference in page.references if reference[0] != "#"} <= set(FILES)


def test_modules_import_each_other_only():
    for path in STATIC.glob("*.js"):
        for target in re.findall(r'from "([^"]+)"', path.read_text()):
            assert target.startswith("./")
            assert target.removeprefix("./") in FILES


def test_vendored_libraries_have_their_licences_and_are_small():
    for name in VENDORED:
        path = STATIC / name
        assert path.with_name(f"{path.name.split('.')[0]}.LICENSE").exists() or path.with_name("LICENSE").exists()
    assert sum((STATIC / name).stat().st_size for name in VENDORED) < 150_000


def test_text_never_becomes_markup():
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            path
        )


def test_the_page_breaks_no_rule_of_its_policy(page):
    assert page.wrong == []


def test_every_element_that_a_script_asks_for_is_there(page):
    assert len(set(page.ids)) == len(page.ids)
    for path in STATIC.glob("*.js"):
        asked = set(re.findall(r'\$\("([\w-]+)"\)', path.read_text()))
        assert asked <= set(page.ids), path


def test_every_field_has_a_name(page):
    assert set(page.fields) <= page.labelled


def test_the_page_is_small():
    assert sum((STATIC / name).stat().st_size for name in OURS) < 120_000


def test_the_state_is_what_the_engine_holds(server):
    server.play = lambda request: Script(token_ids=[10, 11, 12], hangs=True)
    body = {"prompt": "abc", "max_tokens": 9, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE, verify=False):
        wait_until(lambda: server.client.num_running == 1)
        wait_until(lambda: server.client.snapshot().running[0].num_output_tokens == 3)
        time.sleep(MAX_AGE)  # the state that was shown last may be from before
        state = msgspec.json.decode(server.get("/engine/state").content, type=EngineState)
    info = server.client.info
    assert (state.max_num_seqs, state.block_size, state.num_blocks) == (info.max_num_seqs, 16, 1024)
    (request,) = state.snapshot.running
    assert request.request_id.startswith("cmpl-")
    assert (request.num_prompt_tokens, request.num_output_tokens, request.max_tokens) == (4, 3, 9)
    assert state.snapshot.blocks == [1, 1, 0, 1023]


def test_a_dead_engine_has_no_state(tokenizer):
    with running(tokenizer) as server:
        server.client.die()
        assert_error(server.get("/engine/state"), 503, None, kind="service_unavailable_error")


def test_nobody_looks_and_nothing_is_taken(server):
    before = server.client.num_snapshots
    assert server.post("/v1/completions", {"prompt": "abc"}).status_code == 200
    assert server.client.num_snapshots == before


async def test_many_who_look_share_a_snapshot():
    client = FakeEngineClient()
    view = EngineView(client)
    states = await asyncio.gather(*(view.state() for _ in range(50)))
    assert len({state.time for state in states}) == 1
    assert client.num_snapshots == 1
    await asyncio.sleep(MAX_AGE * 1.5)
    assert (await view.state()).time > states[0].time
    assert client.num_snapshots == 2
    client.close()


async def test_one_who_leaves_takes_nothing_from_the_others():
    client = FakeEngineClient()
    gate = threading.Event()
    take = client.snapshot
    client.snapshot = lambda: gate.wait(PATIENCE) and take()
    view = EngineView(client)
    leaver, stayer = asyncio.create_task(view.state()), asyncio.create_task(view.state())
    await asyncio.sleep(0)  # both are waiting now
    leaver.cancel()
    await asyncio.sleep(0)
    gate.set()
    assert (await stayer).snapshot.running == []
    client.close()


async def test_a_view_outlives_a_failure():
    client = FakeEngineClient()
    view = EngineView(client)
    take, client.snapshot = client.snapshot, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await view.state()
    client.snapshot = take
    assert (await view.state()).snapshot.blocks == [1, 0, 0, 1024]
    client.close()
