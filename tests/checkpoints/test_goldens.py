"""The built-in models generate in jaxserve what they generate in transformers (goldens.json, from make_goldens.py)."""

import json
import pathlib

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.loading.builtin import BUILTIN_MODELS, resolve_model
from jaxserve.tokenizer import Tokenizer

GOLDENS = json.loads((pathlib.Path(__file__).parent / "goldens.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_greedy_text_equals_transformers(name):
    rows = [row for row in GOLDENS if row["model"] == name]
    with LLM(name, dtype="float32", max_num_seqs=8, max_num_batched_tokens=128, warmup="none", progress=False) as llm:
        prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    for row, output in zip(rows, outputs, strict=True):
        assert output.outputs[0].token_ids == row["greedy_ids"], row["text"]


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_prompts_encode_as_in_transformers(name):
    tokenizer = Tokenizer.load(resolve_model(name))
    for row in GOLDENS:
        if not row["is_chat"]:
            assert list(tokenizer.encode(row["text"])) == row["prompt_ids"]


@pytest.mark.parametrize(("name", "megabytes"), [("scribe-15m", 32), ("scribe-2m", 5)])
def test_the_weights_stay_small(name, megabytes):
    weights = pathlib.Path(resolve_model(name)) / "model.safetensors"
    assert weights.stat().st_size <= megabytes * 1_000_000
