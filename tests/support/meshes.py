"""Random models of all kinds over meshes: each mesh that makes sense must compute what one device computes.

As a script it prints the table of families and meshes, with the error of each cell (`make meshes`).
"""

import functools
import os

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
from engine_harness import Model, request, run
from golden_models import relative_error
from paged import chunked_logits

from jaxserve.errors import ConfigError
from jaxserve.layers.layouts import layouts, put
from jaxserve.layers.sharding import check_mesh
from jaxserve.layers.stages import PIPE
from jaxserve.models import get_family
from jaxserve.sampling_params import SamplingParams

FIELDS = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "vocab_size": 104,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
    "use_qk_norm": True,
    "logit_scale": 1.0,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 12,
    "new_decoder_architecture": True,
    "num_kv_heads": 4,
}
LATENT_FIELDS = {
    "num_key_value_heads": 8,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
}
SEQUENCE = np.arange(14) * 29 % 104
HUNYUAN_FIELDS = {"mlp_bias": False}
CHATGLM_FIELDS = {
    "num_layers": 1,
    "ffn_hidden_size": 72,
    "kv_channels": 12,
    "multi_query_attention": True,
    "multi_query_group_num": 4,
    "padded_vocab_size": 104,
    "add_bias_linear": True,
}
DELTA_FIELDS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
LFM2_FIELDS = {
    "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
    "conv_bias": True,
    "num_dense_layers": 0,
}
MAMBA_FIELDS = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 5,
    "ssm_state_size": 6,
    "n_groups": 8,
    "use_bias": True,
    "attention_bias": False,
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "n_routed_experts": 6,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": 10,
}
ONE_GROUP = {"n_groups": 1, "num_heads": 16, "head_dim": 8, "state_size": 6, "use_bias": True}
GRANITE_FIELDS = {
    "mlp_bias": False,
    "layer_types": ["mamba"],
    "mamba_n_heads": 16,
    "mamba_d_state": 6,
    "shared_intermediate_size": 16,
    "num_local_experts": 6,
}
OWN_FIELDS = {
    "bailing_moe_v2": {"n_group": 3, "topk_group": 2},
    "baichuan": {"num_key_value_heads": None, "norm_head": True},
    "chatglm": CHATGLM_FIELDS,
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "top_k_experts": 3,
        "sliding_window": 5,
        "global_head_dim": 20,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 104,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": 5,
        "intermediate_size": [72, 64, 72, 80],
        "activation_sparsity_pattern": [0.8, 0.0, 0.4, 0.0],
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 88,
        "altup_num_inputs": 3,
        "laurel_rank": 5,
    },
    "llama4_text": {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 8, "floor_scale": 4},
    "hunyuan_v1_dense": HUNYUAN_FIELDS,
    "hunyuan_v1_moe": HUNYUAN_FIELDS,
    "phimoe": {"num_experts_per_tok": 2},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA_FIELDS),
    **dict.fromkeys(("lfm2", "lfm2_moe"), LFM2_FIELDS),
    "mamba2": ONE_GROUP,
    "bamba": {
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 16,
        "mamba_n_groups": 8,
        "mamba_d_state": 6,
        "mamba_proj_bias": True,
    },
    "mimo_v2_flash": {"use_qk_norm": False, "v_head_dim": 8},
    "solar_open": {"use_qk_norm": False},
    "bailing_hybrid": {"q_lora_rank": None},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 6,
        "linear_num_heads": 8,
    },
    "falcon_h1": {
        "mamba_d_ssm": 80,
        "mamba_n_heads": 16,
        "mamba_n_groups": 8,
        "mamba_d_state": 6,
        "mamba_rms_norm": True,
    },
    "granitemoehybrid": GRANITE_FIELDS,
    "nemotron_h": MAMBA_FIELDS,
    "olmo_hybrid": DELTA_FIELDS | {"partial_rotary_factor": 1.0},
}

FAMILIES = ("llama", "gemma2", "bloom", "qwen2_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
"""Dense families, families with experts, and families that attend to latents: the columns of the table."""

MANY_EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
    "moe_intermediate_size": 512,
    "intermediate_size": 512,
}
"""Sizes that eight devices divide, also each expert's: of smaller ones "tensor" splits no expert."""

MESHES = (
    {"tensor": 2},
    {"tensor": 8},
    {"expert": 2},
    {"expert": 8},
    {"expert": 2, "tensor": 2},
    {"expert": 2, "tensor": 4},
    {"expert": 4, "tensor": 2},
    {"pipe": 2},
    {"pipe": 2, "tensor": 2},
    {"pipe": 2, "expert": 2},
    {"data": 2},
    {"data": 8},
    {"data": 2, "expert": 4},
    {"data": 4, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"pipe": 2, "data": 2, "expert": 2},
)
"""The rows of the table. Stages are those of an engine, all others pass a sequence through the layers."""


def make_mesh(**axes):
    shape = tuple(axes.values())
    return jax.make_mesh(shape, tuple(axes), devices=jax.devices()[: np.prod(shape)])


def fields_of(model_type, **changes):
    names = ("bailing_hybrid", "deepseek", "dots1", "glm4_moe_lite", "kimi", "mistral4", "youtu")
    latent = LATENT_FIELDS if model_type.startswith(names) else {}
    return FIELDS | latent | OWN_FIELDS.get(model_type, {}) | {"model_type": model_type} | changes


def _check_mesh(mesh, specs):
    check_mesh(mesh, {axis for spec in jax.tree.leaves(specs) for axis in spec.axes}, tensor_parallel_size=1)


def random_model(model_type, mesh, **changes):
    """Weights that all have a part in the result: biases that are not 0, norms that are not 1."""
    fields = fields_of(model_type, **changes)
    family = get_family(fields)
    config = family.config(fields)
    specs = family.param_specs(config)
    rng = np.random.default_rng(3)

    def draw(spec, layout):
        values = rng.normal(0.3 if spec.init_scale is None else 0.0, 0.3, spec.shape)
        return put(spec, layout, values.astype(np.float32))

    _check_mesh(mesh, specs)
    params = jax.tree.map(draw, specs, layouts(specs, mesh))
    return params, config, family


def logits_on(model_type, mesh, **changes):
    params, config, family = random_model(model_type, mesh, **changes)
    return chunked_logits(params, config, family, SEQUENCE, [[9, 1, 4]], mesh=mesh)


def logprobs_on(model_type, mesh, **changes):
    """Return the log probabilities that an engine tells: those of a prompt in two chunks, and those of all tokens that
    may follow the token after it.
    """
    fields = fields_of(model_type, num_hidden_layers=2, **changes)
    family = get_family(fields)
    _check_mesh(mesh, family.param_specs(family.config(fields)))
    model = Model(None, changes=fields, mesh=mesh)
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=model.vocab_size)
    engine = model.engine(max_num_batched_tokens=8)
    result = run(engine, [request("one", SEQUENCE.tolist(), 2, params)])["one"]
    of_last = result.logprobs[-1]
    ranked = dict(zip(of_last.top_ids, of_last.top_logprobs, strict=True))
    return np.array([each.logprob for each in result.prompt_logprobs] + [ranked[token] for token in sorted(ranked)])


def print_table():
    """Print the largest error of each family on each mesh, divided by the largest logit, and with stages by the largest
    log probability; "-" where the mesh is refused.
    """
    expected = functools.cache(lambda way, model_type: way(model_type, make_mesh(tensor=1), **MANY_EXPERTS))
    header = "".join(f"{model_type:>13}" for model_type in FAMILIES)
    print('Error in float32, of the largest logit; with "pipe", of the largest log probability')  # noqa: T201
    print(f"{'':<30}{header}", flush=True)  # noqa: T201
    refused = {}
    for axes in MESHES:
        name = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        way = logprobs_on if PIPE in axes else logits_on
        print(f"{name:<30}", end="", flush=True)  # noqa: T201
        for model_type in FAMILIES:
            try:
                error = relative_error(way(model_type, make_mesh(**axes), **MANY_EXPERTS), expected(way, model_type))
                print(f"{error:>13.1e}", end="", flush=True)  # noqa: T201
            except ConfigError as reason:
                refused[f"{model_type}, {name}"] = reason
                print(f"{'-':>13}", end="", flush=True)  # noqa: T201
        print()  # noqa: T201
    for cell, reason in refused.items():
        print(f"- {cell}: {reason}")  # noqa: T201


if __name__ == "__main__":
    print_table()
