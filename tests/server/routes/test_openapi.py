"""GET /openapi.json is true: it has every route, and describes their answers."""

import jsonschema
import numpy as np
import pytest
from depths import quick_first
from serving import frames, running
from waiting import wait_until

from jaxserve.loading.classifier import ClassificationHead
from jaxserve.loading.torch_activations import sigmoid
from jaxserve.server.app import ADMIN_ROUTES, ROUTES
from jaxserve.server.routes import pages
from jaxserve.server.routes.admin import NOT_IMPLEMENTED

WITHOUT_JSON = {"/metrics", "/openapi.json"} | pages.FILES
ADMIN = {"authorization": "Bearer admin"}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def administered(tokenizer):
    with running(tokenizer, admin_api_key=["admin"], profile_dir="/profiles") as server:
        weight = np.ones((1, server.client.info.hidden_size), np.float32)
        server.frontend.head = ClassificationHead(weight, ("yes",), sigmoid)
        yield server


@pytest.fixture(scope="module")
def document(administered):
    return administered.get("/openapi.json").json()


def operations():
    for route in [*(route for route in ROUTES if route.path not in NOT_IMPLEMENTED), *ADMIN_ROUTES]:
        path = route.path.replace(":path", "")
        if path not in WITHOUT_JSON:
            yield from ((path, method.lower()) for method in route.methods - {"HEAD"})


def test_every_route_is_named(document):
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == set(operations())
    for path, method in described:
        assert ("security" in document["paths"][path][method]) == (path not in pages.OPEN_PATHS)


def assert_described(document, path, method, status, body):
    responses = document["paths"][path][method]["responses"]
    schema = responses[str(status) if str(status) in responses else "default"]["content"]["application/json"]["schema"]
    jsonschema.validate(body, schema | {"components": document["components"]}, cls=jsonschema.Draft202012Validator)


REQUESTS = {
    "/v1/completions": {"prompt": "a", "n": 2, "logprobs": 2, "echo": True, "return_token_ids": True},
    "/v1/chat/completions": {"messages": [USER], "logprobs": True, "top_logprobs": 1, "max_tokens": 3},
    "/v1/chat/completions/batch": {"messages": [[USER], [USER]], "max_tokens": 3},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/responses": {"input": "a", "include": ["message.output_text.logprobs"]},
    "/invocations": {"messages": [USER], "max_tokens": 3},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/classify": {"input": ["a", "b"]},
    **{f"{prefix}/score": {"text_1": "a", "text_2": ["b", "c"]} for prefix in ("", "/v1")},
    **{f"{prefix}/rerank": {"query": "a", "documents": ["b", {"text": "c"}]} for prefix in ("", "/v1", "/v2")},
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize(("path", "method"), quick_first(sorted(set(operations())), 10))
def test_answers_are_as_described(administered, document, path, method):
    response_id = administered.post("/v1/responses", {"input": "a", "background": True}).json()["id"]
    wait_until(lambda: not administered.server.state.responses.background)
    if path == "/stop_profile":
        administered.client.start_profile("/profiles")
    url = path.format(model="fake", response_id=response_id) if "{" in path else path
    body = REQUESTS.get(path, {}) if method == "post" else None
    answer = administered.request(method.upper(), url, json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    assert_described(document, path, method, 200, answer.json())
    if path in REQUESTS:
        request_schema = document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, request_schema | {"components": document["components"]})
        refused = administered.post(path, {"model": "gpt-9"} | dict.fromkeys(body, 5))
        assert_described(document, path, method, refused.status_code, refused.json())
    if path == "/start_profile":
        administered.client.stop_profile()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_chunks_of_streams(administered, path):
    answer = administered.post(path, REQUESTS[path] | {"stream": True, "stream_options": {"include_usage": True}})
    assert all(frame["object"] for frame in frames(answer))
