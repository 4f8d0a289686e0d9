"""Answers of a form over HTTP: the fields of OpenAI and of vLLM, whole and streamed, and a client that parses them."""

import contextlib
import json
import re
import threading

import jsonschema
import openai
import pydantic
import pytest
from server.serving import Running, assert_error, frames
from waiting import PATIENCE, wait_until

from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.server.state import MAX_COMPILING
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
    server = Running(frontend, ServerConfig(port=0, served_model_name="tiny"))
    server.start()
    yield server
    server.server.stop()
    assert server.wait() == 0


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


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{2,5}-\\d"}}, r"[ab]{2,5}-\d"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [a-c]+ ">"'}}, "<[a-c]+>"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"response_format": {"type": "text"}}, ".*"),
        ({"response_format": None, "structured_outputs": None}, ".*"),
    ],
)
def test_other_forms(server, form, pattern):
    body = {"messages": [USER], "max_tokens": 100, "n": 4, "seed": 2}
    for text in texts(server.post(CHAT, body | form)):
        assert re.fullmatch(pattern, text, re.DOTALL), text


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
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
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


def test_a_prompt_that_is_scored_needs_no_form(server):
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1} | FORMS["json"]
    answer = server.post(COMPLETIONS, body).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["usage"]["completion_tokens"] == 0


class SlowGrammars:
    """Grammars that are being made until `go_on` is set; `num_running` of them at this moment, `most` at once."""

    def __init__(self, server):
        self.go_on = threading.Event()
        self.num_running = self.most = 0
        self._compiling = server.server.state.compiling
        self._lock = threading.Lock()

    def make(self, _outputs):
        with self._lock:
            self.num_running += 1
            self.most = max(self.most, self.num_running)
        self.go_on.wait(PATIENCE)
        with self._lock:
            self.num_running -= 1
        return ""

    def end(self):
        """Let all that wait be made, and their turns be given back."""
        self.go_on.set()
        wait_until(lambda: self.num_running == 0 and self._compiling._value == MAX_COMPILING)
        self.go_on.clear()


@pytest.fixture
def slow_grammars(server, monkeypatch):
    """All turns are free before and after: a thread holds its turn on when its client has had the answer long since."""
    slow = SlowGrammars(server)
    monkeypatch.setattr("jaxserve.server.parsing.model.make_grammar", slow.make)
    slow.end()
    yield slow
    slow.end()


@contextlib.contextmanager
def asking(server, body, number):
    """So many clients at once, of whom nobody leaves before the end."""
    clients = [threading.Thread(target=server.post, args=(CHAT, body)) for _ in range(number)]
    for client in clients:
        client.start()
    yield
    for client in clients:
        client.join()


def test_a_slow_grammar_does_not_hold_up_others(server, slow_grammars):
    """Grammars are checked in threads, two at a time; the server answers meanwhile."""
    with asking(server, {"messages": [USER], "max_tokens": 2} | FORMS["json"], 5):
        wait_until(lambda: slow_grammars.num_running == MAX_COMPILING)
        assert server.get("/health").status_code == 200
        assert server.post(CHAT, {"messages": [USER], "max_tokens": 2}).status_code == 200
        assert slow_grammars.num_running == MAX_COMPILING, "nothing of this waits for them"
        slow_grammars.go_on.set()
    assert slow_grammars.most == MAX_COMPILING


def test_a_grammar_that_takes_too_long_is_refused(server, slow_grammars, monkeypatch):
    monkeypatch.setattr("jaxserve.server.generation.GRAMMAR_TIMEOUT", 0.05)
    for fields, param in (
        (FORMS["json"], "structured_outputs"),
        (FORMS["json_schema"], "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        assert_error(server.post(CHAT, {"messages": [USER]} | fields), 400, param)
        slow_grammars.end()
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    assert_error(server.post("/v1/responses", {"input": "a", "text": text}), 400, "text.format.schema")


def test_a_turn_that_does_not_come(server, slow_grammars, monkeypatch):
    body = {"messages": [USER], "max_tokens": 2} | FORMS["json"]
    with asking(server, body, MAX_COMPILING):
        wait_until(lambda: slow_grammars.num_running == MAX_COMPILING)
        monkeypatch.setattr("jaxserve.server.generation.GRAMMAR_QUEUE_TIMEOUT", 0.05)  # they have their turns
        refused = server.post(CHAT, body)
        slow_grammars.go_on.set()
    assert_error(refused, 429, None, "rate_limit_error")
    assert refused.headers["retry-after"] == str(int(PATIENCE)), "by then those have been made or given up"


def test_the_engines_refusal_speaks_of_the_field_that_was_sent(server, monkeypatch):
    """What passes here may still be refused by the engine, which knows its own tokens only."""
    monkeypatch.setattr("jaxserve.server.parsing.model.make_grammar", lambda _: "{}")
    for stream in (False, True):
        for fields, param in (
            (FORMS["json"], "structured_outputs"),
            (FORMS["json_schema"], "response_format.json_schema.schema"),
        ):
            assert_error(server.post(CHAT, {"messages": [USER], "stream": stream} | fields), 400, param)
