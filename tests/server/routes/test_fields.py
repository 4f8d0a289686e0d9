"""The table of fields, cell by cell: it matches what the routes do, and the documentation."""

import json
import pathlib

import msgspec
import pytest
from serving import assert_error

from jaxserve.sampling_params import SamplingParams
from jaxserve.server.generation.unknown_fields import UnknownFields
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
NUMBERS = {
    field.name: field.default
    for field in msgspec.structs.fields(SamplingParams)
    if isinstance(field.default, (int, float))
}
SAMPLES = {
    **{name: not default if isinstance(default, bool) else default + 1 for name, default in NUMBERS.items()},
    "top_p": 0.5,
    "min_p": 0.5,
    "logit_bias": {"65": 1.5},
    "logprob_token_ids": [65, 70],
    "allowed_token_ids": [65, 66],
    "bad_words": ["x"],
    "seed": 5,
    "stop": ["x"],
    "stop_token_ids": [70],
}
NAMED = [70, 65, 70]


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
    """The error names the field and uses the table's wording; null counts as absent."""
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


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"return_tokens_as_token_ids": True}])
def test_named_tokens_have_log_probabilities_on_every_route(server, is_stream, more):
    """Without `logprobs` too. The drawn token, then each of them once, in the order of the request."""
    server.says("xy")
    show = (lambda each: f"token_id:{each}") if more else server.tokenizer.token_text
    more = more | {"logprob_token_ids": NAMED, "stream": is_stream}

    def events(path, body):
        answer = server.post(path, body | more)
        if not is_stream:
            return [answer.json()]
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    completions = [event["choices"][0] for event in events("/v1/completions", {"prompt": "a", "max_tokens": 4})]
    top = [each for choice in completions if choice["logprobs"] for each in choice["logprobs"]["top_logprobs"]]
    assert len(top) == 2
    assert all(each[show(70)] == -70 and each[show(65)] == -65 and len(each) == 3 for each in top)

    chats = [event["choices"][0] for event in events("/v1/chat/completions", {"messages": [USER], "max_tokens": 4})]
    tokens = [token for choice in chats if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert [[(each["token"], each["logprob"]) for each in token["top_logprobs"]] for token in tokens] == [
        [(token["token"], token["logprob"]), (show(70), -70.0), (show(65), -65.0)] for token in tokens
    ]

    last = events("/v1/responses", {"input": "a", "max_output_tokens": 4})[-1]
    (message,) = last.get("response", last)["output"]
    tokens = message["content"][0]["logprobs"]
    assert [[each["token"] for each in token["top_logprobs"]] for token in tokens] == [
        [token["token"], show(70), show(65)] for token in tokens
    ]


def test_named_tokens_are_in_place_of_the_most_likely_ones(server):
    server.says("x")
    (token_id,) = server.tokenizer.encode("x", add_special_tokens=False)
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    answer = server.post("/v1/chat/completions", body | {"logprob_token_ids": [70, token_id]}).json()
    (token,) = answer["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in token["top_logprobs"]] == [f"token_id:{each}" for each in (token_id, 70)]
    assert server.client.submitted[0].params.logprobs == 0


def test_named_tokens_beside_an_echo(server):
    """Tokens of the prompt come with the most likely ones. In both, the text's own token is the first."""
    server.says("x")
    (token_id,) = server.tokenizer.encode("x", add_special_tokens=False)
    prompt = [1, 66, 67]
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 1, "return_tokens_as_token_ids": True}
    answer = server.post("/v1/completions", body | {"logprob_token_ids": [70]}).json()
    first, *others, last = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert first is None
    assert [next(iter(each)) for each in others] == ["token_id:66", "token_id:67"]
    assert all(2 <= len(each) <= 3 for each in others)
    assert [*last] == [f"token_id:{token_id}", "token_id:70"]
    assert server.client.submitted[0].params.prompt_logprobs == 2


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("completions", {"logprobs": -1}, "logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"echo": True, "logprobs": -1}, "logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("chat", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("responses", {"include": ["message.output_text.logprobs"], "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_log_probabilities_of_all_tokens_of_a_large_vocabulary(server, route, fields, param):
    path, body = BODIES[route]
    answer = server.post(path, body | fields)
    assert_error(answer, 400, param)
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{param}=-1")
    assert "at most 20 are allowed" in message
    assert str(server.tokenizer.vocab_size) in message


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
def test_other_names_of_structured_outputs_point_to_ours(server, route, field):
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


MESSAGE = {"role": "user", "content": [{"type": "text", "text": "a", "txet": "b"}], "nmae": "x"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "argumens": "{}"}}
NESTED = [
    ("completions", {"stream": True, "stream_options": {"include_usag": True}}, {"stream_options.include_usag"}),
    ("completions", {"structured_outputs": {"choice": ["a"], "choises": []}}, {"structured_outputs.choises"}),
    ("chat", {"messages": [MESSAGE, MESSAGE]}, {"messages[].content[].txet", "messages[].nmae"}),
    (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        {"messages[].tool_calls[].function.argumens"},
    ),
    ("chat", {"tools": [TOOL | {"functoin": 1}], "tool_choice": "none"}, {"tools[].functoin"}),
    (
        "chat",
        {"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}], "tool_choice": "none"},
        {"tools[].function.parametres"},
    ),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"oddity": 1}, "strikt": True}}},
        {"response_format.json_schema.strikt"},
    ),
    ("chat", {"reasoning": {"efort": "low"}}, {"reasoning.efort"}),
    (
        "chat",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "nam": 1}}},
        {"tool_choice.function.nam"},
    ),
    ("responses", {"text": {"verbosty": "low"}}, {"text.verbosty"}),
    ("responses", {"reasoning": {"efort": "low"}}, {"reasoning.efort"}),
    ("responses", {"input": [{"role": "user", "content": "a", "contents": "b"}]}, {"input[].contents"}),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "txt": 1}]}]},
        {"input[].content[].txt"},
    ),
    ("responses", {"instructions": [{"role": "system", "content": "a", "rol": 1}]}, {"instructions[].rol"}),
    (
        "responses",
        {"tools": [{"type": "function", "name": "f", "strictt": True}], "tool_choice": "none"},
        {"tools[].strictt"},
    ),
    ("tokenize", {"prompt": None, "messages": [USER | {"nmae": "x"}]}, {"messages[].nmae"}),
    ("embeddings", {"input": None, "messages": [USER | {"nmae": "x"}]}, {"messages[].nmae"}),
]  # fmt: skip


@pytest.mark.parametrize(("route", "fields", "names"), NESTED)
def test_unknown_fields_of_objects_are_logged_with_their_path(server, route, fields, names, caplog):
    path, body = BODIES[route]
    server.server.state.reader.unknown_fields = UnknownFields(server.server.state.metrics)
    before = num_unknown(server)
    for _ in range(2):
        answer = server.post(path, body | fields)
        assert answer.status_code == 200, answer.text
    told = [record.getMessage() for record in caplog.records if "unknown field" in record.getMessage()]
    assert {line.split("'")[1] for line in told} == names
    assert len(told) == len(names)
    assert all(f"did you mean '{line.split(chr(39))[1].rpartition('.')[0]}." in line for line in told), told
    assert num_unknown(server) >= before + 2 * len(names)


FREE_FORM = [
    ("chat", {"chat_template_kwargs": {"whatever": {"x": 1}}, "logit_bias": {"5": 1}, "metadata": {"a": "b"}}),
    ("chat", {"documents": [{"titel": "a"}]}),
    (
        "chat",
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"tipe": "object"}}}],
            "tool_choice": "none",
        },
    ),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"oddity": 1}}}}),
    ("chat", {"messages": [USER, {"role": "assistant", "content": "a", "annotations": [{"x": 1}], "refusal": None}]}),
    ("completions", {"structured_outputs": {"json": {"properties": {"x": {"oddity": 1}}}}}),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"oddity": 1}}}}),
    ("responses", {"metadata": {"a": "b"}, "stream": True, "stream_options": {"include_obfuscation": False}}),
    (
        "responses",
        {
            "input": [
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "phase": None,
                 "content": [{"type": "output_text", "text": "a", "annotations": [{"x": 1}], "logprobs": []}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
                {"role": "user", "content": "a"},
            ]
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("route", "fields"), FREE_FORM)
def test_what_is_free_form_has_no_unknown_fields(server, route, fields):
    path, body = BODIES[route]
    before = num_unknown(server)
    answer = server.post(path, body | fields)
    assert answer.status_code == 200, answer.text
    assert num_unknown(server) == before


def test_objects_whose_names_are_looked_at_are_bounded(server):
    part = {"type": "text", "text": "", "txet": 1}
    before = num_unknown(server)
    body = {"messages": [{"role": "user", "content": [part] * 6000}], "max_tokens": 1}
    server.post("/v1/chat/completions", body)
    assert 1000 < num_unknown(server) - before <= 4096


def test_unknown_fields_of_detokenize(server):
    before = num_unknown(server)
    assert server.post("/detokenize", {"tokens": [70], "tokenz": 1}).status_code == 200
    assert num_unknown(server) == before + 1


def test_the_page_is_current():
    """`python -m jaxserve.server.protocol.fields_page` prints it."""
    path = pathlib.Path(__file__).parents[3] / "docs" / "fields.md"
    assert path.read_text(encoding="utf-8") == page()


def test_what_is_unknown_somewhere_is_known_elsewhere():
    assert all(any(field.cell(route) is not UNKNOWN for route in ROUTES) for field in FIELDS)
    assert any(field.cell(route) is FOLLOWED for field in FIELDS for route in ROUTES)
