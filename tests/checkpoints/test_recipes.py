"""The recipes' text handling, that what training saw is what the chat template renders, and that a head is loaded as it
was trained.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from jaxserve.loading.builtin import resolve_model
from jaxserve.loading.eagle3 import published_drafts, read_head
from jaxserve.loading.huggingface import load_params
from jaxserve.speculation import parse_speculation
from jaxserve.speculative import make_drafter
from jaxserve.tokenizer import Tokenizer

RECIPES = pathlib.Path(__file__).parents[2] / "checkpoints" / "recipes"


@pytest.fixture
def recipes(monkeypatch):
    """The recipes are programs that import each other by bare name; their folder is on the path for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(RECIPES))
    import head
    import pack
    import prepare

    yield {"head": head, "pack": pack, "prepare": prepare}
    for name in set(sys.modules) - before:
        if str(RECIPES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("heading", "title"),
    [
        ("## Chapter 1 - Down the Rabbit-Hole", "Down the Rabbit-Hole"),
        ("##  CHAPTER IV ", ""),
        ("### THE GOLDEN BIRD", "The Golden Bird"),
        ("## Chapter the Last", ""),
        ("## XII. _The Return_", "The Return"),
    ],
)
def test_a_heading_loses_its_number(recipes, heading, title):
    assert recipes["prepare"].clean_title(heading) == title


def test_markdown_becomes_plain_text(recipes):
    clean = recipes["prepare"].clean_inline
    assert clean("\u201cOh, _dear_!\u201d -- said the **Hare**\u2026") == '"Oh, dear!"—said the Hare...'
    assert clean("a [link](https://example.org) and a note[12]") == "a link and a note"


def test_verse_keeps_its_lines_and_wrapped_prose_does_not(recipes):
    split = recipes["prepare"].split_block
    assert list(split("Twinkle, twinkle\nlittle bat")) == ["Twinkle, twinkle\nlittle bat"]
    wrapped = "It was the best of times, it was the worst of times, it was\nthe age of wisdom, it was the age of"
    assert list(split(wrapped)) == [wrapped.replace("\n", " ")]


def test_turns_alternate_and_start_with_the_user(recipes):
    lines = [("assistant", "Hm."), ("user", "Hi"), ("user", "there"), ("assistant", "Hello"), ("user", "Bye")]
    assert recipes["prepare"].turns(lines) == [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello"},
    ]


def test_training_saw_what_the_chat_template_renders(recipes):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi!"},
    ]
    tokenizer = Tokenizer.load(resolve_model("scribe-15m"))
    rendered = tokenizer.render_chat_template(messages, add_generation_prompt=False)
    assert rendered == recipes["pack"].render(messages)


@pytest.mark.parametrize("is_quantized", [True, False])
def test_an_exported_head_is_loaded_as_it_was_trained(recipes, tmp_path, is_quantized):
    head = recipes["head"]
    cfg = dataclasses.replace(head.CONFIGS["test"], num_hidden_layers=1, num_attention_heads=1, intermediate_size=64)
    p = head.init(cfg, {"final_norm": np.full(64, 0.5, np.float32)}, jax.random.key(0))
    head.export(cfg, p, tmp_path, is_quantized, 3)
    assert published_drafts(json.loads((tmp_path / "config.json").read_text())) == 3
    speculation = parse_speculation({"method": "eagle3", "model": "x", "num_speculative_tokens": 3})
    target = cfg.hugging_face() | {"num_hidden_layers": 8}
    drafter = make_drafter(speculation, target, read_head(str(tmp_path)), context=64)
    assert drafter.taps == head.TAPS
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    loaded = load_params(tmp_path, drafter.specs(), dtype=np.dtype("float32"), mesh=mesh, progress=False)
    assert "lm_head" not in loaded
    expected = {kind: np.asarray(w).T for kind, w in head.rounded(p, is_quantized).items()}
    qkv = np.concatenate([expected[kind] for kind in "qkv"])
    close = {"rtol": 1e-2, "atol": 1e-7}  # values are read in bfloat16
    np.testing.assert_allclose(loaded["norm"], expected["norm"])
    np.testing.assert_allclose(loaded["fc"].values, expected["fc"], **close)
    np.testing.assert_allclose(np.reshape(loaded["attention"]["qkv"].values, qkv.shape), qkv, **close)
