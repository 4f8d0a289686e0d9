"""A trained model, end to end: stories260K tells the story that its publisher printed."""

import jax
import pytest
from depths import quick_first
from golden_models import load_model
from naive import naive_greedy
from tokenizers import Tokenizer

from jaxserve.convert import convert


@pytest.mark.parametrize("stored_as", quick_first(["safetensors", "orbax"]))
def test_golden_story(test_data, tmp_path, stored_as):
    published = test_data / "models" / "stories260K"
    path = published
    if stored_as == "orbax":
        path = tmp_path / "store"
        convert(str(published), path, progress=False)
    params, config, family, mesh = load_model(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompt = tokenizer.encode("Once upon a time").ids
    with jax.set_mesh(mesh):
        story = tokenizer.decode(prompt + naive_greedy(params, config, family, prompt, 100, padded_length=128))
    assert len(story) > 250
    assert story in (published / "GOLDEN.md").read_text()
