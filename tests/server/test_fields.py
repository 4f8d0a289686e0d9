"""The table of fields, cell by cell: what it says is what the routes do, and what the documentation says."""

import pathlib

import pytest
from serving import assert_error

from jaxserve.server.protocol.chat import ChatRequest
from jaxserve.server.protocol.completions import CompletionRequest
from jaxserve.server.protocol.embeddings import EmbeddingRequest
from jaxserve.server.protocol.fields import FIELDS, FOLLOWED, NO_EFFECT, ROUTES, SAMPLING, UNKNOWN, Refused, followed
from jaxserve.server.protocol.fields_page import page
from jaxserve.server.protocol.responses import ResponsesRequest
from jaxserve.server.protocol.utility import TokenizeRequest

USER = {"role": "user", "content": "hello"}
BODIES = {
    "completions": ("/v1/completions", {"prompt": "a", "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {"messages": [USER], "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    "embeddings": ("/v1/embeddings", {"input": "hello"}),
    "tokenize": ("/tokenize", {"prompt": "hello"}),
}
STRUCTS = (CompletionRequest, ChatRequest, ResponsesRequest, EmbeddingRequest, TokenizeRequest)
TOOL = {"type": "function", "function": {"name": "f"}}

# A value of each field that SamplingParams gets, which is not the one it has without.
SAMPLES = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"65": 1.5},
    "allowed_token_ids": [65, 66],
    "bad_words": ["x"],
    "seed": 5,
    "stop": ["x"],
    "stop_token_ids": [70],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "skip_special_tokens": False,
    "n": 2,
}


def cells(kind):
    return [(route, field) for route in ROUTES for field in FIELDS if isinstance(field.cell(route), kind)]


def num_unknown(server):
    (line,) = [line for line in server.get("/metrics").text.splitlines() if "unknown_request_fields_total{" in line]
    return float(line.split()[-1])


def name(value):
    return getattr(value, "name", None)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_a_request_has_the_fields_that_its_route_follows(struct):
    assert set(struct.__struct_fields__) == followed(struct.route)


def test_each_field_has_one_row():
    assert len({field.name for field in FIELDS}) == len(FIELDS)


@pytest.mark.parametrize(("route", "field"), cells(Refused), ids=name)
def test_refused(server, route, field):
    """By its name and with the word of the table; null is no value."""
    path, body = BODIES[route]
    cell = field.cell(route)
    assert isinstance(cell, Refused)
    refused = server.post(path, body | {field.name: "unheard of"})
    assert_error(refused, 400, field.name)
    assert cell.word in refused.json()["error"]["message"]
    for neutral in cell.neutral:
        assert server.post(path, body | {field.name: neutral}).status_code != 400, neutral


@pytest.mark.parametrize(
    ("route", "field"),
    [(route, field) for route in ROUTES for field in FIELDS if field.cell(route) is NO_EFFECT],
    ids=name,
)
def test_what_has_no_effect_is_known(server, route, field):
    path, body = BODIES[route]
    before = num_unknown(server)
    assert server.post(path, body | {field.name: "anything"}).status_code == 200
    assert num_unknown(server) == before


@pytest.mark.parametrize(
    ("route", "field"),
    [(route, name) for route in ("completions", "chat", "responses") for name in SAMPLING if name in followed(route)],
)
def test_sampling_reaches_the_engine(server, route, field):
    path, body = BODIES[route]
    assert server.post(path, body | {field: SAMPLES[field]}).status_code == 200
    params = server.client.submitted[0].params
    value = getattr(params, field)
    expected = {65: 1.5} if field == "logit_bias" else SAMPLES[field]
    assert (list(value) if isinstance(value, tuple) else value) == expected


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_every_name_of_the_limit(server, route, field):
    path, body = BODIES[route]
    body = {key: value for key, value in body.items() if not key.startswith("max_")}
    assert server.post(path, body | {field: 3}).status_code == 200
    assert server.client.submitted[0].max_tokens == 3


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
def test_structured_outputs_are_followed(server, route):
    path, body = BODIES[route]
    assert server.post(path, body | {"structured_outputs": {"choice": ["yes", "no"]}}).status_code == 200
    assert "yes" in server.client.submitted[0].grammar


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("field", ["guided_json", "guided_whatever", "grammar", "json_schema", "regex", "ebnf"])
def test_other_names_of_a_form_point_to_ours(server, route, field):
    path, body = BODIES[route]
    answer = server.post(path, body | {field: {"type": "object"}})
    assert_error(answer, 400, field)
    assert "structured_outputs" in answer.json()["error"]["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_field_is_ignored_counted_and_logged_once(server, route, caplog):
    path, body = BODIES[route]
    before = num_unknown(server)
    misspelt = {"completions": "temperatur", "chat": "temperatur", "responses": "previous_response"}.get(route, "modle")
    meant = {"temperatur": "temperature", "previous_response": "previous_response_id", "modle": "model"}[misspelt]
    for _ in range(3):
        assert server.post(path, body | {misspelt: 0.5, f"{route}_qqqq": []}).status_code == 200
    assert num_unknown(server) == before + 6
    told = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert len(told) == 2
    assert f"{misspelt!r}" in told[0]
    assert f"did you mean {meant!r}?" in told[0]
    assert "did you mean" not in told[1]


def test_names_that_clients_choose_are_bounded(server, caplog):
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1} | {f"zz\n{i}" + "y" * 500: 1 for i in range(600)})
    told = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert len(told) <= 256
    assert all(len(line) < 300 and "\n" not in line for line in told)


def test_the_page_is_current():
    """`python -m jaxserve.server.protocol.fields_page` prints it."""
    path = pathlib.Path(__file__).parents[2] / "docs" / "fields.md"
    assert path.read_text(encoding="utf-8") == page()


def test_what_is_unknown_somewhere_is_known_elsewhere():
    assert all(any(field.cell(route) is not UNKNOWN for route in ROUTES) for field in FIELDS)
    assert any(field.cell(route) is FOLLOWED for field in FIELDS for route in ROUTES)
