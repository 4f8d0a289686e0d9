"""Models in GGUF files: the logits of their safetensors, and one clear complaint about what does not fit."""

import dataclasses
import json
import logging

import gguf
import gguf_files
import jax
import numpy as np
import pytest
from depths import quick_only
from golden_folder import GOLDENS
from golden_models import full_logits, golden_error, load_model
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.errors import CheckpointError
from jaxserve.layers.rope import LinearScaling
from jaxserve.loading.gguf_config import ARCHITECTURES
from jaxserve.loading.weights import load_config, load_weights
from jaxserve.models import get_family

FLOAT32 = np.dtype(np.float32)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def tensors_of(golden):
    """Read the tensors of all of a golden's files: bytes, or float32, since the `gguf` package knows no bfloat16."""
    return {
        name: x if x.dtype == np.uint8 else x.astype(np.float32)
        for path in (GOLDENS / golden).glob("*.safetensors")
        for name, x in load_file(path).items()
    }


def assert_same_weights(path, other):
    jax.tree.map(np.testing.assert_array_equal, load_model(path)[0], load_model(other)[0])


def random_llama():
    return random_tensors(LLAMA)


def random_tensors(fields):
    family = get_family(fields)
    specs = family.param_specs(family.config(fields))
    rng = np.random.default_rng(3)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for spec in jax.tree.leaves(specs)
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }


TESTED = (
    *(
        "bloom_tied",
        "cohere_qk_norm",
        "deepseek_v3_groups",
        "falcon_multi_query",
        "gemma_tied",
        "glm4_tied",
        "gpt2_tied",
    ),
    *("gpt_oss_mxfp4", "granite_multipliers", "llama_tied_llama3_rope", "llama_untied", "olmo2_untied", "phi3_fused"),
    *("phi3_long_factors", "arcee_untied", "ernie4_5_biases", "gemma3n_shared", "minimax_m2_half_rotated"),
    *("olmoe_biases", "seed_oss_untied"),
    *("kimi_k2_one_group", "mistral4_beyond_original"),
    *("phi_untied", "qwen2_moe_tied", "qwen2_tied", "qwen3_moe_normalised", "qwen3_tied", "stablelm_qk_norm"),
)


@pytest.mark.parametrize("name", quick_only(TESTED, "llama_untied"))
def test_logits_of_the_safetensors(tmp_path, name):
    fields = json.loads((GOLDENS / name / "config.json").read_text())
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors_of(name), metadata=FIELDS_COMPARED.get(name))
    params, config, family, mesh = load_model(tmp_path / "m.gguf")
    golden = params, config, family, np.load(GOLDENS / name / "golden.npz"), mesh
    assert golden_error(full_logits(golden), golden) < 1e-5


ALTERED = {
    "afmoe_windows": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "baichuan_alibi": {"vocab_size": 125696, "num_hidden_layers": 40, "hidden_size": 32, "norm_head": None},
    "baichuan_rotated": {"vocab_size": 64000, "norm_head": None},
    "bailing_moe_unit_head": {"first_k_dense_replace": 0, "norm_head": False, "use_qkv_bias": False},
    "kimi_linear_plain": {"linear_num_heads": 3, "hidden_act": "silu"},
    "mellum_windows": {"mlp_layer_types": ["sparse"] * 3},
    "mimo_v2_flash_windows": {
        "routed_scaling_factor": 1.0,
        "rope_parameters": {
            "full_attention": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    },
    "olmo_clipped": {"attention_bias": False},
    "qwen3_vl_moe_some_dense": {"model_type": "qwen3_moe", "mlp_only_layers": [], "norm_topk_prob": True},
}
"""Goldens with options that llama.cpp does not have, and the fields changed for it; their weights are random."""

FIELDS_COMPARED = {
    "deepseek_v2_greedy": {},
    "deepseek_v2_groups": {"deepseek2.expert_gating_func": 1},
    "falcon_grouped_one_norm": {"falcon.rope.freq_base": 100.0, "falcon.rope.scaling.factor": 2.0},
    "gemma2_caps": {},
    "gemma3_two_thetas": {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base_swa": 50.0,
        "gemma3.attention.sliding_window_pattern": 2,
    },
    "glm_tied": {},
    "gpt_neox_sequential": {"gptneox.rope.freq_base": 100.0},
    "gpt_oss_clamped": {},
    "gptj_tied": {},
    "llama_biases_linear_rope": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "mixtral_tied": {},
    "stablelm_parallel_biases": {"stablelm.rope.freq_base": 100.0},
    "starcoder2_tied_window": {"starcoder2.attention.sliding_window": 7},
    **{name: keys for name, keys in gguf_files.RECORDED.items() if name not in ALTERED},
    "mistral4_beyond_original": gguf_files.RECORDED["mistral4_beyond_original"]
    | {"mistral4.attention.temperature_scale": 0.3},
    "qwen_untied": gguf_files.RECORDED["qwen_untied"] | {"qwen.attention.key_length": 10},
    "cohere2_windows": gguf_files.RECORDED["cohere2_windows"] | {"cohere2.attention.sliding_window_pattern": 2},
    "hunyuan_v1_dense_alpha": gguf_files.RECORDED["hunyuan_v1_dense_biases"]
    | {
        "hunyuan-dense.embedding_length": 40,
        "hunyuan-dense.feed_forward_length": 45,
        "hunyuan-dense.attention.head_count": 4,
        "hunyuan-dense.attention.head_count_kv": 2,
        "hunyuan-dense.attention.key_length": 10,
        "hunyuan-dense.attention.value_length": 10,
        "hunyuan-dense.rope.freq_base": 50.0,
        "hunyuan-dense.rope.scaling.alpha": 7.0,
    },
}
"""Goldens, and the metadata that llama.cpp's converter does not write for all of its models."""
NO_LIMIT = {"max_position_embeddings": 2**20}
UNSAID = {
    "bamba_tied": {"hidden_act": "silu", "time_step_limit": None},
    "cohere2_windows": {"tie_word_embeddings": True},
    "dots1_tied": {"hidden_act": "silu"},
    "ernie4_5_moe_tied": {"hidden_act": "silu"},
    "falcon_h1_tied": {
        "hidden_act": "silu",
        "mamba_d_ssm": 30,
        "mamba_norm_before_gate": False,
        "time_step_limit": None,
    },
    "gemma4_experts": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma4_shared": {
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        }
    },
    "granitemoehybrid_dense": NO_LIMIT | {"position_embedding_type": "nope", "time_step_limit": None},
    "granitemoehybrid_experts": NO_LIMIT,
    "hunyuan_v1_dense_biases": {"hidden_act": "silu"},
    "lfm2_moe_tied": {"norm_topk_prob": True},
    "llama4_plain": {
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        **dict.fromkeys(("layer_types", "no_rope_layer_interval", "no_rope_layers")),
    },
    "mamba2_tied": {"hidden_act": "silu"},
    "ministral3_beyond_original": {"sliding_window": None},
    "nemotron_h_biases": NO_LIMIT,
    "nemotron_h_experts": NO_LIMIT | {"intermediate_size": None, "mlp_hidden_act": "relu2"},
    "phimoe_long_equal_factors": {
        "hidden_act": "silu",
        "router_jitter_noise": 0.01,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 50.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 2.5, 6.0],
            "long_factor": [1.0, 2.5, 6.0],
            "short_mscale": 1.5,
            "long_mscale": 1.5,
        },
    },
    "qwen_untied": {"seq_length": 512},
    "qwen3_next_tied": {"hidden_act": "silu", "norm_topk_prob": True},
    "smollm3_windows": dict.fromkeys(("layer_types", "no_rope_layer_interval", "no_rope_layers", "use_sliding_window")),
    "deepseek_v2_greedy": {"hidden_act": "silu"},
    "deepseek_v2_groups": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 8.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 16,
        }
    },
    "falcon_grouped_one_norm": {"activation": "gelu", "max_position_embeddings": 2048},
    "glm_tied": {"hidden_act": "silu"},
    "gpt_neox_sequential": {"hidden_act": "gelu"},
    "gptj_tied": {"activation_function": "gelu_new"},
    "llama_biases_linear_rope": {"hidden_act": "silu"},
    "gpt_oss_clamped": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "mixtral_tied": {"hidden_act": "silu"},
    "stablelm_parallel_biases": {"hidden_act": "silu"},
}
"""Fields of some families that such a file cannot contain."""


def in_float32(value):
    """Return these fields with numbers as a GGUF file has them."""
    if isinstance(value, dict):
        return {key: in_float32(each) for key, each in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value


@pytest.mark.parametrize("name", ALTERED)
def test_config_and_weights_of_random_safetensors(tmp_path, name):
    fields = in_float32(load_config(GOLDENS / name)) | ALTERED[name]
    tensors, metadata = random_tensors(fields), gguf_files.RECORDED[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors, metadata=metadata)
    params, config, family, mesh = load_model(tmp_path / "m.gguf")
    assert config == family.config(fields)
    whole = load_weights(tmp_path, family.param_specs(config), dtype=FLOAT32, mesh=mesh, progress=False)
    jax.tree.map(lambda got, expected: np.testing.assert_allclose(got, expected, atol=3e-7), params, whole)

    keys, converted = dict(metadata), gguf_files.convert_recorded(metadata, tensors)
    for layer in range(fields["num_hidden_layers"]):  # as with --fuse-qkv of the converter
        if f"blk.{layer}.attn_k.weight" not in converted:  # latents
            continue
        parts = [converted.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        converted[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    gguf_files.write(tmp_path / "fused.gguf", keys.pop("general.architecture"), keys, converted)
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path / "fused.gguf")[0], params)


@pytest.mark.parametrize("name", FIELDS_COMPARED)
def test_config_and_weights_of_the_safetensors(tmp_path, name):
    """A GGUF file cannot say everything, so that such a golden's logits are out of reach."""
    is_recorded, unsaid = name in gguf_files.RECORDED, UNSAID.get(name, {})
    fields = json.loads((GOLDENS / name / "config.json").read_text())
    if is_recorded:
        fields = in_float32(load_config(GOLDENS / name)) | unsaid
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors_of(name), metadata=FIELDS_COMPARED[name])
    params, config, family, mesh = load_model(tmp_path / "m.gguf")
    epsilons = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
    fields |= {key: float(np.float32(fields[key])) for key in epsilons if key in fields} | unsaid
    assert config == family.config(fields | {"query_pre_attn_scalar": fields.get("head_dim")})
    whole = load_weights(GOLDENS / name, family.param_specs(config), dtype=FLOAT32, mesh=mesh, progress=False)
    jax.tree.map(lambda got, expected: np.testing.assert_allclose(got, expected, atol=3e-7), params, whole)


@pytest.mark.parametrize(("name", "num_layers", "period"), [("gemma2", 46, 2), ("gemma3_text", 62, 6)])
def test_what_llama_cpp_knows_of_the_largest_gemmas(tmp_path, name, num_layers, period):
    fields = LLAMA | {"model_type": name, "num_hidden_layers": num_layers, "head_dim": 8, "sliding_window": 12}
    fields["attn_logit_softcapping"] = 50.0 if name == "gemma2" else None
    embedding = {"model.embed_tokens.weight": np.ones((48, 64), np.float32)}
    gguf_files.write_model(tmp_path / "m.gguf", fields, embedding)
    found = load_config(tmp_path / "m.gguf")
    assert found["query_pre_attn_scalar"] == 64 // 4
    full = [index for index, kind in enumerate(found["layer_types"]) if kind == "full_attention"]
    assert full == list(range(period - 1, num_layers, period))
    assert found["sliding_window"] == 12


def test_a_period_of_no_layers(tmp_path):
    fields = LLAMA | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 12}
    embedding = {"model.embed_tokens.weight": np.ones((48, 64), np.float32)}
    metadata = {"gemma3.attention.sliding_window_pattern": 0}
    gguf_files.write_model(tmp_path / "m.gguf", fields, embedding, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"gemma3\.attention\.sliding_window_pattern must be positive, got 0"):
        load_config(tmp_path / "m.gguf")


def test_every_architecture_is_tested():
    files = {name: {} for name in TESTED} | FIELDS_COMPARED | gguf_files.RECORDED
    of_fields = [name for name, metadata in files.items() if "general.architecture" not in metadata]
    configs = [json.loads((GOLDENS / name / "config.json").read_text()) for name in of_fields]
    recorded = {keys["general.architecture"] for keys in gguf_files.RECORDED.values()}
    assert recorded | {gguf_files.architecture_of(fields) for fields in configs} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["deepseek_v2_greedy", "deepseek_v3_groups"])
def test_what_makes_keys_and_values_of_latents_whole(tmp_path, name):
    """Older files have one matrix in place of `attn_k_b` and `attn_v_b`."""
    fields = json.loads((GOLDENS / name / "config.json").read_text())
    tensors = tensors_of(name)
    gguf_files.write_model(tmp_path / "split.gguf", fields, tensors)
    converted = gguf_files.convert_tensors(fields, tensors)
    for index in range(fields["num_hidden_layers"]):
        del converted[f"blk.{index}.attn_k_b.weight"], converted[f"blk.{index}.attn_v_b.weight"]
        whole = tensors[f"model.layers.{index}.self_attn.kv_b_proj.weight"]
        converted[f"blk.{index}.attn_kv_b.weight"] = whole
    keys = gguf_files.convert_fields(fields)
    keys |= {"attention.head_count_kv": fields["num_attention_heads"]}
    for length in ("attention.key_length", "attention.value_length"):
        keys[length] = keys.pop(f"{length}_mla")
    keys = {f"deepseek2.{key}": value for key, value in keys.items()}
    gguf_files.write(tmp_path / "whole.gguf", "deepseek2", keys, converted)
    split, whole = load_model(tmp_path / "split.gguf"), load_model(tmp_path / "whole.gguf")
    assert whole[1] == split[1]
    jax.tree.map(np.testing.assert_array_equal, whole[0], split[0])


def test_keys_and_values_of_layers_that_read_others_are_left_out(tmp_path, caplog):
    fields = json.loads((GOLDENS / "gemma3n_shared" / "config.json").read_text())
    tensors, unused = tensors_of("gemma3n_shared"), {}
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors)
    for module in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_proj.bias"):
        unused[f"model.layers.5.self_attn.{module}"] = 2 * tensors[f"model.layers.3.self_attn.{module}"]
    gguf_files.write_model(tmp_path / "more.gguf", fields, tensors | unused)
    with caplog.at_level(logging.INFO):
        assert_same_weights(tmp_path / "more.gguf", tmp_path / "m.gguf")
    assert "4 tensors of layers that read the keys and values of others are left out" in caplog.text


def test_queries_keys_and_values_of_chatglm_in_one(tmp_path):
    fields = json.loads((GOLDENS / "glm_biases" / "config.json").read_text())
    converted = gguf_files.convert_tensors(fields, tensors_of("glm_biases"))
    keys = {f"chatglm.{name}": value for name, value in gguf_files.convert_fields(fields).items()}
    gguf_files.write(tmp_path / "apart.gguf", "chatglm", keys, converted)
    for index in range(fields["num_hidden_layers"]):
        for leaf in ("weight", "bias"):
            parts = [converted.pop(f"blk.{index}.attn_{part}.{leaf}") for part in "qkv"]
            converted[f"blk.{index}.attn_qkv.{leaf}"] = np.concatenate(parts)
    gguf_files.write(tmp_path / "fused.gguf", "chatglm", keys, converted)
    apart, fused = load_model(tmp_path / "apart.gguf"), load_model(tmp_path / "fused.gguf")
    assert fused[1] == apart[1]
    jax.tree.map(np.testing.assert_array_equal, fused[0], apart[0])


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_rope_is_linear_unless_the_file_says_otherwise(tmp_path, key):
    embedding = {"model.embed_tokens.weight": np.ones((48, 64), np.float32)}
    gguf_files.write_model(tmp_path / "m.gguf", LLAMA, embedding, metadata={f"llama.{key}": 4.0})
    config = get_family(LLAMA).config(load_config(tmp_path / "m.gguf"))
    assert config.rope.scaling == LinearScaling(factor=4.0)
    plain = {f"llama.{key}": 4.0, "llama.rope.scaling.type": "none"}
    gguf_files.write_model(tmp_path / "m.gguf", LLAMA, embedding, metadata=plain)
    assert get_family(LLAMA).config(load_config(tmp_path / "m.gguf")).rope.scaling is None


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
EXPERTS = {"llama.expert_count": 8, "llama.expert_used_count": 2}


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [
        ({}, {"original_max_position_embeddings": 128}),
        (
            {"original_context_length": 32, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            {"original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_yarn(tmp_path, metadata, parameters):
    embedding = {"model.embed_tokens.weight": np.ones((48, 64), np.float32)}
    keys = YARN | {f"llama.rope.scaling.{name}": value for name, value in metadata.items()}
    gguf_files.write_model(tmp_path / "m.gguf", LLAMA, embedding, metadata=keys)
    rope = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0} | parameters}
    read = get_family(LLAMA).config
    assert read(load_config(tmp_path / "m.gguf")).rope == read(LLAMA | rope).rope


def test_experts_are_quantized_together(tmp_path):
    fields = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    fields |= {"moe_intermediate_size": 32, "norm_topk_prob": True}
    tensors = random_tensors(fields)
    converted = gguf_files.convert_tensors(fields, tensors)
    kinds = {name: "Q8_0" for name in converted if "_exps" in name}
    gguf_files.write_model(tmp_path / "quantized.gguf", fields, tensors, kinds=kinds)
    gguf_files.write_model(tmp_path / "plain.gguf", fields, tensors)
    quantized, plain = load_model(tmp_path / "quantized.gguf")[0], load_model(tmp_path / "plain.gguf")[0]
    jax.tree.map(lambda got, expected: np.testing.assert_allclose(got, expected, atol=0.03), quantized, plain)


WIDE = {
    "mimo_v2_flash_windows": (
        {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16, "v_head_dim": 8},
        {"embedding_length": 64, "feed_forward_length": 96, "expert_feed_forward_length": 32}
        | {"attention.key_length": 16, "attention.value_length": 8, "rope.dimension_count": 8},
    ),
    "mistral4_beyond_original": (
        {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "qk_nope_head_dim": 32}
        | {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 8, "rope_parameters": None},
        {"embedding_length": 64, "feed_forward_length": 96, "expert_feed_forward_length": 32}
        | {"attention.q_lora_rank": 32, "attention.kv_lora_rank": 32}
        | {"attention.key_length_mla": 40, "attention.value_length_mla": 8},
    ),
}
"""Sizes of goldens, as fields and as metadata, whose rows are whole blocks."""


@pytest.mark.parametrize("name", WIDE)
def test_matrices_and_experts_in_q8_0(tmp_path, name):
    sizes, own = WIDE[name]
    keys = dict(gguf_files.RECORDED[name])
    architecture = keys.pop("general.architecture")
    keys |= {f"{architecture}.{key}": value for key, value in own.items()}
    recorded = keys | {"general.architecture": architecture}
    converted = gguf_files.convert_recorded(
        recorded, random_tensors(load_config(GOLDENS / name) | ALTERED.get(name, {}) | sizes)
    )
    if architecture == "mistral4":  # as its checkpoints have them
        gate, up = (converted.pop(f"blk.1.ffn_{part}_exps.weight") for part in ("gate", "up"))
        converted["blk.1.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    kinds = {each: "Q8_0" for each, tensor in converted.items() if tensor.ndim > 1 and "gate_inp" not in each}
    gguf_files.write(tmp_path / "quantized.gguf", architecture, keys, converted, kinds)
    for each in kinds:
        blocks = gguf.quants.quantize(converted[each], gguf.GGMLQuantizationType.Q8_0)
        converted[each] = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    gguf_files.write(tmp_path / "rounded.gguf", architecture, keys, converted)
    assert_same_weights(tmp_path / "quantized.gguf", tmp_path / "rounded.gguf")


def test_what_converters_leave_out_is_that_of_the_published_models(tmp_path):
    keys = dict(gguf_files.RECORDED["mimo_v2_flash_windows"])
    del keys["mimo2.attention.value_scale"]
    gguf_files.write_model(tmp_path / "mimo.gguf", {}, tensors_of("mimo_v2_flash_windows"), metadata=keys)
    assert load_model(tmp_path / "mimo.gguf")[1].value_scale == 0.707
    keys = gguf_files.RECORDED["mistral4_beyond_original"]
    fields = json.loads((GOLDENS / "mistral4_beyond_original" / "config.json").read_text())
    gguf_files.write_model(tmp_path / "mistral.gguf", fields, tensors_of("mistral4_beyond_original"), metadata=keys)
    scale = load_model(tmp_path / "mistral.gguf")[1].query_scale
    assert (scale.beta, scale.original_context) == (0.1, 8)


def test_further_layers_of_mimo_are_left_out(tmp_path, caplog):
    name = "mimo_v2_flash_windows"
    keys, converted = (
        dict(gguf_files.RECORDED[name]),
        gguf_files.convert_recorded(gguf_files.RECORDED[name], tensors_of(name)),
    )
    architecture = keys.pop("general.architecture")
    gguf_files.write(tmp_path / "m.gguf", architecture, keys, converted)
    keys |= {"mimo2.block_count": 3, "mimo2.nextn_predict_layers": 1}
    keys |= {"mimo2.attention.head_count_kv": [1, 2, 2], "mimo2.attention.sliding_window_pattern": [0, 1, 1]}
    further = {each.replace("blk.1.", "blk.2."): tensor for each, tensor in converted.items() if "blk.1." in each}
    gguf_files.write(tmp_path / "more.gguf", architecture, keys, converted | further)
    with caplog.at_level(logging.INFO):
        assert_same_weights(tmp_path / "more.gguf", tmp_path / "m.gguf")
    assert f"{len(further)} tensors of layers that predict further tokens are left out" in caplog.text


def test_falcon_with_a_norm_for_each_block(tmp_path):
    fields = json.loads((GOLDENS / "falcon_grouped" / "config.json").read_text()) | {"bias": False}
    tensors = random_tensors(fields)
    gguf_files.write_model(tmp_path / "m.gguf", fields, tensors)
    params, config, family, mesh = load_model(tmp_path / "m.gguf")
    assert config.num_block_norms == 2
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    whole = load_weights(tmp_path, family.param_specs(config), dtype=FLOAT32, mesh=mesh, progress=False)
    jax.tree.map(np.testing.assert_array_equal, params, whole)


def test_a_projection_that_older_files_have_whole(tmp_path):
    keys, tensors = dict(gguf_files.RECORDED["qwen3_next_tied"]), tensors_of("qwen3_next_tied")
    converted = gguf_files.convert_recorded(keys, tensors)
    architecture = keys.pop("general.architecture")
    gguf_files.write(tmp_path / "split.gguf", architecture, keys, converted)
    del converted["blk.0.attn_qkv.weight"], converted["blk.0.attn_gate.weight"]
    converted["blk.0.ssm_in.weight"] = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    gguf_files.write(tmp_path / "whole.gguf", architecture, keys, converted)
    assert_same_weights(tmp_path / "whole.gguf", tmp_path / "split.gguf")


def test_axes_of_one_may_be_dropped(tmp_path):
    fields = json.loads((GOLDENS / "qwen2_moe_tied" / "config.json").read_text())
    tensors = tensors_of("qwen2_moe_tied")
    gguf_files.write_model(tmp_path / "whole.gguf", fields, tensors)
    dropped = {name: x[0] if name.endswith("shared_expert_gate.weight") else x for name, x in tensors.items()}
    gguf_files.write_model(tmp_path / "dropped.gguf", fields, dropped)
    assert_same_weights(tmp_path / "dropped.gguf", tmp_path / "whole.gguf")


def test_quantized_weights_are_put_in_order_too(tmp_path):
    tensors = random_llama()
    converted = gguf_files.convert_tensors(LLAMA, tensors)
    kinds = {name: "Q8_0" for name, tensor in converted.items() if tensor.ndim == 2}
    kinds |= {"blk.0.attn_v.weight": "Q5_1", "blk.0.ffn_up.weight": "Q4_0"}
    gguf_files.write_model(tmp_path / "quantized.gguf", LLAMA, tensors, kinds=kinds)
    rounded = {}
    for name, tensor in converted.items():
        kind = gguf.GGMLQuantizationType[kinds.get(name, "F32")]
        rounded[name] = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
    keys = {f"llama.{name}": value for name, value in gguf_files.convert_fields(LLAMA).items()}
    gguf_files.write(tmp_path / "rounded.gguf", "llama", keys, rounded)
    assert_same_weights(tmp_path / "quantized.gguf", tmp_path / "rounded.gguf")
    assert load_config(tmp_path / "quantized.gguf")["dtype"] == "bfloat16"
    assert load_config(tmp_path / "rounded.gguf")["dtype"] == "float32"


def test_every_second_layer_of_gpt_oss_has_the_window(tmp_path):
    fields = json.loads((GOLDENS / "gpt_oss_clamped" / "config.json").read_text()) | {"num_hidden_layers": 5}
    embedding = {"model.embed_tokens.weight": np.ones((48, 26), np.float32)}
    pattern = {"gpt-oss.attention.sliding_window_pattern": 2}
    gguf_files.write_model(tmp_path / "m.gguf", fields, embedding, metadata=pattern)
    local, whole = "sliding_attention", "full_attention"
    assert load_config(tmp_path / "m.gguf")["layer_types"] == [local, whole, local, whole, local]


def test_partial_rotation_survives_rounding():
    for head_dim in range(2, 513, 2):
        for rotated in range(2, head_dim + 1, 2):
            assert int(head_dim * float(np.nextafter(rotated / head_dim, 2.0))) == rotated


@pytest.mark.slow
def test_the_published_story(test_data):
    folder = test_data / "models" / "stories260K"
    path = folder / "stories260K-f32.gguf"
    params, config, family, mesh = load_model(path)
    del params["lm_head"]  # the file repeats the embedding there
    specs = family.param_specs(dataclasses.replace(config, tie_word_embeddings=True))
    whole = load_weights(folder, specs, dtype=FLOAT32, mesh=mesh, progress=False)
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    options = {"warmup": "none", "max_num_batched_tokens": 8, "kv_cache_memory": 2**24, "max_num_seqs": 1}
    with LLM(str(path), max_model_len=128, progress=False, **options) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=100)
        (output,) = llm.generate("Once upon a time", greedy, use_tqdm=False)
    text = output.prompt + output.outputs[0].text
    assert len(text) > 230
    assert text in (folder / "GOLDEN.md").read_text()
