"""Requests generated from OpenAI's own specification, and from ours: never a 5xx, and answers match the documents."""

import os
import pathlib

import httpx
import jsonschema
import pytest
import schemathesis
import yaml
from conftest import FLAGS, MODEL, PATIENCE, serving
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis import checks

PATHS = [
    ("/models", "GET"),
    ("/models/{model}", "GET"),
    ("/completions", "POST"),
    ("/chat/completions", "POST"),
    ("/embeddings", "POST"),
    ("/responses", "POST"),
    ("/responses/{response_id}", "GET"),
    ("/responses/{response_id}", "DELETE"),
    ("/responses/{response_id}/cancel", "POST"),
    ("/responses/{response_id}/input_items", "GET"),
]
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
# Requests that are served, so that answers are seen too.
GOOD = [
    ("/completions", {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "n": 2}),
    ("/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "echo": True, "stop": "e"}),
    ("/chat/completions", {"messages": CHAT, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2}),
    (
        "/chat/completions",
        {"messages": CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    ("/embeddings", {"input": ["a", "b"], "encoding_format": "float"}),
    ("/responses", {"input": "a", "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}),
    ("/responses", {"input": "a", "background": True, "metadata": {"a": "b"}, "instructions": "i"}),
    ("/responses", {"input": "a", "tools": [{"type": "function", "strict": True, **TOOL}], "tool_choice": "required"}),
]
CHECKS = (checks.not_a_server_error, checks.response_schema_conformance, checks.content_type_conformance)
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPICS_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string", "minLength": 1}},
        },
    },
}
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server whose answers are short."""
    with serving(tmp_path_factory.mktemp("server"), *FLAGS, "--max-model-len", "64") as url:
        yield url


@pytest.fixture(scope="module")
def openai_schema():
    data = pathlib.Path(os.environ.get("JAXSERVE_TEST_DATA", pathlib.Path(__file__).parents[3] / "shared"))
    path = data / "workloads/openai_openapi.yaml"
    if not path.is_file():
        pytest.skip(f"no specification of OpenAI's at {path}: set JAXSERVE_TEST_DATA")
    with path.open() as file:
        return schemathesis.openapi.from_dict(without_discriminators(yaml.load(file, yaml.CSafeLoader)))


def without_discriminators(node):
    """Remove discriminators: their values are not the names of schemas, against OpenAPI's rules."""
    if isinstance(node, dict):
        return {
            key: without_discriminators(value)
            for key, value in node.items()
            if not (key == "discriminator" and isinstance(value, dict) and "propertyName" in value)
        }
    return [without_discriminators(value) for value in node] if isinstance(node, list) else node


@pytest.fixture(scope="module")
def own_schema(server):
    return schemathesis.openapi.from_url(f"{server.removesuffix('/v1')}/openapi.json")


def send(case, base_url):
    """Call, and check the answer."""
    if isinstance(case.body, dict):
        if case.body.get("stream") is True:  # no JSON
            case.body["stream"] = False
        if case.body.get("encoding_format") == "base64":  # of which the specification's answers know nothing
            case.body["encoding_format"] = "float"
    response = case.call(base_url=base_url, timeout=PATIENCE)
    if response.status_code < 400:
        case.validate_response(response, checks=list(CHECKS))
    else:  # OpenAI's specification has one of these in another form than OpenAI
        case.validate_response(response, checks=[checks.not_a_server_error])
        is_anthropics = case.operation.path.startswith("/v1/messages")
        jsonschema.validate(response.json(), ANTHROPICS_ERROR if is_anthropics else ERROR)
    return response.status_code


def real(case, response_id):
    """Make the case refer to an existing model and response: otherwise it would end at a 404."""
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = MODEL
    if case.path_parameters and "response_id" in case.path_parameters:
        case.path_parameters["response_id"] = response_id
    case.query = {}
    return case


@pytest.mark.parametrize(("path", "method"), PATHS)
def test_openai_requests(server, openai_schema, path, method):
    operation = openai_schema[path][method]
    statuses = set()

    @SETTINGS
    @given(case=operation.as_strategy(), is_real=strategies.booleans())
    def check(case, is_real):
        if is_real:
            created = httpx.post(f"{server}/responses", json={"input": "a", "background": True}, timeout=PATIENCE)
            case = real(case, created.json()["id"])
        statuses.add(send(case, server))

    check()
    assert statuses <= {200, 400, 404}


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_openai_answers(server, openai_schema, path, body):
    case = openai_schema[path]["POST"].Case(body={"model": MODEL, **body}, media_type="application/json")
    assert send(case, server) == 200


def test_own_requests(server, own_schema):
    """All routes of /openapi.json but the admin's, with good and bad data."""
    root = server.removesuffix("/v1")
    for result in own_schema.get_all_operations():
        operation = result.ok()
        if {"admin": []} in (operation.definition.raw.get("security") or []):
            continue
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                continue

            @SETTINGS
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case):
                case = real(case, "resp_none")
                send(case, root)

            check()
