"""The state that one program of a step returns has the shapes that the next one was declared to take."""

import jax
import pytest
from few_sizes import every_size
from golden_folder import GOLDENS
from step_specs import make_spec

from jaxserve.bench.shapes import LLAMA_3_8B
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.kind import Kind
from jaxserve.execution.programs.kinds import Begin, Draw, Finish, Forward, PlainDecode, PromptLogprobs
from jaxserve.execution.programs.shapes import StepNeeds
from jaxserve.execution.programs.spec import ON_CPU, ON_GPU, StepSpec
from jaxserve.layers.sharding import with_explicit_axes
from jaxserve.loading.huggingface import load_config


def make_builder(num_devices=1, **changes):
    options = {"kernels": "xla", "max_num_seqs": 2, "max_num_batched_tokens": 4}
    options |= {"traits": ON_GPU, "has_peers": False} | changes
    spec = StepSpec(
        model=load_config(GOLDENS / "llama_biases_linear_rope"),
        dtype="bfloat16",
        block_size=4,
        max_model_len=32,
        **options,
    )
    mesh = with_explicit_axes(jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices]))
    return StepBuilder(spec, mesh)


def test_draws_take_what_forward_passes_make():
    """What differs between families is in `test_bfloat16_step`: shapes and types of hidden states and logits."""
    builder = make_builder()
    forward = builder.shapes.largest
    _, _, forwarded = builder.lower(forward, 8).out_info
    logits, rows = Draw(2, has_logprobs=False).arguments(builder.model)
    hidden, _ = PromptLogprobs(forward.bucket).arguments(builder.model)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert shapes((forwarded.logits, forwarded.rows, forwarded.hidden)) == shapes((logits, rows, hidden))


@pytest.mark.parametrize(("max_logprobs", "expected"), [(0, 0), (3, 3), (-1, None), (10**6, None)])
def test_how_many_log_probabilities_are_computed(max_logprobs, expected):
    """None: those of all tokens."""
    model = make_builder(max_logprobs=max_logprobs).model
    assert model.num_top_logprobs == (model.vocab_size if expected is None else expected)


@pytest.mark.parametrize(
    ("kernels", "num_devices", "has_peers", "expected"),
    [("sm90", 2, True, True), ("sm90", 2, False, False), ("sm90", 1, True, False), ("xla", 2, True, False)],
)
def test_who_has_peers(kernels, num_devices, has_peers, expected):
    """Their memory counts as that of slots does, on each device."""
    builder = make_builder(kernels=kernels, num_devices=num_devices, has_peers=has_peers)
    assert (builder.model.peers is not None) == expected
    slots = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(builder.model.slots))
    sent = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(builder.model.peers)) // num_devices
    assert builder.model.state_bytes - slots == sent
    assert (sent > 0) == expected


@pytest.mark.parametrize(("traits", "between"), [(ON_GPU, [192, 768]), (ON_CPU, [])])
def test_sizes_lie_closer_on_a_gpu_only(traits, between):
    with every_size():
        builder = make_builder(max_num_seqs=256, max_num_batched_tokens=1024, traits=traits)
    sizes = [bucket.num_tokens for bucket in builder.model.buckets]
    assert sizes == sorted([1, 4, 16, 32, 64, 128, 256, 512, 1024, *between])


def test_xla_tries_out_matmuls_of_few_tokens_only():
    builder = make_builder(kernels="sm90", max_num_seqs=256, max_num_batched_tokens=1024)
    programs = [program for program in builder.shapes.programs if not program.compiler_options(builder.model)]
    assert {type(program) for program in programs} == {PlainDecode, Forward}
    assert sorted({program.bucket.num_tokens for program in programs}) == [1, 4, 16, 32, 64]
    on_cpu = make_builder(max_num_seqs=256, max_num_batched_tokens=1024, traits=ON_CPU)
    assert not any(program.compiler_options(on_cpu.model) for program in on_cpu.shapes.programs)


@pytest.mark.parametrize(
    ("fields", "num_devices", "num_tokens", "is_decode_only", "expected"),
    [
        ({}, 1, 512, False, (Begin, Finish)),
        ({}, 2, 128, False, (Begin, Finish)),
        ({}, 1, 768, False, (Forward, None)),
        ({}, 1, 64, True, (Forward, None)),
        ({}, 4, 64, False, (Forward, None)),  # 4 GB of weights a device
        ({"num_hidden_layers": 15, "intermediate_size": 3 * 14336}, 1, 64, False, (Forward, None)),
        # Its layers have pools in common: both programs would write some of them, and one of them a copy.
        ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, 1, 64, False, (Forward, None)),
    ],
)
def test_how_prompts_are_launched(fields, num_devices, num_tokens, is_decode_only, expected):
    model = LLAMA_3_8B | {"head_dim": 128, "sliding_window": 512, "query_pre_attn_scalar": 128}
    spec = make_spec(model | fields)
    mesh = jax.make_mesh((num_devices,), ("tensor",), devices=jax.devices()[:num_devices])
    builder = StepBuilder(spec, with_explicit_axes(mesh))
    needs = StepNeeds(is_plain=False, is_decode_only=is_decode_only, has_logprobs=True)
    step = builder.shapes.step_for(num_tokens, needs)
    assert step.forward.bucket.num_tokens == num_tokens
    assert tuple(program and type(program) for program in (step.forward, step.finish)) == expected


def test_a_kind_that_defines_too_little_cannot_be_made():
    class Half(Kind, frozen=True):
        takes = gives = ()

        def arguments(self, model):
            return ()

    with pytest.raises(TypeError, match=r"abstract methods? 'function', 'made'"):
        Half()
