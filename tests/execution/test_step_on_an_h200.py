"""Decode steps of Llama 3 8B and of experts, compiled for an H200 that is not there: what only a GPU used to show."""

import pytest

from jaxserve.bench.workloads import LLAMA_3_8B, QWEN3_30B_A3B
from jaxserve.execution.builder import StepSpec, build
from jaxserve.layers.sharding import with_explicit_axes
from pallas_kernels.deviceless import compile_lowered, h200_mesh

NUM_BLOCKS = 40_000
POOL = (NUM_BLOCKS, 8, 16, 128)
NUM_LAYERS = LLAMA_3_8B["num_hidden_layers"]


def make_spec(fields, **changes):
    sizes = {"block_size": 16, "max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192} | changes
    return StepSpec(model=fields, dtype="bfloat16", kernels="sm90", has_special_steps=True, **sizes)


def make_builder(fields, **changes):
    return build(make_spec(fields, **changes), with_explicit_axes(h200_mesh((1,), ("tensor",))))


def decode_key(builder, num_rows, *, is_plain=True):
    return builder.shapes.key_for(num_rows, is_plain=is_plain, is_decode_only=True, has_logprobs=False)


@pytest.fixture(scope="module")
def builder():
    return make_builder(LLAMA_3_8B)


# The most rows that have matmuls of our own, and the most there are, with XLA's (untuned: some split a sum in two).
@pytest.mark.parametrize(("num_rows", "launches_per_layer"), [(64, 6), (256, 12)])
def test_decode_step(builder, num_rows, launches_per_layer):
    program = compile_lowered(lambda: builder.lower(decode_key(builder, num_rows), NUM_BLOCKS))
    assert program.thunks == {"kCommandBuffer": 1}
    assert program.spill_bytes == 0
    assert program.copies_of(POOL) == []
    assert program.num_launches <= launches_per_layer * NUM_LAYERS + 40
    # Logits in float32, a copy of them, and some vectors a row.
    assert program.temp_bytes < 2**20 + num_rows * (2 * 128_256 * 4 + 200_000)
    assert 0 < len(program.kernels) <= 10  # not one for each layer


def test_decode_step_with_experts():
    fields = QWEN3_30B_A3B | {"num_hidden_layers": 1}
    builder = make_builder(fields)
    program = compile_lowered(lambda: builder.lower(decode_key(builder, 16), NUM_BLOCKS))
    assert program.thunks == {"kCommandBuffer": 1}
    assert program.spill_bytes == 0
    X, F, E = fields["num_experts"], fields["moe_intermediate_size"], fields["hidden_size"]
    for shape in ((X, 2, F, E), (X, 2 * F, E), (X, E, F), (2 * X, F, E)):
        assert program.copies_of(shape) == []
    assert program.num_launches <= 46
    # Logits in float32, and the rows of the chosen experts: nothing of the size of a weight (805 MB).
    assert program.temp_bytes < 2**20 + 16 * (fields["vocab_size"] * 4 + 8 * (E + F) * 8)
