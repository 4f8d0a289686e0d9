"""A trained model, end to end on this floor: stories260K tells the story that its publisher printed."""

import jax
import jax.numpy as jnp
import numpy as np
from naive import naive_greedy
from tokenizers import Tokenizer

from jaxserve.loading.huggingface import load_config, load_params
from jaxserve.models import get_family


def test_golden_story(test_data):
    path = test_data / "models" / "stories260K"
    fields = load_config(path)
    family = get_family(fields)
    config = family.Config.from_hf(fields)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    params = load_params(path, family.param_specs(config), dtype=np.dtype(jnp.float32), mesh=mesh, progress=False)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompt = tokenizer.encode("Once upon a time").ids
    with jax.set_mesh(mesh):
        story = tokenizer.decode(prompt + naive_greedy(params, config, family, prompt, 100, padded_length=128))
    assert len(story) > 250
    assert story in (path / "GOLDEN.md").read_text()
