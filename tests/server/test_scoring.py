"""POST /v1/score and /v1/rerank, /ping, /load and /docs."""

import numpy as np
import pytest
from serving import Running, assert_error, running

from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server(random_engine, random_model):
    frontend = Frontend(random_engine, Tokenizer.load(random_model), seed=0)
    server = Running(frontend, ServerConfig(port=0, served_model_name="tiny"))
    server.start()
    yield server
    server.server.stop()
    assert server.wait() == 0


def cosine(server, first, second):
    data = server.post("/v1/embeddings", {"input": [first, second]}).json()["data"]
    return float(np.dot(data[0]["embedding"], data[1]["embedding"]))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores_are_cosines_of_embeddings(server, path, names):
    answer = server.post(path, {names[0]: "one", names[1]: ["one", "two three", "four"]}).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    for each, text in zip(answer["data"], ["one", "two three", "four"], strict=True):
        assert each["score"] == pytest.approx(cosine(server, "one", text), abs=1e-5)
    assert answer["data"][0]["score"] == pytest.approx(1, abs=1e-5)
    pairs = server.post(path, {names[0]: ["one", "two"], names[1]: ["two", "two"]}).json()["data"]
    assert pairs[1]["score"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_the_query(server, path):
    documents = ["two three", {"text": "one"}, "four"]
    answer = server.post(path, {"query": "one", "documents": documents}).json()
    assert answer["results"][0]["document"] == {"text": "one"}
    assert answer["results"][0]["index"] == 1
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    few = server.post(path, {"query": "one", "documents": documents, "top_n": 2, "return_documents": False}).json()
    assert [each["index"] for each in few["results"]] == [each["index"] for each in answer["results"]][:2]
    assert few["results"][0]["document"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1[0]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
    ],
)
def test_bad_requests_name_the_field(server, path, body, param):
    assert_error(server.post(path, body), 400, param)


def test_probes_and_pages(tokenizer):
    with running(tokenizer, api_key=("secret",)) as server:
        assert server.get("/ping").json() == {"status": "ok"}
        assert server.post("/ping", {}).status_code == 200
        assert server.get("/load", headers={"authorization": "Bearer secret"}).json() == {"server_load": 0}
        assert server.get("/load").status_code == 401
        page = server.get("/docs").text
        for path in ("/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js", "/docs/docs.js"):
            assert path.removeprefix("/") in page
            assert server.get(path).status_code == 200
