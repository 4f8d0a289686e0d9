"""What a GPU's server compiles before it takes requests: few programs, and those that XLA tries out on the device."""

import collections

import jax
import pytest
from depths import quick_first

from jaxserve.bench.shapes import LLAMA_3_8B, QWEN3_30B_A3B
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.kinds import Begin, Finish, Forward, PlainDecode
from jaxserve.execution.programs.spec import ON_GPU, MeshSpec, StepSpec

WITH_LAYERS = (PlainDecode, Forward, Begin, Finish)


def make_builder(model, *, kernels="sm90", dtype="bfloat16", num_devices=1):
    mesh = MeshSpec(("tensor",), (num_devices,), "NVIDIA H200", "gpu", 132).mesh()
    spec = StepSpec(
        model=model,
        dtype=dtype,
        kernels=kernels,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        traits=ON_GPU,
        has_peers=kernels == "sm90",
    )
    return StepBuilder(spec, mesh)


def num_matrix_products(jaxpr):
    """Matrix products of a program that are XLA's."""
    number = 0
    for equation in jaxpr.eqns:
        if "pallas" in equation.primitive.name or "mosaic" in equation.primitive.name:
            continue
        number += equation.primitive.name == "dot_general"
        for value in equation.params.values():
            for each in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(each, "jaxpr", each)
                number += num_matrix_products(inner) if hasattr(inner, "eqns") else 0
    return number


def test_the_8b_shape_answers_after_two_programs_with_layers():
    first = make_builder(LLAMA_3_8B).first_programs()
    counts = collections.Counter(type(program).__name__ for program in first)
    assert counts == {
        "Forward": 1,
        "PlainDecode": 1,
        "Draw": 2,
        "PromptLogprobs": 1,
        "Embed": 1,
        "Admit": 1,
        "AdmitExtras": 1,
        "Allow": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 64])
def test_programs_without_products_of_xla_are_not_waited_for(size):
    """Found by the table of paths, and by what is traced."""
    builder = make_builder(LLAMA_3_8B)
    first = builder.first_programs()
    programs = [each for each in builder.shapes.programs if isinstance(each, WITH_LAYERS) and each.size == size]
    assert programs
    for program in programs:
        assert program not in first
        assert program.is_tuned(builder.model)  # if there were any
        declared = builder._declare(program, 100)
        with builder.model.on_mesh():
            traced = jax.jit(declared.function).trace(*declared.arguments)
        assert num_matrix_products(traced.jaxpr.jaxpr) == 0


@pytest.mark.parametrize(
    ("model", "options"),
    quick_first(
        [
            (LLAMA_3_8B | {"attention_bias": True}, {"num_devices": 2}),
            (LLAMA_3_8B, {"kernels": "xla"}),
            (LLAMA_3_8B, {"dtype": "float16"}),  # no fused layer
            (QWEN3_30B_A3B, {}),
        ]
    ),
    ids=["biases", "plain XLA", "float16", "experts"],
)
def test_products_that_xla_tries_out_are_waited_for(model, options):
    """In small programs only: larger ones are left to cuBLAS."""
    builder = make_builder(model, **options)
    first = builder.first_programs()
    small = [each for each in builder.shapes.programs if isinstance(each, WITH_LAYERS) and each.size < 128]
    assert small
    assert set(small) <= set(first)
    rest = [each for each in builder.shapes.programs if isinstance(each, WITH_LAYERS) and each.size >= 128]
    assert sum(each in first for each in rest) <= 3


def test_a_tuned_program_keeps_what_xla_tries_out_and_others_do_not():
    for kernels in ("sm90", "xla"):
        model = make_builder(LLAMA_3_8B, kernels=kernels).model
        for program in make_builder(LLAMA_3_8B, kernels=kernels).shapes.programs:
            options = program.compiler_options(model)
            assert bool(options) == (not isinstance(program, WITH_LAYERS) or program.size >= 128), program


def loops(jaxpr):
    """The loops of a program that the host waits for on a GPU, with those inside them."""
    found = []
    for equation in jaxpr.eqns:
        inner = []
        for value in equation.params.values():
            for each in value if isinstance(value, (list, tuple)) else [value]:
                body = getattr(each, "jaxpr", each)
                inner += loops(body) if hasattr(body, "eqns") else []
        found += [inner] if equation.primitive.name == "while" else inner
    return found


def test_a_decode_step_in_plain_xla_waits_in_no_loop_of_loops():
    """At most one loop a layer, over parts of its context of 1,024 tokens, and those of the draw."""
    builder = make_builder(LLAMA_3_8B | {"num_hidden_layers": 2}, kernels="xla")
    (program,) = [each for each in builder.shapes.programs if isinstance(each, PlainDecode) and each.size == 16]
    declared = builder._declare(program, 100)
    with builder.model.on_mesh():
        found = loops(jax.jit(declared.function).trace(*declared.arguments).jaxpr.jaxpr)
    assert all(inner == [] for inner in found)
    assert len(found) <= 2 + 2
