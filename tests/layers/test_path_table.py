"""The table of paths: its lines, and that the kernels it names are those in the programs that it describes."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import msgspec
import pytest
from golden_models import GOLDENS
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from step_specs import make_spec

import pallas_kernels
from jaxserve.bench.workloads import DEEPSEEK_V2_LITE, LLAMA_3_8B, QWEN3_30B_A3B
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.kinds import Forward, PlainDecode
from jaxserve.layers.parts import Kernel
from jaxserve.layers.paths import Kind
from jaxserve.layers.schemes import rounded_to
from jaxserve.loading.huggingface import load_config
from jaxserve.models import get_family
from jaxserve.quantization.scheme import ROUNDED_ON_HOPPER, SCHEMES, RoundedActivations

KERNELS = pathlib.Path(pallas_kernels.__file__).parent
OF_LAYERS = {
    Kind.LAYER: "layer_matmuls",
    Kind.BETWEEN: "layer_matmuls",
    Kind.CODES: "quantized_matmuls",
    Kind.MATMULS_OF_CODES: "quantized_matmuls",
    Kind.MATMULS: "small_matmul",
}
"""The operation that computes what a kind of path has besides its attention."""

OPERATIONS = ({name for kernel in Kernel for name in kernel.split(" and ")} | {*OF_LAYERS.values()}) - {
    Kernel.XLA,
    Kernel.NONE,
}
ROUNDED = msgspec.structs.replace(SCHEMES["int8"], rounds_activations=ROUNDED_ON_HOPPER)
ROUNDED_FROM_ONE_ROW = msgspec.structs.replace(ROUNDED, rounds_activations=RoundedActivations(min_rows=1))
LLAMA = LLAMA_3_8B | {"num_hidden_layers": 2, "vocab_size": 1024}
GEMMA = LLAMA | {"model_type": "gemma3_text", "sliding_window": 64, "query_pre_attn_scalar": 128}
FEW_SIZES = {"max_model_len": 512, "max_num_seqs": 128, "max_num_batched_tokens": 512}
MODELS = {
    "llama": (LLAMA, 1, None),
    "biases": (LLAMA | {"mlp_bias": True}, 1, None),
    "codes": (LLAMA, 1, "int4"),
    "8 bits": (LLAMA, 1, "int8"),
    "rounded rows": (LLAMA, 1, ROUNDED),
    "devices": (LLAMA, 4, None),
    "codes on devices": (LLAMA, 2, "int4"),
    "window": (LLAMA | {"model_type": "mistral", "sliding_window": 64}, 1, None),
    "some without rotation": (LLAMA | {"model_type": "smollm3", "num_hidden_layers": 4}, 1, None),
    "some without experts": (
        QWEN3_30B_A3B | {"num_hidden_layers": 3, "vocab_size": 1024, "mlp_only_layers": [0, 2]},
        1,
        None,
    ),
    "experts": (QWEN3_30B_A3B | {"num_hidden_layers": 2, "vocab_size": 1024}, 1, None),
    "sandwich": (GEMMA, 1, None),
    "sandwich, rounded rows": (GEMMA, 1, ROUNDED),
    "norms after blocks": (LLAMA | {"model_type": "olmo2"}, 2, None),
    "latents": (DEEPSEEK_V2_LITE | {"num_hidden_layers": 2, "vocab_size": 1024}, 1, None),
}


def make_builder(fields, *, num_devices=1, scheme=None, without="", **sizes):
    schemes = {}
    if scheme is not None:
        family = get_family(fields)
        schemes = rounded_to(family.param_specs(family.Config.from_hf(fields)), SCHEMES.get(scheme, scheme))
    schemes = {name: scheme for name, scheme in schemes.items() if not without or not name.endswith(without)}
    mesh = AbstractMesh((num_devices,), ("tensor",), axis_types=(AxisType.Explicit,))
    return StepBuilder(make_spec(fields, schemes=schemes, **FEW_SIZES | sizes), mesh)


def test_lines_of_a_dense_model():
    assert make_builder(LLAMA, max_num_seqs=256).describe_paths() == [
        "decode of 1 to 16 rows: one kernel a layer; LM head: small_matmul",
        "decode of 32 to 64 rows: one kernel between two attentions (at most 16 rows, got 32); "
        "attention: paged_attention; LM head: small_matmul",
        "decode of 128 to 256 rows: one operation after the other (qkv: at most 64 rows, got 128); "
        "qkv, out, down: XLA; attention: paged_attention; gate_up: gated_linear_unit; "
        "LM head: XLA (at most 64 rows, got 128); "
        "attention_norm, mlp_norm, norm: add_rms_norm",
        "prompts, 64 tokens: one kernel between two attentions (some rows may have several tokens); "
        "attention: paged_attention and ragged_prefill_attention; LM head: small_matmul",
        "prompts, 128 to 512 tokens: one operation after the other (qkv: at most 64 rows, got 128); "
        "qkv, out, down: XLA; attention: paged_attention and ragged_prefill_attention; "
        "gate_up: gated_linear_unit; LM head: XLA (at most 64 rows, got 128); "
        "attention_norm, mlp_norm, norm: add_rms_norm",
    ]


def test_keys_of_layers():
    layers, _ = make_builder(LLAMA | {"num_hidden_layers": 4})._shapes
    first, *_, last = layers
    assert first.key == last.key
    for name, other in {
        "layer": dataclasses.replace(first.layer, update_scale=2.0),
        "weights": first.weights | {"bias": first.weights["mlp_norm"]},
        "cache": first.cache._replace(k=first.cache.k.update(dtype=jnp.float32)),
    }.items():
        assert dataclasses.replace(first, **{name: other}).key != first.key, name


@pytest.mark.parametrize(
    ("fields", "options", "text"),
    [
        (
            LLAMA,
            {"scheme": "int4"},
            "converts codes between two attentions; attention: paged_attention",
        ),
        (
            LLAMA,
            {"scheme": "int4", "without": "down"},
            "one operation after the other (qkv: it is stored as int4",
        ),
        (LLAMA, {"scheme": "int4", "num_devices": 2}, "codes for each matmul (devices add up partial sums between"),
        (LLAMA, {"num_devices": 4}, "a kernel for each matmul (devices add up partial sums between matmuls)"),
        (LLAMA | {"mlp_bias": True}, {}, "down: XLA; attention: paged_attention; gate_up: XLA (it has a bias)"),
        (LLAMA | {"hidden_act": "relu"}, {}, "gate_up: XLA (no matmul has the activation relu)"),
        (LLAMA | {"head_dim": 24}, {}, "attention: no kernel (head_dim must be a multiple of 16 up to 256, got 24)"),
        (LLAMA | {"vocab_size": 1001}, {}, "LM head: XLA (K in multiples of 64 and outputs in multiples of 8"),
        (MODELS["experts"][0], {}, "routing: expert_routing; experts: grouped_matmul; LM head: small_matmul"),
        (MODELS["latents"][0], {}, "(the attention is latent); down, k_up, q, v_up, out"),
        (
            MODELS["latents"][0],
            {},
            "shared gate_up: XLA (the gated linear unit takes at least 128 rows, got 1)",
        ),
        (MODELS["latents"][0], {}, "LM head: small_matmul; attention_norm, mlp_norm, norm: add_rms_norm"),
        (
            LLAMA | {"mlp_bias": True, "hidden_size": 2112},
            {},
            "attention_norm, mlp_norm, norm: XLA (rows must be",
        ),
        (LLAMA, {"num_devices": 4}, "sums over devices, embedding: all_reduce; gather of logits: all_gather"),
        (LLAMA | {"hidden_size": 2112}, {"num_devices": 2}, "embedding: XLA (devices have no buffers for sums)"),
        (LLAMA | {"vocab_size": 1000}, {"num_devices": 4}, "gather of logits: XLA (devices have no buffers for logits"),
        (
            LLAMA | {"mlp_bias": True},
            {"num_devices": 2},
            "attention_norm, norm: add_rms_norm; mlp_norm, sums over devices, embedding: all_reduce",
        ),
        (
            QWEN3_30B_A3B | {"num_hidden_layers": 2},
            {"num_devices": 2},
            "mlp_norm, sums over devices, norm, embedding: all_reduce",
        ),
        (QWEN3_30B_A3B | {"num_hidden_layers": 2}, {"scheme": "int8"}, "mlp_norm, norm: add_rms_norm"),
        (GEMMA, {}, "attention_norm, mlp_norm, attention_post_norm, mlp_post_norm, norm: add_rms_norm"),
        (GEMMA, {"num_devices": 2}, "attention_post_norm, mlp_post_norm, norm: add_rms_norm; sums over devices"),
        (
            GEMMA,
            {"scheme": ROUNDED_FROM_ONE_ROW},
            "attention_norm, mlp_norm: row_quantization; "
            "attention_post_norm, mlp_post_norm: XLA (the next kernel rounds rows); norm: add_rms_norm",
        ),
        (LLAMA | {"model_type": "olmo2"}, {}, "attention_post_norm, mlp_post_norm, norm: add_rms_norm"),
    ],
    ids=str,
)
def test_reasons_are_told_for_each_part(fields, options, text):
    first, *_ = make_builder(fields, **options).describe_paths()
    assert first.startswith("decode of 1 ")
    assert text in first


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.name)
def test_every_model_has_a_table_of_paths(golden):
    """It says what the layers have that no kernel of whole layers has."""
    fields = load_config(golden)
    family = get_family(fields)
    lines = make_builder(fields, max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64).describe_paths()
    assert lines[0].startswith("decode of 1 ")
    assert all(line.count("LM head: ") == line.count("attention: ") == 1 for line in lines)
    layers = family.layers(family.Config.from_hf(fields))
    for reason in {layer.why_not_fused for layer in layers} - {None}:
        assert all(f"({reason})" in line for line in lines) or len({layer.why_not_fused for layer in layers}) > 1
    by_xla = any(layer.norm.kind == "layer" for layer in layers)
    assert all("XLA (no kernel computes layer norms)" in line for line in lines) == by_xla


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_the_programs_have_the_kernels_that_the_table_names(name):
    fields, num_devices, scheme = MODELS[name]
    builder = make_builder(fields, num_devices=num_devices, scheme=scheme)
    lines = builder.describe_paths()
    programs = [program for program in builder.shapes.programs if isinstance(program, PlainDecode | Forward)]
    sizes = {(program.bucket.num_rows, program.bucket.num_tokens) for program in programs}
    assert len(sizes) > 3
    for program in programs:
        is_decode_only = isinstance(program, PlainDecode) or program.is_decode_only
        line, ends = line_of(lines, program.bucket.num_tokens, is_decode_only=is_decode_only)
        if program.bucket.num_tokens in ends:  # those between them have the same reasons
            assert operations_of(builder, program) == operations_named(line), (program, line)


def line_of(lines, size, *, is_decode_only):
    """Return the line of a program of this size, and the sizes that it begins and ends with."""
    for line in lines:
        kind, first, last = re.match(r"(decode of|prompts,) (\d+)(?: to (\d+))?", line).groups()
        if (kind == "decode of") == is_decode_only and int(first) <= size <= int(last or first):
            return line, (int(first), int(last or first))
    raise AssertionError(f"no line for {size}")


def operations_named(line):
    """Return the operations of `pallas_kernels` that a line of the table names."""
    while line != (line := re.sub(r"\([^()]*\)", "", line)):  # reasons
        pass
    words = re.split(r"[ ,;]+", line)
    found = {
        operation for kind, operation in OF_LAYERS.items() if kind in re.split(r"(?: of \d+ layers)? ?[:;] ", line)
    }
    return found | {name for name in OPERATIONS if name in words}


def operations_of(builder, program):
    """Return the operations of `pallas_kernels` whose kernels are in a program, of those that the table may name."""
    found = set()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            for inner in jaxprs_in_params(equation.params):
                path = pathlib.Path(inner.debug_info.func_src_info.split(" at ")[1])
                if equation.primitive.name == "jit" and KERNELS in path.parents and path.name.startswith("sm90"):
                    found.add(path.parent.name)
                visit(inner)

    declared = builder._declare(program, 64)
    with builder.model.on_mesh():
        visit(jax.make_jaxpr(declared.function)(*declared.arguments).jaxpr)
    return found & OPERATIONS
