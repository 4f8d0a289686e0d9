"""Answers of a form over HTTP: the fields of OpenAI and of vLLM, whole and streamed, and a client that parses them."""

import concurrent.futures
import contextlib
import json
import re

import jsonschema
import openai
import pydantic
import pytest
from serving import assert_error, frames, raw_post, serving, synchronous
from waiting import wait_until

from jaxserve.engine.frontend import Frontend
from jaxserve.errors import InvalidRequest
from jaxserve.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello"}


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    size: int = pydantic.Field(ge=0, le=9999)
    twin: "City | None" = pydantic.Field(description="refers to itself")


@pytest.fixture(scope="module")
def server(random_model, random_engine):
    """A random model behind the server, in which the ends of strings and objects are likely."""
    tokenizer = Tokenizer.load(random_model)
    likely = {token: 4.0 for text in ['"', "}", '"}', ",", "null"] for token in tokenizer.encode(text)}
    frontend = Frontend(random_engine, tokenizer, seed=0, default_sampling={"logit_bias": likely})
    with serving(frontend, served_model_name="tiny") as server:
        yield server


def texts(answer):
    assert answer.status_code == 200, answer.text
    return [
        choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in answer.json()["choices"]
        if choice["finish_reason"] == "stop"
    ]


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
FORMS = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    },
    "json": {"structured_outputs": {"json": SCHEMA}},
    "json text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("form", FORMS)
def test_a_schema_by_any_field(server, path, form):
    body = {"messages": [USER]} if path == CHAT else {"prompt": ["a", "bc"]}
    found = texts(server.post(path, body | FORMS[form] | {"max_tokens": 200, "n": 3, "seed": 1}))
    assert len(found) >= 2
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)


TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
    "end": "</a>",
}
TRIGGERED = {"structures": [{"begin": "<a>", "schema": {"enum": [1, 2]}, "end": "</a>"}], "triggers": ["<a"]}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{2,5}-\\d"}}, r"[ab]{2,5}-\d"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [a-c]+ ">"'}}, "<[a-c]+>"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, "<a>[12]</a>"),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}}, "<a>[12]</a>"),
        ({"response_format": {"type": "structural_tag", **TRIGGERED}}, "([^<]|<(?!a)|<a>[12]</a>)*"),
        ({"response_format": {"type": "text"}}, ".*"),
        ({"response_format": None, "structured_outputs": None}, ".*"),
    ],
)
def test_other_formats(server, form, pattern):
    body = {"messages": [USER], "max_tokens": 100, "n": 4, "seed": 2}
    for text in texts(server.post(CHAT, body | form)):
        assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
def test_a_schema_that_is_not_strict_is_followed_as_far_as_a_grammar_can(server, path):
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 2, "maxItems": 3}
    for is_strict in (None, True, False):
        given = {"name": "x", "schema": schema, "strict": is_strict}
        flat, nested = {"type": "json_schema", **given}, {"type": "json_schema", "json_schema": given}
        for form in (flat, nested) if path != "/v1/responses" else (flat,):
            body = {"max_output_tokens": 200, "input": "a", "text": {"format": form}}
            if path != "/v1/responses":
                what = {"messages": [USER]} if path == CHAT else {"prompt": "a"}
                body = {"response_format": form, "max_tokens": 200, "seed": 1, "n": 3} | what
            answer = server.post(path, body)
            if is_strict is not False:
                assert answer.status_code == 400, answer.text
                assert "'uniqueItems'" in answer.json()["error"]["message"]
            elif path == "/v1/responses":
                assert answer.status_code == 200, answer.text
            else:
                assert texts(answer)
                assert [text for text in texts(answer) if not re.fullmatch(r'\[("[ab]",?\s*){2,3}\]', text)] == []


def test_a_stream_is_the_answer_in_pieces(server):
    body = {"messages": [USER], "max_tokens": 200, "seed": 4, "logprobs": True, "top_logprobs": 2} | FORMS["json"]
    whole = server.post(CHAT, body).json()["choices"][0]
    events = frames(server.post(CHAT, body | {"stream": True}))
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == len(
        whole["logprobs"]["content"]
    )


def test_the_client_parses_what_it_has_asked_for(server):
    with synchronous(server) as client:
        for seed in range(3):
            try:
                answer = client.chat.completions.parse(
                    model="tiny", messages=[USER], response_format=City, max_tokens=300, seed=seed
                )
            except openai.LengthFinishReasonError:
                continue
            assert isinstance(answer.choices[0].message.parsed, City)
            break
        else:
            pytest.fail("no text came to its end")


def test_a_prompt_that_is_scored_needs_no_structured_outputs(server):
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1} | FORMS["json"]
    answer = server.post(COMPLETIONS, body).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["usage"]["completion_tokens"] == 0


class SlowGrammars:
    """Grammars that are being made until a test settles them."""

    def __init__(self):
        self.waiting = []

    def answer(self, _wish, *, is_closed, is_strict):
        assert is_closed
        assert is_strict
        self.waiting.append(concurrent.futures.Future())
        return self.waiting[-1]


@pytest.fixture
def slow_grammars(server, monkeypatch):
    slow = SlowGrammars()
    monkeypatch.setattr(server.server.state.grammars.pool, "answer", slow.answer)
    return slow


@contextlib.contextmanager
def asking(server, body, number, path=CHAT):
    """Run `number` clients at once, none of which leaves before the end. Their answers come afterwards."""
    with concurrent.futures.ThreadPoolExecutor(number) as clients:
        answers = [clients.submit(server.post, path, body) for _ in range(number)]
        yield answers


def test_slow_grammars_hold_up_nothing_else(server, slow_grammars):
    with asking(server, {"messages": [USER], "max_tokens": 2} | FORMS["json"], 20) as answers:
        wait_until(lambda: len(slow_grammars.waiting) == 20)
        assert server.get("/health").status_code == 200
        assert server.post(CHAT, {"messages": [USER], "max_tokens": 2}).status_code == 200
        for future in slow_grammars.waiting:
            future.set_result(json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]}))
    assert [answer.result().json()["choices"][0]["message"]["content"] for answer in answers] == ["a"] * 20


def test_a_grammar_that_is_refused_names_the_field_that_was_sent(server, slow_grammars):
    param = "structured_outputs.json"
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    for path, body, field in (
        (CHAT, FORMS["json"], param),
        (CHAT, FORMS["json_schema"], "response_format.json_schema.schema"),
        (COMPLETIONS, {"prompt": "a"} | FORMS["json_schema"], "response_format.json_schema.schema"),
        (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/responses", {"input": "a", "text": text}, "text.format.schema"),
    ):
        slow_grammars.waiting.clear()
        with asking(server, ({"messages": [USER]} if path == CHAT else {}) | body, 1, path) as (answer,):
            wait_until(lambda: slow_grammars.waiting)
            slow_grammars.waiting[0].set_exception(InvalidRequest(f"{param}: it is too large", param=param))
        assert_error(answer.result(), 400, field)


def test_a_turn_that_does_not_come(server, slow_grammars, monkeypatch):
    for name in ("QUEUE_SECONDS", "JOB_SECONDS"):
        monkeypatch.setattr(f"jaxserve.server.generation.grammars.{name}", 0.05)
    refused = server.post(CHAT, {"messages": [USER], "max_tokens": 2} | FORMS["json"])
    assert_error(refused, 429, None, "rate_limit_error")
    assert slow_grammars.waiting[0].cancelled(), "it waits no longer"


def test_a_client_that_leaves_takes_its_grammar_out_of_the_queue(server, slow_grammars):
    with server.connection() as connection:
        connection.sendall(raw_post(CHAT, {"messages": [USER]} | FORMS["json"]))
        wait_until(lambda: len(slow_grammars.waiting) == 1)
    wait_until(lambda: slow_grammars.waiting[0].cancelled())


def test_the_engines_refusal_speaks_of_the_field_that_was_sent(server, monkeypatch):
    """What is accepted here may still be refused by the engine, which knows only its own tokens."""

    def pass_nonsense(_wish, *, is_closed, is_strict):
        future = concurrent.futures.Future()
        future.set_result("{}")
        return future

    monkeypatch.setattr(server.server.state.grammars.pool, "answer", pass_nonsense)
    for stream in (False, True):
        for fields, param in (
            (FORMS["json"], "structured_outputs"),
            (FORMS["json_schema"], "response_format.json_schema.schema"),
        ):
            assert_error(server.post(CHAT, {"messages": [USER], "stream": stream} | fields), 400, param)


OPEN = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
KIND = r'\{\s*"kind"\s*:\s*"[ab]"\s*\}'


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"response_format": {"type": "json_object", "schema": OPEN}}, KIND),
        ({"response_format": {"type": "json_schema", "schema": OPEN}}, KIND),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": OPEN}}}, KIND),
        ({"structured_outputs": {"json": OPEN, "disable_any_whitespace": True}}, r'\{"kind":"[ab]"\}'),
        (
            {"structured_outputs": {"json": OPEN, "whitespace_pattern": r"[\s]{2}"}},
            r'\{(\s\s)?"kind"(\s\s)?:(\s\s)?"[ab]"(\s\s)?\}',
        ),
        (
            {
                "response_format": {"type": "json_object", "schema": OPEN},
                "structured_outputs": {"disable_any_whitespace": True},
            },
            r'\{"kind":"[ab]"\}',
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_of_other_servers_are_followed(server, path, form, pattern):
    body = {"messages": [USER]} if path == CHAT else {"prompt": "a"}
    found = texts(server.post(path, body | form | {"max_tokens": 100, "n": 3, "seed": 1}))
    assert found
    for text in found:
        assert re.fullmatch(pattern, text, re.DOTALL), text
        jsonschema.validate(json.loads(text), OPEN)


@pytest.mark.slow
def test_objects_stay_open_where_that_is_asked_for(server):
    """Closed, no text has another property than the one that the schema names; open, some have one."""
    names = set()
    for seed in range(4):
        form = {"structured_outputs": {"json": OPEN, "disable_additional_properties": False}}
        likely = {str(token): 8 for token in server.server.state.model.frontend.tokenizer.encode(",")}
        body = {"messages": [USER], "max_tokens": 300, "n": 8, "seed": seed, "logit_bias": likely, "temperature": 1.5}
        names |= {name for text in texts(server.post(CHAT, body | form)) for name in json.loads(text)}
    assert "kind" in names
    assert len(names) > 1


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"response_format": {"type": "text", "schema": OPEN}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": "{}"}}, "response_format.schema"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
        ({"response_format": {"type": "json_object", "value": OPEN}}, "response_format"),
        ({"response_format": {"type": "text", "grammar": "x"}}, "response_format"),
        ({"structural_tag": {}}, "structural_tag"),
        ({"guided_json": {}}, "guided_json"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"extra_body": {"structured_outputs": {"json": OPEN}}}, "extra_body"),
        ({"nvext": {"guided_json": OPEN}}, "nvext"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": OPEN, "whitespace_pattern": "x*"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"not": {"minLength": 3}}}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_object", "schema": {"const": 2**60 + 1}}}, "response_format.schema"),
        ({"text": {"format": {"type": "text", "schema": OPEN}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": {"const": 2**60 + 1}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "value": OPEN}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "json_schema": {"schema": OPEN}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
def test_formats_that_are_refused(server, form, param):
    path, body = (
        ("/v1/responses", {"input": "hello"}) if "text" in form else (CHAT, {"messages": [USER], "max_tokens": 2})
    )
    assert_error(server.post(path, body | form), 400, param)


def test_a_response_follows_a_schema_beside_json_object(server):
    form = {"format": {"type": "json_object", "schema": {"enum": ["blue"]}}}
    answer = server.post("/v1/responses", {"input": "hello", "text": form, "max_output_tokens": 20}).json()
    assert answer["output"][-1]["content"][0]["text"] == '"blue"'


@pytest.mark.parametrize("name", FORMS)
def test_a_json_text_that_a_message_has_begun_is_refused(server, name):
    body = {"max_tokens": 1, "continue_final_message": True, **FORMS[name]}
    field = next(iter(FORMS[name]))
    begins = {
        'Here it is: {"kind": "a", ': 400,
        '{"kind": "}': 400,
        'A 5" screen: {"kind": ': 400,
        'Here "it" is: ': 200,
    }
    for begun, status in begins.items():
        answer = server.post(CHAT, body | {"messages": [USER, {"role": "assistant", "content": begun}]})
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["param"].startswith(field)
