"""The table of paths: its lines, and that they cost little."""

import dataclasses

import jax.numpy as jnp
import msgspec
import pytest
from golden_models import CASES
from jax.sharding import AbstractMesh, AxisType
from step_specs import make_spec

from jaxserve.bench.shapes import DEEPSEEK_V2_LITE, LLAMA_3_8B, QWEN3_30B_A3B
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.layers.cache import parts_of
from jaxserve.layers.layouts import rounded_to
from jaxserve.loading.huggingface import load_config
from jaxserve.models import get_family
from jaxserve.quantization.scheme import ROUNDED_ON_HOPPER, SCHEMES, RoundedActivations

ROUNDED = msgspec.structs.replace(SCHEMES["int8"], rounds_activations=ROUNDED_ON_HOPPER)
ROUNDED_FROM_ONE_ROW = msgspec.structs.replace(ROUNDED, rounds_activations=RoundedActivations(min_rows=1))
LLAMA = LLAMA_3_8B | {"num_hidden_layers": 2, "vocab_size": 1024}
GEMMA = LLAMA | {"model_type": "gemma3_text", "sliding_window": 64, "query_pre_attn_scalar": 128}
FEW_SIZES = {"max_model_len": 512, "max_num_seqs": 128, "max_num_batched_tokens": 512}
EXPERTS = QWEN3_30B_A3B | {"num_hidden_layers": 2}
STATES = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "mlp_only_layers": [0],
}
LATENTS = DEEPSEEK_V2_LITE | {"num_hidden_layers": 2, "vocab_size": 1024}


def make_builder(fields, *, num_devices=1, num_stages=1, scheme=None, without="", **sizes):
    schemes = {}
    if scheme is not None:
        family = get_family(fields)
        schemes = rounded_to(family.param_specs(family.config(fields)), SCHEMES.get(scheme, scheme))
    schemes = {name: scheme for name, scheme in schemes.items() if not without or not name.endswith(without)}
    shape = (num_stages, num_devices) if num_stages > 1 else (num_devices,)
    axes = ("pipe", "tensor")[-len(shape) :]
    mesh = AbstractMesh(shape, axes, axis_types=(AxisType.Explicit,) * len(shape))
    return StepBuilder(make_spec(fields, schemes=schemes, **FEW_SIZES | sizes), mesh)


def test_lines_of_a_dense_model():
    assert make_builder(LLAMA, max_num_seqs=256).describe_paths() == [
        "decode of 1 to 16 rows: one kernel a layer; LM head: small_matmul",
        "decode of 32 to 64 rows: one kernel between two attentions (at most 16 rows, got 32); "
        "attention: paged_attention; LM head: small_matmul",
        "decode of 128 to 256 rows: unfused (qkv: at most 64 rows, got 128); "
        "qkv, out, down: XLA; attention: paged_attention; gate_up: gated_linear_unit; "
        "LM head: XLA (at most 64 rows, got 128); "
        "attention_norm, mlp_norm, norm: add_rms_norm",
        "prompts, 64 tokens: one kernel between two attentions (some rows may have several tokens); "
        "attention: paged_attention and ragged_prefill_attention; LM head: small_matmul",
        "prompts, 128 to 512 tokens: unfused (qkv: at most 64 rows, got 128); "
        "qkv, out, down: XLA; attention: paged_attention and ragged_prefill_attention; "
        "gate_up: gated_linear_unit; LM head: XLA (at most 64 rows, got 128); "
        "attention_norm, mlp_norm, norm: add_rms_norm",
    ]


def test_lines_of_stages():
    """What differs is the LM head of the last one: the others share lines."""
    builder = make_builder(LLAMA | {"num_hidden_layers": 3, "mlp_bias": True}, num_stages=3)
    lines = builder.describe_paths()
    assert [line.partition(": unfused")[0] for line in lines] == [
        "stages 0, 1: decode of 1 to 128 rows",
        "stage 2: decode of 1 to 64 rows",
        "stage 2: decode of 128 rows",
        "stages 0, 1: prompts, 64 to 512 tokens",
        "stage 2: prompts, 64 tokens",
        "stage 2: prompts, 128 to 512 tokens",
    ]
    assert ["LM head" in line for line in lines] == [False, True, True] * 2


def test_keys_of_layers():
    first, *_, last = make_builder(LLAMA | {"num_hidden_layers": 4})._layers[0]
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
            "on packed weights between two attentions; attention: paged_attention",
        ),
        (
            LLAMA,
            {"scheme": "int4", "without": "down"},
            "unfused (qkv: it is stored as int4",
        ),
        (LLAMA, {"scheme": "int4", "num_devices": 2}, "weights for each matmul (devices add up partial sums between"),
        (LLAMA, {"num_devices": 4}, "a kernel for each matmul (devices add up partial sums between matmuls)"),
        (LLAMA | {"mlp_bias": True}, {}, "down: XLA; attention: paged_attention; gate_up: XLA (it has a bias)"),
        (LLAMA | {"hidden_act": "relu"}, {}, "gate_up: XLA (no matmul has the activation relu)"),
        (
            LLAMA | {"head_dim": 24},
            {},
            "attention: no kernel (head_dim must be a multiple of 16 up to 256, or of 64 up to 512, got 24)",
        ),
        (LLAMA | {"head_dim": 512}, {}, "attention: paged_attention; LM head"),
        (LLAMA | {"head_dim": 512}, {"kv_cache_dtype": "fp8"}, "attention: paged_attention; LM head"),
        (
            LLAMA | {"head_dim": 576},
            {},
            "attention: XLA (head_dim must be a multiple of 16 up to 256, or of 64 up to 512, got 576)",
        ),
        (
            LLAMA | {"head_dim": 512, "num_key_value_heads": 1},
            {},
            "attention: XLA (at most 16 queries of a KV head in heads of more than 256, got 32)",
        ),
        (
            LLAMA,
            {"kv_cache_dtype": "fp8"},
            "decode of 1 to 64 rows: one kernel between two attentions (bfloat16, got pages",
        ),
        (LLAMA, {"kv_cache_dtype": "int8"}, "(bfloat16, got pages of int8); attention: paged_attention; LM head"),
        (
            LLAMA | {"num_attention_heads": 64, "num_key_value_heads": 1},
            {"kv_cache_dtype": "fp8"},
            "attention: XLA (at most 32 queries of a KV head where pages have 8 bits, got 64)",
        ),
        (
            LLAMA | {"head_dim": 96},
            {"kv_cache_dtype": "fp8"},
            "attention: XLA (head_dim must be a multiple of 64 up to 512 where pages have 8 bits, got 96)",
        ),
        (
            LLAMA | {"model_type": "phi3", "partial_rotary_factor": 0.125},
            {"kv_cache_dtype": "fp8"},
            "attention: XLA (the write of 8 bits needs multiples of 16, got head_dim 128 and 8 rotated pairs)",
        ),
        (
            LLAMA | {"model_type": "phi3", "partial_rotary_factor": 0.25, "head_dim": 512},
            {},
            "attention: XLA (the write copies parts of up to 256, got head_dim 512 and 64 rotated pairs)",
        ),
        (STATES, {}, "recurrence: recurrent_step; "),
        (
            STATES | {"linear_value_head_dim": 24},
            {},
            "recurrence: XLA (keys must be a multiple of 32",
        ),
        (LATENTS, {"kv_cache_dtype": "fp8"}, "attention: XLA (no kernel attends to latents of float8_e4m3fn)"),
        (LLAMA | {"vocab_size": 1001}, {}, "LM head: XLA (K in multiples of 64 and outputs in multiples of 8"),
        (EXPERTS | {"vocab_size": 1024}, {}, "routing: expert_routing; experts: grouped_matmul; LM head: small_matmul"),
        (LATENTS, {}, "(the attention is latent); down, q, k_up, v_up, out"),
        (
            LATENTS,
            {},
            "shared gate_up: XLA (the gated linear unit takes at least 128 rows, got 1)",
        ),
        (LATENTS, {}, "LM head: small_matmul; attention_norm, mlp_norm, norm: add_rms_norm"),
        (
            LLAMA | {"mlp_bias": True, "hidden_size": 2116, "head_dim": 64},
            {},
            "attention_norm, mlp_norm, norm: XLA (rows must be",
        ),
        (LLAMA, {"num_devices": 4}, "sums over devices, embedding: all_reduce; gather of logits: all_gather"),
        (
            LLAMA | {"hidden_size": 2116, "head_dim": 64},
            {"num_devices": 2},
            "embedding: XLA (devices have no buffers for sums)",
        ),
        (LLAMA | {"vocab_size": 1000}, {"num_devices": 4}, "gather of logits: XLA (devices have no buffers for logits"),
        (
            LLAMA | {"mlp_bias": True},
            {"num_devices": 2},
            "attention_norm, norm: add_rms_norm; mlp_norm, sums over devices, embedding: all_reduce",
        ),
        (
            EXPERTS,
            {"num_devices": 2},
            "attention_norm, mlp_norm, norm, sums over devices, embedding: all_reduce",
        ),
        (EXPERTS, {"scheme": "int8"}, "mlp_norm, norm: add_rms_norm"),
        (GEMMA, {}, "attention_norm, attention_post_norm, mlp_norm, mlp_post_norm, norm: add_rms_norm"),
        (GEMMA, {"num_devices": 2}, "mlp_norm, mlp_post_norm, norm: add_rms_norm; sums over devices"),
        (
            GEMMA,
            {"scheme": ROUNDED_FROM_ONE_ROW},
            "attention_norm, mlp_norm: row_quantization; "
            "attention_post_norm: XLA (the next kernel rounds rows); "
            "mlp_post_norm: XLA (the next kernel rounds rows) or add_rms_norm; norm: add_rms_norm",
        ),
        (
            LLAMA | {"hidden_size": 2112, "head_dim": 64},
            {"scheme": ROUNDED_FROM_ONE_ROW},
            "attention_norm, mlp_norm: XLA (rows must be bfloat16 or float16, of a multiple of 128",
        ),
        (LLAMA | {"model_type": "olmo2"}, {}, "attention_post_norm, mlp_post_norm, norm: add_rms_norm"),
    ],
    ids=str,
)
def test_reasons_are_told_for_each_part(fields, options, text):
    first, *_ = make_builder(fields, **options).describe_paths()
    assert first.startswith("decode of 1 ")
    assert text in first


@pytest.mark.parametrize(
    ("fields", "options", "text"),
    [
        (STATES | {"linear_value_head_dim": 128}, {}, "recurrence: recurrent_step and recurrent_chunks"),
        (
            STATES | {"linear_value_head_dim": 96},
            {},
            "recurrence: recurrent_step and XLA (keys must be 64 or 128 and values a multiple of 64, got 128 and 96)",
        ),
        (LLAMA | {"head_dim": 512}, {}, "attention: paged_attention and ragged_prefill_attention"),
        (
            LLAMA | {"head_dim": 512},
            {"kv_cache_dtype": "fp8"},
            "attention: paged_attention and ragged_prefill_attention",
        ),
        (
            LLAMA | {"head_dim": 320},
            {},
            "attention: paged_attention and XLA "
            "(head_dim must be a multiple of 16 up to 256, or of 128 up to 512, in prompts, got 320)",
        ),
        (
            LLAMA | {"head_dim": 320},
            {"kv_cache_dtype": "fp8"},
            "attention: paged_attention and XLA "
            "(head_dim must be a multiple of 64 up to 256, or of 128 up to 512, in prompts, got 320)",
        ),
    ],
    ids=str,
)
def test_reasons_are_told_for_prompts(fields, options, text):
    paths = make_builder(fields, **options).describe_paths()
    assert any(text in path for path in paths if path.startswith("prompts"))


@pytest.mark.parametrize("golden", CASES, ids=lambda path: path.name)
def test_every_model_has_a_table_of_paths(golden):
    """It says what the layers have that no kernel of whole layers has."""
    fields = load_config(golden)
    family = get_family(fields)
    lines = make_builder(fields, max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64).describe_paths()
    assert lines[0].startswith("decode of 1 ")
    layers = family.layers(family.config(fields))
    attends = not all(part.keeps_state for layer in layers for part in parts_of(layer.mixer.cache_spec))
    assert all((line.count("LM head: "), line.count("attention: ")) == (1, attends) for line in lines)
    for reason in {layer.why_not_fused for layer in layers} - {None}:
        assert all(f"({reason})" in line for line in lines) or len({layer.why_not_fused for layer in layers}) > 1
    by_xla = any(layer.norm.kind == "layer" for layer in layers)
    assert all("XLA (no kernel computes layer norms)" in line for line in lines) == by_xla
