"""POST /v1/score and /v1/rerank, /ping, /load and /docs."""

import msgspec
import numpy as np
import pytest
from serving import BOS, EOS, assert_error, byte_tokenizer, running, serving
from tokenizers import processors

from jaxserve.engine.frontend import Frontend
from jaxserve.loading.classifier import ClassificationHead
from jaxserve.loading.reranker import Reranker
from jaxserve.loading.reranking import PairTemplate
from jaxserve.loading.torch_activations import sigmoid, softmax
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server(random_engine, random_model):
    frontend = Frontend(random_engine, Tokenizer.load(random_model), seed=0)
    with serving(frontend, served_model_name="tiny") as server:
        yield server


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
        ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": [""], "text_2": "b"}, "text_1[0]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b", "x" * 3000]}, "documents[1]"),
        ("/v1/rerank", {"query": "x" * 3000, "documents": ["b"]}, "query"),
        ("/v1/score", {"text_1": ["x" * 3000, "b"], "text_2": ["a", "b"]}, "text_1[0]"),
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


YES, NO = 71, 66
QUERY, DOCUMENT = "what?", "this and that"


@pytest.fixture
def reranking(tokenizer):
    """A server whose model scores pairs by its next token: the logit of a token is minus its id."""
    with running(tokenizer) as server:
        server.client.info = msgspec.structs.replace(server.client.info, reranker=Reranker(no=NO, yes=YES))
        yield server


@pytest.fixture
def classifying():
    """A server whose model scores pairs by a classification head."""
    with running(byte_tokenizer()) as server:
        weight = np.array([[0.5, -0.01, 0.0, 0.0]], np.float32)
        server.frontend.head = ClassificationHead(weight, ("score",), sigmoid, sigmoid)
        yield server


def sigmoid_of(logit):
    return pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second"), [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
@pytest.mark.parametrize("path", ["/v1/score", "/invocations"])
def test_pairs_are_scored_by_a_head(classifying, path, first, second):
    answer = classifying.post(path, {first: QUERY, second: [DOCUMENT, "q"]}).json()
    encoded = [classifying.tokenizer.encode_pair(QUERY, text) for text in (DOCUMENT, "q")]
    assert [each["score"] for each in answer["data"]] == [sigmoid_of(0.5 - 0.01 * ids[-1]) for ids in encoded]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, encoded))
    assert [request.prompt_token_ids for request in classifying.client.submitted] == encoded
    raw = classifying.post(path, {first: QUERY, second: DOCUMENT, "use_activation": False}).json()
    assert raw["data"][0]["score"] == pytest.approx(0.5 - 0.01 * encoded[0][-1], abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/invocations"])
def test_documents_are_ranked_by_a_head(classifying, path):
    answer = classifying.post(path, {"query": QUERY, "documents": ["z", "a", "m"], "top_n": 2}).json()
    assert [each["index"] for each in answer["results"]] == [1, 2]  # greater bytes have smaller scores


def test_pairs_are_scored_by_the_next_token(reranking):
    answer = reranking.post("/v1/score", {"text_1": QUERY, "text_2": [DOCUMENT, "d"], "instruct": "look: "}).json()
    assert [each["score"] for each in answer["data"]] == [sigmoid_of(NO - YES)] * 2
    prompts = [request.prompt_token_ids for request in reranking.client.submitted]
    assert prompts == [reranking.tokenizer.encode(f"look: {QUERY}{text}") for text in (DOCUMENT, "d")]
    raw = reranking.post("/score", {"text_1": "a", "text_2": "b", "use_activation": False}).json()
    assert raw["data"][0]["score"] == pytest.approx(NO - YES)


def test_the_operators_template_for_pairs(tokenizer):
    template = "{% for m in messages %}{% if m.role in ['query', 'document'] %}{{ m.role }}={{ m.content }};{% endif %}"
    with running(tokenizer.with_chat_template(template + "{% endfor %}")) as server:
        server.client.info = msgspec.structs.replace(server.client.info, reranker=Reranker(no=NO, yes=YES))
        assert server.post("/v1/rerank", {"query": "a", "documents": ["b"]}).status_code == 200
        (request,) = server.client.submitted
        assert server.tokenizer.decode(request.prompt_token_ids) == "query=a;document=b;"


@pytest.mark.parametrize("kind", ["classifying", "reranking", "embedding"])
def test_texts_are_cut_to_so_many_tokens(kind, request, tokenizer):
    with running(tokenizer) as embedding:
        server = embedding if kind == "embedding" else request.getfixturevalue(kind)
        limits = {"max_tokens_per_doc": 4, "max_tokens_per_query": 3}
        cut = server.post("/rerank", {"query": QUERY, "documents": [DOCUMENT, "x"], **limits}).json()
        short = server.post("/rerank", {"query": QUERY[:3], "documents": [DOCUMENT[:4], "x"]}).json()
        assert [each["relevance_score"] for each in cut["results"]] == [
            each["relevance_score"] for each in short["results"]
        ]
        assert cut["usage"] == short["usage"]
        assert {each["document"]["text"] for each in cut["results"]} == {DOCUMENT, "x"}
        body = {"query": QUERY, "documents": ["x"]}
        assert_error(server.post("/rerank", body | {"max_tokens_per_doc": -1}), 400, "max_tokens_per_doc")
        assert server.post("/rerank", body | {"max_tokens_per_doc": 0, "padding": "do_not_pad"}).status_code == 200


@pytest.mark.parametrize(
    ("limit", "side", "query", "document"),
    [
        (20, "left", "what?", "and that"),
        (20, "right", "what?", "this and"),
        (13, "left", "at?", "hat"),
        (8, "right", "w", ""),
    ],
)
@pytest.mark.parametrize("kind", ["classifying", "reranking"])
def test_what_is_around_a_truncated_pair_stays(kind, request, tokenizer, limit, side, query, document):
    server = request.getfixturevalue(kind)
    template = "q={% for m in messages %}{{ m.content }};{% if loop.first %}d={% endif %}{% endfor %}!"
    server.frontend.__dict__["pair_template"] = PairTemplate(template, {})
    body = {"text_1": QUERY, "text_2": [DOCUMENT], "truncation_side": side}
    assert server.post("/v1/score", body | {"truncate_prompt_tokens": limit}).status_code == 200
    (submitted,) = server.client.submitted
    assert server.tokenizer.decode(submitted.prompt_token_ids) == f"q={query};d={document};!"
    assert_error(server.post("/v1/score", body | {"truncate_prompt_tokens": 6}), 400, "truncate_prompt_tokens")


def test_the_special_tokens_of_a_truncated_pair_stay(classifying):
    around = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    classifying.tokenizer._backend.post_processor = around
    body = {"text_1": QUERY, "text_2": DOCUMENT, "truncate_prompt_tokens": 9}
    assert classifying.post("/v1/score", body).status_code == 200
    (submitted,) = classifying.client.submitted
    assert classifying.tokenizer.decode(submitted.prompt_token_ids, False) == "<s>at?</s>hat</s>"


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("classifying", {"text_1": "a", "text_2": "b", "pooling": "mean"}, "pooling"),
        ("reranking", {"text_1": "a", "text_2": "b", "pooling": "last"}, "pooling"),
        ("reranking", {"text_1": "a", "text_2": ["b", "x" * 600]}, "text_2[1]"),
        ("classifying", {"queries": "a", "documents": ["b", "x" * 520]}, "documents[1]"),
        ("server", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ("server", {"text_1": "a", "text_2": "b", "instruct": "find"}, "instruct"),
        ("server", {"text_1": "a", "text_2": "b", "queries": "c"}, "queries"),
        *(
            (kind, {"text_1": "a", "text_2": "b", "padding": "max_length"}, "padding")
            for kind in ("server", "reranking")
        ),
        *((kind, {"text_1": "a", "text_2": "b", "priority": 2**80}, "priority") for kind in ("server", "reranking")),
    ],
)
def test_what_a_model_cannot_do_with_pairs_is_named(kind, body, param, request):
    server = request.getfixturevalue(kind)
    assert_error(server.post("/v1/score", body), 400, param)
    assert server.post("/v1/score", {"text_1": "a", "text_2": "b"}).status_code == 200


def test_a_head_of_several_labels_classifies_and_does_not_score(tokenizer):
    with running(tokenizer) as server:
        server.frontend.head = ClassificationHead(np.eye(2, 4, dtype=np.float32), ("no", "yes"), softmax)
        for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
            assert_error(server.post(path, body), 400, "model")
        classified = server.post("/invocations", {"input": "a", "use_activation": False}).json()
        assert classified["data"][0]["probs"] == [1.0, float(server.tokenizer.encode("a")[-1])]
