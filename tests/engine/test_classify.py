"""Models with a classification head, against transformers: `classifiers/make.py` makes them and what they answer."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import tiny_tokenizer
from depths import quick_only
from golden_folder import CLASSIFIERS
from golden_folder import GOLDENS as MODELS
from safetensors.numpy import save_file
from serving import assert_error, byte_tokenizer, running

from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.convert import convert
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.loading.classifier import ClassificationHead, read_head
from jaxserve.loading.torch_activations import identity, softmax

GOLDENS = json.loads((pathlib.Path(__file__).parent / "classifiers" / "goldens.json").read_text())
PROMPTS = GOLDENS["prompts"]
PROBS = {
    "llama": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    "qwen2_tied": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    "gemma2": lambda x: 1 / (1 + np.exp(-x)),  # labels that do not exclude each other
    "gpt2": lambda x: 1 / (1 + np.exp(-x)),  # one label
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return str(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("tokenizer")))


OPTIONS = {"warmup": "none", "progress": False, "kv_cache_memory": 2**20}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_only(PROBS, "llama"))
def test_probabilities_are_those_of_transformers(name, tokenizer_folder):
    with LLM(str(CLASSIFIERS / name), tokenizer=tokenizer_folder, **OPTIONS) as llm:
        outputs = llm.classify([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
        head = read_head(CLASSIFIERS / name, hidden_size=16)
        hidden = [each.embedding for each in llm.encode([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)]
        with pytest.raises(InvalidRequest, match="no LM head: it classifies texts"):
            llm.generate("ab", SamplingParams(max_tokens=1), use_tqdm=False)
    logits = np.array(GOLDENS["logits"][name])
    np.testing.assert_allclose([head.logits(vector) for vector in hidden], logits, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose([each.probs for each in outputs], PROBS[name](logits), atol=1e-5)
    assert [each.prompt_token_ids for each in outputs] == PROMPTS
    best = [("bad", "fair", "good")[row.argmax()] if name == "llama" else f"LABEL_{row.argmax()}" for row in logits]
    assert [each.label for each in outputs] == best


@pytest.mark.slow
async def test_an_event_loop_awaits_the_same(tokenizer_folder):
    async with AsyncLLM(str(CLASSIFIERS / "gpt2"), tokenizer=tokenizer_folder, **OPTIONS) as llm:
        output = await llm.classify({"prompt_token_ids": PROMPTS[0]})
    np.testing.assert_allclose(output.probs, PROBS["gpt2"](np.array(GOLDENS["logits"]["gpt2"][0])), atol=1e-5)
    assert output.prompt_token_ids == PROMPTS[0]


def test_a_model_without_a_head_says_so(tokenizer_folder):
    golden = MODELS / "llama_untied"
    assert read_head(golden, hidden_size=32) is None
    with (
        LLM(str(golden), tokenizer=tokenizer_folder, **OPTIONS) as llm,
        pytest.raises(InvalidRequest, match="this model has no classification head"),
    ):
        llm.classify("ab", use_tqdm=False)


def test_a_head_that_does_not_fit_is_refused_at_start(tmp_path, tokenizer_folder):
    with pytest.raises(CheckpointError, match=r"score.weight is \[3, 16\], not \[labels, 8\]"):
        read_head(CLASSIFIERS / "llama", hidden_size=8)
    shutil.copytree(CLASSIFIERS / "llama", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensors missing: score\.weight"):
        LLM(str(tmp_path / "model"), tokenizer=tokenizer_folder, progress=False)
    save_file({"score.weight": np.ones((3, 16), np.int8)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"score.weight is I8: a head of codes is not supported"):
        read_head(tmp_path / "model", hidden_size=16)
    with pytest.raises(CheckpointError, match="has a classification head, which a store does not hold"):
        convert(str(CLASSIFIERS / "llama"), str(tmp_path / "store"))


def test_a_head_where_the_config_names_none_is_a_tensor_too_many(tmp_path, tokenizer_folder):
    shutil.copytree(CLASSIFIERS / "llama", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    fields = json.loads(config.read_text()) | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"unexpected: score\.weight"):
        LLM(str(tmp_path / "model"), tokenizer=tokenizer_folder, progress=False)


def test_a_regression_has_values():
    head = ClassificationHead(np.ones((1, 2), np.float32), ("value",), identity)
    assert head.probs(np.array([3.0, 4.0], np.float32)) == [7.0]


@pytest.fixture
def server():
    with running(byte_tokenizer()) as server:
        yield server


def test_the_route_answers_as_vllms(server):
    hidden_size = server.client.info.hidden_size
    weight = np.linspace(-1, 1, 2 * hidden_size, dtype=np.float32).reshape(2, hidden_size)
    server.frontend.head = ClassificationHead(weight, ("no", "yes"), softmax)
    answer = server.post("/classify", {"input": ["ab", "c"], "model": "fake"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "list"
    assert [each["index"] for each in body["data"]] == [0, 1]
    for each in body["data"]:
        assert each["num_classes"] == 2
        assert sum(each["probs"]) == pytest.approx(1)
        assert each["label"] == ("no", "yes")[int(np.argmax(each["probs"]))]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    assert_error(server.post("/classify", {"input": []}), 400, "input")
    assert_error(server.post("/classify", {"input": "ab", "pooling": "mean"}), 400, "pooling")


def test_the_route_without_a_head_is_a_400(server):
    answer = server.post("/classify", {"input": "ab"})
    assert_error(answer, 400, "model")
    assert "no classification head" in answer.text
