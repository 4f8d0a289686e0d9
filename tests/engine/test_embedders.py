"""Files of sentence-transformers: vectors and scores as its own, and what is refused.

`embedders/cases.py` writes the models, `embedders/make.py` what they answer.
"""

import importlib.util
import json
import pathlib
import sys

import gguf_files
import numpy as np
import pytest
import safetensors.numpy
from depths import quick_only

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.convert import convert
from jaxserve.engine.checkpoint import read_checkpoint
from jaxserve.engine.scoring import pair_scorer
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.loading.builtin import resolve_names
from jaxserve.loading.reranking import read_reranker
from jaxserve.loading.sentence_transformers import Embedder, read_embedder

FOLDER = pathlib.Path(__file__).parent / "embedders"
GOLDENS = json.loads((FOLDER / "goldens.json").read_text())
OPTIONS = {"warmup": "none", "progress": False, "kv_cache_memory": 2**20}
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
CAUSAL = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}


def _load_cases():
    spec = importlib.util.spec_from_file_location("embedder_cases", FOLDER / "cases.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cases = _load_cases()


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_only(cases.EMBEDDERS, "dense", "several_old"))
def test_vectors_are_those_of_sentence_transformers(name, tmp_path):
    modules, files = cases.EMBEDDERS[name]
    path = cases.write(tmp_path / name, modules=modules, files=files, changes=CAUSAL)
    with LLM(str(path), **OPTIONS) as llm:
        outputs = llm.embed(cases.TEXTS, use_tqdm=False)
        scores = llm.score(cases.TEXTS[0], cases.TEXTS[1:], use_tqdm=False)
    np.testing.assert_allclose([each.embedding for each in outputs], GOLDENS["embeddings"][name], **TOLERANCE)
    np.testing.assert_allclose(scores, GOLDENS["similarities"][name], **TOLERANCE)
    assert [each.prompt for each in outputs] == cases.TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_only(cases.RERANKERS, "identity", "next_token_prompt"))
def test_scores_are_those_of_cross_encoders(name, tmp_path):
    model, modules, files, changes = cases.RERANKERS[name]
    path = cases.write(tmp_path / name, model=model, modules=modules, files=files, changes=changes)
    with LLM(str(path), **OPTIONS) as llm:
        scores = llm.score(*zip(*cases.PAIRS, strict=True), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="scores pairs, and not by embeddings"):
            llm.score("a", "b", pooling="mean", use_tqdm=False)
    np.testing.assert_allclose(scores, GOLDENS["scores"][name], **TOLERANCE)


def test_a_call_wins_over_the_files(tmp_path):
    modules, files = cases.EMBEDDERS["prompt_lowercase"]
    path = cases.write(tmp_path / "model", modules=modules, files=files, changes=CAUSAL)
    with LLM(str(path), **OPTIONS) as llm:
        assert llm.info.max_model_len == 40
        raw = llm.embed("The end", normalize=False, use_tqdm=False)[0]
        last = llm.embed("The end", pooling="last", use_tqdm=False)[0]
        without = llm.embed({"prompt": "The end"}, prompt_name="document", use_tqdm=False)[0]
        with pytest.raises(InvalidRequest, match="no prompt 'q': its prompts are query, document") as error:
            llm.embed("x", prompt_name="q", use_tqdm=False)
    golden = np.array(GOLDENS["embeddings"]["prompt_lowercase"][1])
    np.testing.assert_allclose(raw.embedding / np.linalg.norm(raw.embedding), golden, **TOLERANCE)
    assert np.linalg.norm(raw.embedding) != pytest.approx(1, abs=1e-3)
    assert np.abs(last.embedding - golden).max() > 1e-3
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(last.prompt_token_ids) == "find: the end"
    assert tokenizer.decode(without.prompt_token_ids) == "the end"
    assert error.value.param == "prompt_name"


def test_a_head_of_several_labels_has_no_score(tmp_path):
    path = cases.write(tmp_path / "model")
    message = "has 3 labels, and a score needs a head of one"
    with LLM(str(path), **OPTIONS) as llm, pytest.raises(InvalidRequest, match=message):
        llm.score("a", "b", use_tqdm=False)


VLLMS = {"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"classifier_from_token": ["h", "s"], "method": "from_2_way_softmax"},
        {"classifier_from_token": [71, 82], "is_original_qwen3_reranker": False},
    ],
)
def test_a_reranker_in_vllms_form(tmp_path, changes):
    """Without a template the texts follow each other, as in vLLM; the two tokens' softmax is the score."""
    path = cases.write(tmp_path / "model", changes=CAUSAL)
    with LLM(str(path), hf_overrides=VLLMS | changes, **OPTIONS) as llm:
        tokenizer = llm.get_tokenizer()
        (score,) = llm.score("The end", "of it", use_tqdm=False)
        assert read_reranker(path, VLLMS | changes) == llm.info.reranker
        tokens = changes["classifier_from_token"]
        no, yes = (tokenizer.vocabulary_id(token) if isinstance(token, str) else token for token in tokens)
        hidden = llm.encode("The endof it", use_tqdm=False)[0].embedding
    table = safetensors.numpy.load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    logits = table[[no, yes]] @ hidden
    assert score == pytest.approx(np.exp(logits[1]) / np.exp(logits).sum(), abs=1e-5)


def test_the_prompt_of_qwen3_reranker(tmp_path):
    changes = {"is_original_qwen3_reranker": True, "max_position_embeddings": 512}
    path = cases.write(tmp_path / "model", changes=CAUSAL | changes)
    fields = json.loads((path / "config.json").read_text())
    cases.edit(path / "config.json", {"classifier_from_token": ["h", "s"]})
    with LLM(str(path), **OPTIONS) as llm:
        scorer = pair_scorer(llm._frontend)
        groups = [
            scorer.prepare("q?", "d.", request_id="a", instruction="Find it"),
            scorer.prepare("<|im_start|>q", "d<|im_end|>", request_id="b"),
            scorer.prepare("q?", "d.", request_id="c"),
        ]
        text, as_given, by_default = (
            llm.get_tokenizer().decode(group.prompt_token_ids, skip_special_tokens=False) for group in groups
        )
    assert as_given == "<|im_start|>qd<|im_end|>"
    assert "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n" in by_default
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\n<Instruct>: Find it\n<Query>: q?\n<Document>: d.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert read_reranker(path, fields).no == "no"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classifier_from_token": ["Yes"], "method": "no_post_processing"}, "method 'no_post_processing' is not supp"),
        ({"classifier_from_token": ["yes"]}, "classifier_from_token must be two tokens"),
        ({"classifier_from_token": "no"}, "classifier_from_token must be two tokens"),
        ({"classifier_from_token": [5, 300], "vocab_size": 300}, "token 300 of a reranker is outside the vocabulary"),
        (
            {"classifier_from_token": ["no", "yes"], "sentence_transformers": {"activation_fn": "my.Own"}},
            "activation_fn 'my.Own' is not supported; known are Identity, Sigmoid",
        ),
    ],
)
def test_rerankers_that_are_refused(tmp_path, fields, message):
    with pytest.raises(CheckpointError, match=message):
        read_reranker(tmp_path, fields)


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        ([("Pooling", cases.modes("median"), None)], {}, "1_Pooling/config.json: pooling_mode 'median' is not"),
        ([("WeightedLayerPooling", {}, None)], {}, "modules.json: the module WeightedLayerPooling is not supported"),
        ([("Dense", *cases.dense(16, 4, "torch.nn.modules.linear.Identity"))], {}, "a Dense before the Pooling"),
        (
            [("Pooling", cases.modes("mean"), None), ("Dense", cases.dense(16, 4, "torch.nn.Tanh")[0], None)],
            {},
            "no model.safetensors in .*2_Dense: pickled weights",
        ),
        ([], {"modules.json": [{"path": "", "type": "custom_st.Transformer"}]}, "the module 'custom_st.Transformer'"),
        ([], {"modules.json": [{"path": "0_T", "type": f"{cases.ST}.Transformer"}]}, "Transformer in"),
        ([], {"config_sentence_transformers.json": {"truncate_dim": 99}}, "truncate_dim 99 is not within 1 and 16"),
    ],
)
def test_what_is_refused_is_named_before_weights_are_read(tmp_path, modules, files, message):
    """`test_pooling_variations` has every field; here is that an engine's start says it."""
    path = cases.write(tmp_path / "model", modules=modules, files=files)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(EngineConfig(model=str(path)), progress=False)


def test_pooling_without_modules(tmp_path):
    path = cases.write(tmp_path / "model")
    assert read_embedder(path, hidden_size=16) == Embedder(size=16)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(cases.flags("mean_tokens")))
    embedder = read_embedder(path, hidden_size=16)
    assert (embedder.pooling, embedder.normalizes) == (("mean",), True)


def test_modules_of_a_model_with_overridden_values(tmp_path):
    modules, files = cases.EMBEDDERS["dense"]
    path = cases.write(tmp_path / "origin", modules=modules, files=files, changes=CAUSAL)
    config = resolve_names(EngineConfig(model=str(path), hf_overrides={"rope_theta": 5000.0}))
    assert config.model != str(path)
    own, changed = (read_embedder(each, hidden_size=16) for each in (path, config.model))
    assert (changed.pooling, changed.size, changed.source) == (own.pooling, own.size, own.source)
    for mine, theirs in zip(changed.layers, own.layers, strict=True):
        np.testing.assert_array_equal(mine.weight, theirs.weight)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last"), (4, None), (9, None)]
)
def test_the_pooling_of_a_gguf_file(tmp_path, value, expected):
    metadata = {} if value is None else {"llama.pooling_type": value}
    gguf_files.write(tmp_path / "m.gguf", "llama", metadata, {})
    if expected is None:
        with pytest.raises(CheckpointError, match=f"llama.pooling_type {value} is not supported"):
            read_embedder(tmp_path / "m.gguf", hidden_size=16)
        return
    embedder = read_embedder(tmp_path / "m.gguf", hidden_size=16)
    assert (embedder.pooling, embedder.normalizes) == ((expected,), True)
    assert embedder.source == ("llama.pooling_type" if value else None)


@pytest.mark.slow
def test_a_store_holds_the_modules(tmp_path):
    modules, files = cases.EMBEDDERS["dense"]
    path = cases.write(tmp_path / "model", modules=modules, files=files, changes=CAUSAL)
    convert(str(path), tmp_path / "store", progress=False)
    with LLM(str(tmp_path / "store"), dtype="float32", **OPTIONS) as llm:
        outputs = llm.embed(cases.TEXTS, use_tqdm=False)
    np.testing.assert_allclose([each.embedding for each in outputs], GOLDENS["embeddings"]["dense"], **TOLERANCE)


def test_an_explicit_context_wins(tmp_path, caplog):
    caplog.set_level("INFO")
    path = cases.write(tmp_path / "model", files={"sentence_bert_config.json": {"max_seq_length": 20}})
    assert read_checkpoint(EngineConfig(model=str(path)), progress=False)[1].max_model_len == 20
    config = EngineConfig(model=str(path), max_model_len=50)
    assert read_checkpoint(config, progress=False)[1].max_model_len == 50
    assert "max_model_len 50 wins over max_seq_length 20" in caplog.text
