"""Shapes of published models, and directories that hold one, to run with random weights."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

# fmt: off
LLAMA_100M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 768,
    "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}
"""A Llama with 100 million parameters, as the config.json of a Hugging Face checkpoint."""

LLAMA_3_8B: dict[str, Any] = LLAMA_100M | {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
}
"""The shape of Llama 3 8B."""

LLAMA_3_70B: dict[str, Any] = LLAMA_3_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}
"""The shape of Llama 3 70B."""

QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 151643, "eos_token_id": 151645, "dtype": "bfloat16",
}
"""The shape of Qwen3 30B A3B: 128 experts a layer, 8 of which are active per token."""

FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

QWEN3_30B_A3B_FP8: dict[str, Any] = QWEN3_30B_A3B | {"quantization_config": FP8_BLOCKS}
"""Qwen3 30B A3B in FP8 with scales of blocks, as it is published."""

GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
    "bos_token_id": 199998, "eos_token_id": 200002, "tie_word_embeddings": False, "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
"""The shape of gpt-oss-20b, whose experts are MXFP4: 32 a layer, 4 of which are active per token."""

GPT_OSS_120B: dict[str, Any] = GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}
"""The shape of gpt-oss-120b: 128 experts a layer, 4 of which are active per token."""

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 100000,
    "eos_token_id": 100001, "dtype": "bfloat16",
}
"""The shape of DeepSeek V2 Lite: a latent of width 512 per token and layer, and 64 experts, 6 of which are active per
token.
"""

QWEN25_7B: dict[str, Any] = LLAMA_3_8B | {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
"""The shape of Qwen2.5 7B: biases on q, k and v."""

PHI_4: dict[str, Any] = LLAMA_3_8B | {
    "model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384, "rope_theta": 250000.0, "sliding_window": None,
}
"""The shape of Phi-4."""

OLMO_2_7B: dict[str, Any] = LLAMA_3_8B | {
    "model_type": "olmo2", "vocab_size": 100352, "intermediate_size": 11008, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
}
"""The shape of OLMo 2 7B: norms after blocks, a KV head for each query head."""

COMMAND_R7B: dict[str, Any] = LLAMA_3_8B | {
    "model_type": "cohere2", "vocab_size": 256000, "layer_norm_eps": 1e-5, "rope_theta": 50000.0,
    "tie_word_embeddings": True, "logit_scale": 0.25, "sliding_window": 4096, "sliding_window_pattern": 4,
}
"""The shape of Command R7B: parallel blocks, layer norms, windows in three of four layers."""

GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 256, "sliding_window": 1024, "bos_token_id": 2, "eos_token_id": 1, "dtype": "bfloat16",
}
"""The shape of Gemma 3 4B's text model: norms around blocks, windows in five of six layers."""

SMOLLM3_3B: dict[str, Any] = LLAMA_3_8B | {
    "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0, "tie_word_embeddings": True,
}
"""The shape of SmolLM3 3B: rotations in three of four layers."""

QWEN3_NEXT_80B_A3B: dict[str, Any] = QWEN3_30B_A3B | {
    "model_type": "qwen3_next", "intermediate_size": 5120, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_experts": 512, "num_experts_per_tok": 10, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "max_position_embeddings": 262144, "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
    "quantization_config": FP8_BLOCKS
    | {"modules_to_not_convert": ["lm_head", "linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate"]},
}
"""The shape of Qwen3 Next 80B A3B in FP8, as it is published: the gated delta rule in three of four layers, 512 experts
a layer, 10 of which and a shared one are active per token.
"""

QWEN35_27B: dict[str, Any] = QWEN3_NEXT_80B_A3B | {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
    "bos_token_id": None, "eos_token_id": 248044,
    "quantization_config": FP8_BLOCKS
    | {"modules_to_not_convert": ["lm_head", "linear_attn.in_proj_a", "linear_attn.in_proj_b"]},
}
"""The shape of Qwen3.5 27B's text in FP8, as it is published: dense, the gated delta rule in three of four layers."""

GLM_45_AIR: dict[str, Any] = QWEN3_30B_A3B | {
    "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0, "attention_bias": True, "use_qk_norm": False, "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": [151329, 151336, 151338],
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True},
        }},
    },
}
"""The shape of GLM-4.5-Air in FP8 with a scale for each output, as it is published: 128 experts a layer, 8 of which and
a shared one are active per token.
"""

KIMI_LINEAR_48B_A3B: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "linear_attn_config": {
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
    },
    "model_max_length": 1048576, "rms_norm_eps": 1e-5, "dtype": "bfloat16", "eos_token_id": 163586,
}
"""The shape of Kimi Linear 48B A3B: the delta rule with decays by channel in three of four layers, 256 experts a layer,
8 of which and a shared one are active per token.
"""

LFM2_8B_A1B: dict[str, Any] = {
    "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
    "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8,
    "layer_types": ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)],
    "conv_L_cache": 3, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 7,
    "dtype": "bfloat16",
}
"""The shape of LFM2 8B A1B: short convolutions in three of four layers, 32 experts, 4 of which are active per token."""

NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128, "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}
"""The shape of Nemotron-H 8B: 24 blocks of Mamba-2, 4 that attend."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama-100m": LLAMA_100M, "llama-3-8b": LLAMA_3_8B, "llama-3-70b": LLAMA_3_70B, "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-30b-a3b-fp8": QWEN3_30B_A3B_FP8, "gpt-oss-20b": GPT_OSS_20B, "gpt-oss-120b": GPT_OSS_120B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE, "qwen2.5-7b": QWEN25_7B, "phi-4": PHI_4, "olmo-2-7b": OLMO_2_7B,
    "command-r7b": COMMAND_R7B, "gemma-3-4b": GEMMA_3_4B, "smollm3-3b": SMOLLM3_3B,
    "qwen3-next-80b-a3b": QWEN3_NEXT_80B_A3B, "qwen3.5-27b": QWEN35_27B, "glm-4.5-air": GLM_45_AIR,
    "kimi-linear-48b-a3b": KIMI_LINEAR_48B_A3B, "lfm2-8b-a1b": LFM2_8B_A1B, "nemotron-h-8b": NEMOTRON_H_8B,
}
"""Shapes to run with random weights, by name."""

SMALL: dict[str, Any] = LLAMA_100M | {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 1000, "dtype": "bfloat16",
}

SMALL_SHAPES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "many-heads": SMALL | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    "qwen2": SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 64},
    "qwen3": SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 80},
    "window": SMALL | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40, "head_dim": 64,
    },
    "sinks": SMALL | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "sliding_window": 40,
        "num_local_experts": 8, "num_experts_per_tok": 8,
    },
    "caps-and-windows": SMALL | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 40, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "experts": SMALL | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64,
        "moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
    "latents": SMALL | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 8,
        "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "moe_intermediate_size": 192, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
    "decays-by-channel": SMALL | {
        "model_type": "kimi_linear", "num_key_value_heads": 8, "tie_word_embeddings": False, "kv_lora_rank": 512,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        "linear_attn_config": {"head_dim": 64, "num_heads": 4, "full_attn_layers": [2, 4], "kda_layers": [1, 3]},
        "moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_token": 8,
    },
    "heads-of-two-sizes": SMALL | {
        "model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1, "sliding_window": 40, "head_dim": 128, "global_head_dim": 256,
        "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 1000,
    },
    "several-streams": SMALL | {
        "model_type": "gemma3n_text", "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 1, "sliding_window": 40, "head_dim": 128,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 1000,
    },
    "heads-beyond-kernels": SMALL | {
        "model_type": "gemma4_text", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": 40, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    },
    "delta-rule": SMALL | {
        "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 64,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "moe_intermediate_size": 192, "shared_expert_intermediate_size": 192, "num_experts": 8,
        "num_experts_per_tok": 8,
    },
    "mamba": SMALL | {
        "model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "head_dim": 64,
        "mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 4,
    },
    "short-convolutions": SMALL | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2, "head_dim": 64},
}
"""Small shapes with what kernels tell apart, by name: the families of the tests on a GPU. All experts are active: which
ones are best may depend on rounding.
"""
# fmt: on


def eagle3_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 head for a model, in the shape in which they are published: one Llama layer
    of the model's own sizes, and its 32,000 most frequent tokens.
    """
    names = LLAMA_100M.keys() - {"tie_word_embeddings"} | {"head_dim"}
    return {name: value for name, value in config.items() if name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": min(32000, config["vocab_size"]),
    }


def write_config(folder: pathlib.Path, config: Mapping[str, Any]) -> pathlib.Path:
    """Write a model directory without weights, for `load_format="dummy"`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder
