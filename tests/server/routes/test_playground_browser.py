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
    browser.open("about:blank")
    browser.forget(server.url)
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


def _tool(page, name):
    """Press a button of the last message."""
    buttons = f"[...document.querySelectorAll('{LAST} .tools button')]"
    page.run(f"{buttons}.find((button) => button.textContent === arguments[0]).click()", name)


def _say(page, text):
    page.type("#input", text + "{Enter}")


def test_a_chat_streams_in_as_tokens_that_know_their_probability(page, server):
    server.says("Señor 🦙!")
    page.click("#colour")
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


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_probabilities_are_asked_for_only_if_they_are_shown(page, server, mode):
    """A server that has just started has no program for them yet: an answer with them would have to wait for it."""
    page.run("document.querySelector(`[name=mode][value=${arguments[0]}]`).click()", mode)
    for number_asked_for in (None, 5):
        page.type("#input" if mode == "chat" else "#prompt", "hello")
        page.click("#send")
        page.wait_until("document.getElementById('status').textContent.includes('first token')")
        assert server.client.submitted[-1].params.logprobs == number_asked_for
        page.click("#colour")


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
    page.wait_until(f"document.querySelector('{LAST} .prose').textContent.length > 5")
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
    _answer(page)
    assert page.count(".message") == 2

    server.says("three")
    page.type("#input", "{ArrowUp}")
    page.type(".message.user textarea", " and last{Enter}")
    page.wait_until(f"document.querySelector('{LAST} .prose')?.innerText === 'three'")
    assert page.text(".message.user .prose") == "first and last"
    assert page.count(".message") == 2


def test_a_completion_goes_on_where_the_text_ends(page, server):
    page.run("document.querySelector('[name=mode][value=completion]').click()")
    page.click("#colour")
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
    for name, value in {"temperature": "0.5", "top_k": "7", "top_n_sigma": "1.5", "seed": "3"}.items():
        page.type(f"[name={name}]", value)
    page.type("[name=system]", "Be brief.")
    page.type("[name=stop]", "END")
    _say(page, "hello")
    _answer(page)
    (request,) = server.client.submitted
    sent = request.params
    assert (sent.temperature, sent.top_k, sent.top_n_sigma, sent.seed) == (0.5, 7, 1.5, 3)
    assert request.max_tokens > 256, "the rest of the context"
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
    for _ in range(20):
        page.press("Tab")
        reached.add(page.run("return document.activeElement.id || document.activeElement.name"))
    assert {"mode", "theme", "panel", "input", "send", "colour", "clear"} <= reached


def test_an_error_is_sent_in_place_of_the_answer(page, server):
    page.run("document.querySelector('[name=panel][value=parameters]').click()")
    page.type("[name=max_tokens]", "99999")
    _say(page, "too long")
    page.wait_until("document.querySelector('#chat .note[role=alert]')")
    assert "context length" in page.text("#chat .note[role=alert]")
    page.log()  # Chromium notes every 400


def test_an_answer_that_was_cut_goes_on_where_it_ends(page, server):
    page.run("document.querySelector('[name=panel][value=parameters]').click()")
    page.type("[name=max_tokens]", "5")
    server.says("One *two* three")
    _say(page, "count")
    assert _answer(page) == "One *"
    assert "length" in page.text("#status")
    page.run("document.querySelector('[name=max_tokens]').value = ''")
    server.says("two* three")
    _tool(page, "Continue")
    page.wait_until(f"document.querySelector('{LAST} .markdown em')?.textContent === 'two'")
    assert _answer(page) == "One *two* three"
    assert page.count(".message") == 2
    prompt = server.prompt()
    assert prompt.endswith("assistant\nOne *")
    assert "Continue" not in page.text(f"{LAST} .tools")


def test_a_completion_has_the_rest_of_the_context(page, server):
    page.run("document.querySelector('[name=mode][value=completion]').click()")
    page.type("#prompt", "abc")
    server.says(" and so on")
    page.click("#send")
    page.wait_until("document.getElementById('continuation').textContent === ' and so on'")
    (request,) = server.client.submitted
    assert request.max_tokens == server.client.info.max_model_len - len(request.prompt_token_ids)


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_an_answer_that_breaks_off_says_so_and_stays(page, server, mode):
    page.run("document.querySelector(`[name=mode][value=${arguments[0]}]`).click()", mode)
    server.says("half an", error="the engine has failed")
    page.type("#input" if mode == "chat" else "#prompt", "tell")
    page.click("#send")
    page.wait_until("document.querySelector('.note[role=alert]:not([hidden])')")
    answer = page.text(f"{LAST} .prose" if mode == "chat" else "#continuation")
    assert answer == "half an"
    assert "The answer broke off" in page.text("#talk .note[role=alert]")
    assert "broken off" in page.text("#status")
    if mode == "completion":
        assert page.count("#choices button") == 3, "what is there can be kept"


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ('[{"name": "f"', "not JSON"),
        ("null", "function 1"),
        ('[{"name": "f"}, {"type": "function"}]', "function 2"),
    ],
)
def test_tools_that_are_none_are_named_before_anything_is_sent(page, server, tools, problem):
    page.run("document.querySelector('[name=panel][value=parameters]').click()")
    page.type("[name=tools]", tools)
    assert problem in page.text("#tools-error"), "as soon as they are typed"
    page.run("document.querySelector('[name=panel][value=engine]').click()")
    _say(page, "hello")
    page.wait_until("document.querySelector('[name=tools]').checkVisibility()")
    assert page.is_shown("#tools-error")
    assert server.client.submitted == []
    assert page.run("return document.getElementById('input').value") == "hello", "what was said is not lost"
    page.run("document.querySelector('[name=mode][value=completion]').click()")
    page.type("#prompt", "abc")
    page.click("#send")
    page.wait_until("document.getElementById('continuation').textContent"), "a completion has no tools"


def test_a_parameter_out_of_its_range_is_named_before_anything_is_sent(page, server):
    page.run("document.querySelector('[name=panel][value=parameters]').click()")
    page.type("[name=temperature]", "7")
    _say(page, "hello")
    assert page.run("return document.activeElement.name") == "temperature"
    assert server.client.submitted == []


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
        browser.open(server.url)
        browser.wait_until("document.body.dataset.mode === 'chat'")
        assert browser.text(f"{LAST} .prose") == "open", "the chat is there after a reload, and so is the key"
        _say(browser, "again")
        browser.wait_until("document.querySelectorAll('.message').length === 4")
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
    table = "| a | b |\n|---|---|\n| 1 | 2<br>3 |\n"
    server.says(f"# Title\n\nA *word*, <script>bad()</script>\n\n```python\nprint(1)\n```\n\n{table}")
    _say(page, "hello")
    _answer(page)
    assert page.text(f"{LAST} .markdown h1") == "Title"
    assert page.text(f"{LAST} .markdown pre code").strip() == "print(1)"
    assert page.text(f"{LAST} .code-built_in") == "print"
    assert page.text(f"{LAST} .code-number") == "1"
    assert page.count(f"{LAST} .markdown td") == 2
    assert page.count(f"{LAST} .markdown td br") == 1
    assert page.count(f"{LAST} .markdown script") == 0
    assert "<script>bad()</script>" in page.text(f"{LAST} .markdown p")
    assert page.is_shown(f"{LAST} .markdown .copy")
    assert not page.is_shown(f"{LAST} .prose")
    page.click("#colour")
    assert page.is_shown(f"{LAST} .prose"), "tokens have their colours"
    assert page.is_shown("#doubt-legend")
    page.click("#colour")


def test_formulas_are_drawn_and_what_is_none_stays_text(page, server):
    others = r"it costs $5 or $6, $\unknown{x}$"
    matrix = r"\[" "\n" r"\begin{pmatrix} a & b \\[2pt] c & d \end{pmatrix}" "\n- 1\n" r"\]"
    unknown = r"\[ \unknown{x} \\ y_a z_b \]"
    server.says(
        rf"$E = mc^2$, \(\alpha_i\), {others} $$\sum_{{k=0}}^n \frac{{1}}{{\sqrt{{k}}}}$$ **x** {unknown}"
        f"\n\n{matrix}\n\nbehind\n\nA $$b$$ is inside, "
        r"\[ is never closed, \[z\] is"
    )
    _say(page, "hello")
    _answer(page)
    formulas = page.run(f"return [...document.querySelectorAll('{LAST} math')].map((math) => math.textContent)")
    assert formulas == ["E=mc2", "\u03b1i", "∑k=0n1k", "(abcd)\u22121", "b", "z"]
    assert page.count(f"{LAST} math munderover, {LAST} math msqrt, {LAST} math msup, {LAST} math msub") == 4
    assert page.count(f"{LAST} math mtd") == 4
    assert page.count(f"{LAST} br") == 0, "the last one is inside of its line"
    assert others in page.text(f"{LAST} .markdown")
    assert unknown in page.text(f"{LAST} .markdown"), "its backslashes are not those of Markdown"


HOSTILE = [
    r"$\href{javascript:alert(1)}{x}$ $<img src=x onerror=alert(1)>$ $\text{<script>alert(1)</script>}$ $x_y$",
    "**x** <img src=x onerror=alert(1)>",
    "**x**\n\n<div onclick=alert(1)>\n**y**\n</div>",
    "[x](javascript:alert(1))",
    "[x](JaVa\tScRiPt:alert(1)) [y]( data:text/html,<script>alert(1)</script> )",
    "[x](&#106;avascript:alert(1))",
    "[x][1]\n\n[1]: javascript:alert(1)",
    "![x](http://127.0.0.1:9/leak.png) ![y](javascript:alert(1))",
    "<javascript:alert(1)>  **x**",
    "# &lt;img src=x onerror=alert(1)&gt; &lt;script&gt;alert(1)&lt;/script&gt;",
    "```html\n<script>alert(1)</script><img src=x onerror=alert(1)>\n```",
    '```"><script>alert(1)</script>\n<b>x</b>\n```',
    "```__proto__\nx\n```\n\n```constructor\ny\n```",
    "| <svg onload=alert(1)> |\n|---|\n| `<iframe src=//x>` |",
    '[x](https://example.org "" onmouseover=alert(1)")',
    "1. <style>*{display:none}</style>\n2. <a href=javascript:alert(1)>z</a>",
]


def test_hostile_markdown_stays_text(page, server):
    for text in HOSTILE:
        page.click("#clear")
        server.says(text)
        _say(page, "hello")
        _answer(page)
        elements = page.run(
            f"return [...document.querySelectorAll('{LAST} .markdown *')].filter((e) => !e.matches('.copy'))"
            ".map((e) => [e.tagName, ...[...e.attributes].map((a) => a.name)])"
        )
        names = {"href", "target", "rel", "class", "start", "display", "width"}
        assert not {tag for tag, *_ in elements} & {"SCRIPT", "IMG", "SVG", "IFRAME", "STYLE", "DIV"}, text
        assert {name for _, *attributes in elements for name in attributes} <= names, text
        links = page.run(f"return [...document.querySelectorAll('{LAST} .markdown a')].map((a) => a.protocol)")
        assert set(links) <= {"http:", "https:", "mailto:"}, text
        assert page.log() == [], text
    assert page.run("return performance.getEntriesByType('resource').filter((e) => /leak/.test(e.name)).length") == 0


def test_markdown_nested_without_end_is_shown_all_the_same(page):
    for text in (">" * 20_000, "[" * 20_000, "- " * 8_000, "*a " * 8_000, "`x` " * 60_000):
        is_hidden, milliseconds = page.run(
            """return import(new URL("static/markdown.js", document.baseURI)).then(({ MarkdownView }) => {
              const prose = document.createElement("div");
              const box = document.createElement("div");
              prose.textContent = arguments[0];
              box.append(prose);
              const start = performance.now();
              const view = new MarkdownView(prose);
              view.show(arguments[0]);
              const element = prose.classList.contains("raw") ? view.element : prose;
              return [element.hidden, performance.now() - start];
            })""",
            text,
        )
        assert is_hidden is False, text[:9]
        assert milliseconds < 10_000, text[:9]


def test_markdown_grows_while_it_streams_in(page, server):
    text = "# Title\n\nFirst *word*.\n\n- one\n- two\n\n```python\nx = 1"
    server.play = lambda request: Script(token_ids=server.tokenizer.encode(text, add_special_tokens=False), hangs=True)
    _say(page, "hello")
    page.wait_until(f"document.querySelector('{LAST} .markdown pre .code-number')")
    assert page.text("#send") == "Stop"
    assert page.is_shown(f"{LAST} .markdown")
    assert not page.is_shown(f"{LAST} .prose")
    page.run("window.height = document.querySelector('.markdown').offsetHeight")
    page.run(f"window.kept = document.querySelector('{LAST} .markdown p')")
    page.press("Escape")
    _answer(page)
    assert page.run(f"return window.kept === document.querySelector('{LAST} .markdown p')"), "blocks are not made anew"
    assert page.run("return window.height === document.querySelector('.markdown').offsetHeight"), "nothing jumps"


def _names(page):
    return page.run("return [...document.querySelectorAll('#chat-list .open')].map((button) => button.textContent)")


def _two_chats(page, server):
    server.says("First answer.")
    _say(page, "one question")
    assert _answer(page) == "First answer."
    page.click("#clear")
    assert page.is_shown(".empty")
    server.says("Second answer.")
    _say(page, "another question")
    assert _answer(page) == "Second answer."


def _reload(page, server):
    page.open(server.url)
    page.wait_until("document.body.dataset.mode === 'chat'")


def test_chats_are_kept_in_a_sidebar_and_the_last_one_is_there_after_a_reload(page, server):
    _two_chats(page, server)
    _reload(page, server)
    assert page.text(f"{LAST} .prose") == "Second answer."
    assert _names(page) == ["another question", "one question"]
    page.run("document.querySelectorAll('#chat-list .open')[1].click()")
    assert page.text(f"{LAST} .prose") == "First answer."
    _reload(page, server)
    assert page.text(f"{LAST} .prose") == "First answer."
    page.run("document.querySelector('#chat-list .here button:last-child').click()")
    assert page.is_shown(".empty")
    assert _names(page) == ["another question"]
    page.run("document.querySelector('#chat-list .quiet').click()")
    page.type("#chat-list input", "renamed{Enter}")
    assert _names(page) == ["renamed"]
    page.click("#chats-button")
    assert not page.is_shown("#chats")


def test_a_search_finds_chats_by_what_was_said(page, server):
    _two_chats(page, server)
    for sought, found in {"SECOND ans": ["another question"], "one quest": ["one question"], "nowhere": []}.items():
        page.run("document.getElementById('search').value = ''")
        page.type("#search", sought)
        assert _names(page) == found
    assert page.is_shown("#no-chats")


def _import(page, content):
    page.run(
        "const data = new DataTransfer(); data.items.add(new File([arguments[0]], 'chats.json'));"
        "const field = document.getElementById('import-file'); field.files = data.files;"
        "field.dispatchEvent(new Event('change'))",
        content,
    )


def test_exported_chats_are_imported_once(page, server):
    _two_chats(page, server)
    exported = page.run("return localStorage.getItem('jaxserve.chats')")
    page.run("localStorage.clear()")
    _reload(page, server)
    assert _names(page) == []
    for _ in range(2):
        _import(page, exported)
        page.wait_until("document.querySelectorAll('#chat-list .open').length === 2")
    assert _names(page) == ["another question", "one question"]
    page.run("document.querySelector('#chat-list .open').click()")
    assert page.text(f"{LAST} .prose") == "Second answer."


NO_CHATS = [
    "no JSON",
    "3",
    '[{"name": "x"}]',
    '[{"messages": [{"role": "tool", "text": "x"}]}]',
    '[{"messages": [{"role": "user", "text": 3}]}]',
    '[{"messages": [{"role": "assistant", "text": "x", "calls": [3]}]}]',
    '[{"messages": [{"role": "user", "text": "x", "branches": {"tails": [], "at": 0}}]}]',
]


def test_a_file_that_holds_no_chats_is_refused(page):
    for content in NO_CHATS:
        page.run("document.getElementById('import-error').hidden = true")
        _import(page, content)
        page.wait_until("!document.getElementById('import-error').hidden")
        assert _names(page) == [], content


def test_an_edited_question_begins_a_branch_and_the_old_one_is_kept(page, server):
    server.says("old answer")
    _say(page, "old question")
    _answer(page)
    server.says("new answer")
    page.type("#input", "{ArrowUp}")
    page.type(".message.user textarea", " again{Enter}")
    page.wait_until(f"document.querySelector('{LAST} .prose')?.innerText === 'new answer'")
    _answer(page)
    assert "2/2" in page.text(".message.user .tools")
    _reload(page, server)
    page.run("document.querySelector('.message.user [aria-label=\"Previous version\"]').click()")
    assert page.text(".message.user .prose") == "old question"
    assert page.text(f"{LAST} .prose") == "old answer"
    page.run("document.querySelector('.message.user [aria-label=\"Next version\"]').click()")
    assert page.text(f"{LAST} .prose") == "new answer"
