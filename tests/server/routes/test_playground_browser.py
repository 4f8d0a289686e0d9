"""The playground in a headless Chromium, over a scripted engine; skipped without Chromium."""

import contextlib
import json
import time

import httpx
import pytest
from browser import browsing, missing
from fake_client import Script
from serving import byte_tokenizer, running
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"needs a browser: {missing()}")

LAST = ".message:last-child"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def page(browser, server):
    """The page, as seen on a first visit."""
    browser.open(server.url)
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.log()
    browser.resize(1280, 800)
    browser.open(server.url)
    browser.wait_until("document.body.dataset.mode === 'chat'")
    yield browser
    assert browser.log() == [], "the page has complained, or broken its security policy"


def _answer(page):
    """Return the text of the last answer, when it is complete."""
    page.wait_until("document.querySelectorAll('.message.assistant').length && !document.querySelector('.busy')")
    return page.text(f"{LAST} .prose")


def _say(page, text):
    page.type("#input", text + "{Enter}")


def test_a_chat_streams_in_as_tokens_that_know_their_probability(page, server):
    server.says("Señor 🦙!")
    _say(page, "hello")
    assert _answer(page) == "Señor 🦙!"
    assert page.text(".message.user .prose") == "hello"
    tokens = page.run(f"return [...document.querySelectorAll('{LAST} .token')].map((token) => token.textContent)")
    assert tokens == ["S", "e", "ñ", "o", "r", " ", "🦙", "!"]  # a character of several tokens is one span
    page.hover(f"{LAST} .token:nth-child(2)")
    assert page.is_shown("#tip")
    assert "22.3%" in page.text("#tip .chosen")  # the scripted engine's logprob is -1.5
    assert page.count("#tip tr") == 5
    page.hover("header")
    page.wait_until("document.getElementById('tip').hidden")
    assert "first token" in page.text("#status")


def test_what_is_said_is_text_and_never_markup(page, server):
    server.says("<img src=x onerror=alert(1)>")
    _say(page, "<b>bold</b>")
    assert _answer(page) == "<img src=x onerror=alert(1)>"
    assert page.text(".message.user .prose") == "<b>bold</b>"
    assert page.count(".message img, .message b") == 0


def test_escape_stops_an_answer_and_its_request(page, server):
    server.play = lambda request: Script(token_ids=server.tokenizer.encode("on and on"), hangs=True)
    _say(page, "go on")
    page.wait_until("document.querySelector('#send').textContent === 'Stop'")
    page.wait_until("document.querySelectorAll('.token').length > 5")
    page.press("Escape")
    page.wait_until("document.querySelector('#send').textContent === 'Send'")
    wait_until(lambda: server.client.num_running == 0)
    assert "stopped" in page.text("#status")
    assert page.text(f"{LAST} .prose").startswith("on and")


def test_an_answer_is_made_again_and_a_question_put_differently(page, server):
    server.says("one")
    _say(page, "first")
    assert _answer(page) == "one"
    server.says("two")
    page.run(f"document.querySelectorAll('{LAST} .tools button')[1].click()")
    page.wait_until(f"document.querySelector('{LAST} .prose').innerText === 'two'")
    assert page.count(".message") == 2

    server.says("three")
    page.press("ArrowUp") if page.run("return document.activeElement.id === 'input'") else page.type(
        "#input", "{ArrowUp}"
    )
    page.type(".message.user textarea", " and last{Enter}")
    page.wait_until(f"document.querySelector('{LAST} .prose')?.innerText === 'three'")
    assert page.text(".message.user .prose") == "first and last"
    assert page.count(".message") == 2


def test_a_completion_goes_on_where_the_text_ends(page, server):
    page.run("document.querySelector('[name=mode][value=completion]').click()")
    page.type("#prompt", "Once upon")
    server.says(" a time")
    page.click("#send")
    page.wait_until("document.getElementById('continuation').textContent === ' a time'")
    page.wait_until("!document.getElementById('choices').hidden")
    tops = page.run(
        "return [document.querySelector('#continuation .token'), document.getElementById('prompt')]"
        ".map((element) => element.getBoundingClientRect().top)"
    )
    assert abs(tops[0] - tops[1]) < 10, "the continuation begins in the line where the text ends"
    server.says(" in")
    page.run("document.querySelector('#choices button').click()")
    page.wait_until("document.getElementById('continuation').textContent === ' in'")
    assert page.run("return document.getElementById('prompt').value") == "Once upon a time"


def test_parameters_go_with_the_request_and_empty_ones_do_not(page, server):
    page.run("document.querySelector('[name=panel][value=parameters]').click()")
    for name, value in {"temperature": "0.5", "top_k": "7", "seed": "3"}.items():
        page.type(f"[name={name}]", value)
    page.type("[name=system]", "Be brief.")
    page.type("[name=stop]", "END")
    _say(page, "hello")
    _answer(page)
    (request,) = server.client.submitted
    assert (request.params.temperature, request.params.top_k, request.params.seed) == (0.5, 7, 3)
    assert request.params.max_tokens == 256
    assert list(request.params.stop) == ["END"]
    assert request.params.top_p in (None, 1.0)
    prompt = server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert "Be brief." in prompt


def nobody_looks(server):
    """Return whether no snapshot is taken in a time in which the page takes several."""
    before = server.client.num_snapshots
    time.sleep(0.8)
    return server.client.num_snapshots == before


def test_the_engine_is_shown_while_it_is_looked_at(page, server):
    server.play = lambda request: Script(token_ids=[10, 11, 12], hangs=True)
    _say(page, "watch this")
    page.wait_until("document.querySelector('#requests li.mine')")
    page.wait_until("document.getElementById('running').textContent.startsWith('1')")
    assert "1,024, 16 tokens each" in page.text("#blocks-note")
    drawn = page.run(
        "const canvas = document.getElementById('blocks'); const context = canvas.getContext('2d');"
        "return [...context.getImageData(3, 3, 1, 1).data]"
    )
    assert drawn[:3] == [47, 128, 121], "the first block is in use"
    page.run("document.querySelector('[name=panel][value=parameters]').click()")
    wait_until(lambda: nobody_looks(server))
    page.press("Escape")
    wait_until(lambda: server.client.num_running == 0)


def test_light_and_dark_follow_the_system_until_somebody_chooses(page):
    light, dark = "rgb(251, 250, 248)", "rgb(22, 22, 20)"

    def wait_for(paper):
        page.wait_until("getComputedStyle(document.body).backgroundColor === arguments[0]", paper)

    page.prefer("dark")
    wait_for(dark)
    page.click("#theme")
    wait_for(light)
    page.prefer("light")
    page.prefer("dark")
    wait_for(light)
    page.click("#theme")
    wait_for(dark)
    page.prefer("light")
    wait_for(light)


def test_a_narrow_page_shows_one_view_at_a_time_and_never_scrolls_sideways(page):
    page.resize(380, 700)
    assert page.is_shown("#input")
    assert not page.is_shown("#engine")
    for view, shown in {"engine": "#blocks", "parameters": "[name=temperature]", "talk": "#input"}.items():
        page.run("document.querySelector(`[name=view][value=${arguments[0]}]`).click()", view)
        assert page.is_shown(shown)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def test_every_control_is_reached_by_the_keyboard_and_has_a_name(page):
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, textarea')]"
        ".filter((element) => element.checkVisibility())"
        ".filter((element) => !(element.labels?.length || element.ariaLabel || element.textContent.trim()))"
        ".map((element) => element.outerHTML)"
    )
    assert nameless == []
    page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(12):
        page.press("Tab")
        reached.add(page.run("return document.activeElement.id || document.activeElement.name"))
    assert {"mode", "theme", "panel", "input", "send", "colour", "clear"} <= reached


def test_an_error_is_sent_in_place_of_the_answer(page, server):
    page.run("document.querySelector('[name=panel][value=parameters]').click()")
    page.type("[name=max_tokens]", "99999")  # appended to the 256 that is there
    _say(page, "too long")
    page.wait_until("document.querySelector('.note[role=alert]')")
    assert "context length" in page.text(".note[role=alert]")
    page.log()  # Chromium notes every 400


def test_a_key_is_asked_for_and_kept_for_the_tab(browser, tokenizer):
    with running(tokenizer, api_key=("sesame",)) as server:
        browser.open(server.url)
        browser.wait_until("document.getElementById('key-dialog').open")
        browser.type("#key", "wrong{Enter}")
        browser.wait_until("document.getElementById('key-dialog').open && !document.getElementById('key-error').hidden")
        browser.type("#key", "sesame{Enter}")
        browser.wait_until("document.getElementById('model').textContent === 'fake'")
        browser.wait_until("document.getElementById('running').textContent.startsWith('0')")
        assert browser.run("return [sessionStorage.length, JSON.stringify(localStorage)]")[0] == 1
        assert "sesame" not in json.dumps(browser.run("return {...localStorage}"))
        server.says("open")
        _say(browser, "hello")
        assert _answer(browser) == "open"
    browser.log()  # 401 is noted, too


def test_sixteen_streams_are_seen_at_once(page, server):
    server.play = lambda request: Script(token_ids=[10, 11, 12], hangs=True)
    body = {"prompt": "abc", "max_tokens": 9, "stream": True}
    with contextlib.ExitStack() as streams:
        for _ in range(16):
            url = server.url + "/v1/completions"
            streams.enter_context(httpx.stream("POST", url, json=body, timeout=PATIENCE, verify=False))
        page.wait_until("document.querySelectorAll('#requests li[data-id]').length === 16")
        page.wait_until("document.getElementById('running').textContent.startsWith('16')")
    page.wait_until("document.querySelectorAll('#requests li[data-id]').length === 0")


def test_a_model_without_a_chat_template_is_met_with_a_page_to_continue(browser):
    tokenizer = byte_tokenizer()
    tokenizer._chat_templates = {}
    with running(tokenizer) as server:
        browser.open(server.url)
        browser.wait_until("document.body.dataset.mode === 'completion'")
        server.says(" more")
        browser.type("#prompt", "once")
        browser.press("Escape")  # nothing runs: nothing happens
        browser.click("#send")
        browser.wait_until("document.getElementById('continuation').textContent === ' more'")
    browser.log()  # the 400 that reported it is logged


def test_markdown_is_shown_as_such_and_nothing_else_of_it(page, server):
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    server.says(f"# Title\n\nA *word*, <script>bad()</script> $x^2$\n\n```python\nprint(1)\n```\n\n{table}")
    _say(page, "hello")
    page.wait_until(f"document.querySelector('{LAST} .markdown')")
    assert page.text(f"{LAST} .markdown h1") == "Title"
    assert page.text(f"{LAST} .markdown pre code").strip() == "print(1)"
    assert page.count(f"{LAST} .markdown td") == 2
    assert page.count(f"{LAST} .markdown script") == 0
    assert "<script>bad()</script> $x^2$" in page.text(f"{LAST} .markdown p")
    assert page.is_shown(f"{LAST} .markdown .copy")
    assert not page.is_shown(f"{LAST} .prose")
    page.click("#colour")
    assert page.is_shown(f"{LAST} .prose"), "tokens have their colours"
    assert page.is_shown("#doubt-legend")
    page.click("#colour")


def test_chats_are_kept_in_the_browser(page, server):
    server.says("First answer.")
    _say(page, "one question")
    assert _answer(page) == "First answer."
    page.click("#clear")
    server.says("Second answer.")
    _say(page, "another question")
    assert _answer(page) == "Second answer."
    page.open(server.url)
    page.wait_until("document.body.dataset.mode === 'chat'")
    page.click("#chats-button")
    names = page.run("return [...document.querySelectorAll('#chat-list input')].map((field) => field.value)")
    assert names == ["another question", "one question"]
    page.run("document.querySelectorAll('#chat-list .open')[1].click()")
    assert page.text(f"{LAST} .prose") == "First answer."
    page.click("#chats-button")
    page.run("document.querySelectorAll('#chat-list li:nth-child(1) button')[1].click()")
    assert page.count("#chat-list li") == 1
    page.click("#new-chat")
    assert page.is_shown(".empty")
