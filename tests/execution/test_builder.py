"""What one program of a step leaves behind is what the next one was declared to take, for every family."""

import pathlib

import jax
import pytest

from jaxserve.execution.builder import StepSpec, build
from jaxserve.execution.shapes import Draw, PromptLogprobs
from jaxserve.layers.sharding import with_explicit_axes
from jaxserve.loading.huggingface import load_config

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
ONE_OF_EACH = {
    load_config(path.parent)["model_type"]: path.parent.name
    for path in sorted(GOLDENS.glob("*/config.json"), reverse=True)
}


@pytest.mark.parametrize("name", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_draws_take_what_forward_passes_make(name):
    spec = StepSpec(
        model=load_config(GOLDENS / name),
        dtype="bfloat16",
        kernels="xla",
        block_size=4,
        max_model_len=32,
        max_num_seqs=2,
        max_num_batched_tokens=4,
        has_special_steps=True,
    )
    builder = build(spec, with_explicit_axes(jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])))
    forward = builder.shapes.largest
    _, _, forwarded = builder.lower(forward, 8).out_info
    _, logits, rows = builder.arguments(Draw(2, has_logprobs=False), 8)
    _, hidden, _ = builder.arguments(PromptLogprobs(forward.bucket), 8)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert shapes((forwarded.logits, forwarded.rows, forwarded.hidden)) == shapes((logits, rows, hidden))
