"""The recipes' text handling, and that what training saw is what the chat template renders."""

import pathlib
import sys

import pytest

from jaxserve.loading.builtin import resolve_model
from jaxserve.tokenizer import Tokenizer

RECIPES = pathlib.Path(__file__).parents[2] / "checkpoints" / "recipes"


@pytest.fixture
def recipes(monkeypatch):
    """The recipes are programs that import each other by bare name; their folder is on the path for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(RECIPES))
    import pack
    import prepare

    yield {"pack": pack, "prepare": prepare}
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
