"""GGUF files of Hugging Face models, as llama.cpp's converter writes them, by the `gguf` package."""

import functools
import json
import pathlib
import re
import statistics

import gguf
import numpy as np

ARCHITECTURES = {
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "glm": "chatglm",
    "kimi_k2": "deepseek2",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "phi": "phi2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""Families that llama.cpp calls otherwise."""

NAMED_LIKE = {"hy_v3": "dots1", "mellum": "qwen3moe"}
"""Architectures that the `gguf` package does not have."""

RECORDED = json.loads(pathlib.Path(__file__).with_name("gguf_metadata.json").read_text())
"""What llama.cpp's converter wrote as the metadata of these goldens, in 2026-11, but for tokenizers. Granite's layers
were called attention and mamba, Hunyuan's number of experts was a list, and MiMo's fields had their old names, as in
published checkpoints. Rows of AFMoE, EXAONE MoE, Jais 2, Kimi Linear, Nemotron and OLMo 1 were written by hand, by the
converter's source; but that has fewer rotated dimensions of Nemotron where a head's size is not the hidden size by the
number of heads, as here.
"""

EXPERT = re.compile(r"(.+)\.(?:experts|norms)\.(\d+)\.(.+)")


def architecture_of(fields):
    return ARCHITECTURES.get(fields["model_type"], fields["model_type"])


def convert_name(name, architecture):
    name = name.removeprefix("transformer.") if architecture == "bloom" else name
    return name_map(architecture).get_name(name, try_suffixes=(".weight", ".bias"))


@functools.cache
def name_map(architecture):
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kinds[NAMED_LIKE.get(architecture, architecture)], 64)


def stack(tensors):
    """Experts, and norms of single heads, are one tensor each; w1, w2 and w3 are known by another name."""
    whole, parts = {}, {}
    for name, tensor in tensors.items() if isinstance(tensors, dict) else tensors:
        if match := EXPERT.fullmatch(name):
            before, index, after = match.groups()
            before = before.replace("model.", "").replace("block_sparse_moe", "feed_forward")
            separator = "" if after == "weight" else ".experts" if ".mlp" in before else ""
            merged = (
                f"model.{before}{separator}.{after}" if "feed_forward" not in before else f"{before}.experts.{after}"
            )
            parts.setdefault(merged, {})[int(index)] = tensor
        else:
            whole[name] = tensor
    return whole | {name: np.stack([found[i] for i in range(len(found))]) for name, found in parts.items()}


def convert_recorded(keys, tensors):
    """Convert the tensors of a golden whose metadata is recorded, as llama.cpp's converter does."""
    architecture = keys["general.architecture"]

    def key(name):
        return keys.get(f"{architecture}.{name}")

    converted = {}
    for name, tensor in stack(_as_published(tensors)).items():
        if name == "lm_head.weight" and architecture == "cohere2":
            continue  # is always tied
        for found, value in _parts(architecture, key, name, tensor):
            converted[found if found.startswith("blk.") else convert_name(found, architecture)] = value
    return {name: np.ascontiguousarray(tensor) for name, tensor in converted.items()}


def _as_published(tensors):
    """Yield the tensors that become some, by the names that the converter gives them first."""
    leaves = {
        ".dt_bias": ".dt_proj.bias",
        "_correction_bias": "_correction.bias",
        "attention_sink_bias": "attention_sink_bias.weight",
        ".expert_bias": ".expert_bias.bias",
        ".layer_scalar": ".layer_scalar.weight",
        "experts.down_proj": "experts.down_proj.weight",
    }
    for name, tensor in tensors.items():
        name = re.sub(r"backbone(\.layers\.\d+)\.mixer\.experts", r"model\1.mlp.experts", name)
        name = next((name[: -len(end)] + leaf for end, leaf in leaves.items() if name.endswith(end)), name)
        if ".act_fn." not in name and "visual." not in name:
            yield name.replace("language_model.", ""), tensor


def _parts(architecture, key, name, tensor):
    """Yield the names and values of what one tensor becomes."""
    *_, module, leaf = name.split(".")
    layer = "blk." + name.partition("layers.")[2].partition(".")[0]
    num_keys, num_heads = key("ssm.group_count"), key("ssm.time_step_rank")

    def tiled(values, size):
        heads = values.reshape(num_keys, num_heads // num_keys, size, *values.shape[1:])
        return heads.swapaxes(0, 1).reshape(values.shape)

    if module == "kv_b_proj":
        heads = tensor.reshape(key("attention.head_count"), -1, tensor.shape[1])
        num_keys = key("attention.key_length_mla") - key("rope.dimension_count")
        yield f"{layer}.attn_k_b.weight", heads[:, :num_keys].swapaxes(1, 2)
        yield f"{layer}.attn_v_b.weight", heads[:, num_keys:]
        return
    if architecture == "kimi-linear" and "conv1d" in name:
        tensor = tensor.swapaxes(0, 1)[:, :, None]
    elif "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor[:, 0]
    if leaf == "A_log":
        tensor = -np.exp(tensor)
    if leaf in ("A_log", "D") and architecture not in (*STATEFUL, "kimi-linear"):
        tensor = tensor[:, None]
    if module == "norm" and (".mixer." in name or ".mamba." in name):
        tensor = tensor.reshape(num_keys, -1)
    if architecture in STATEFUL and module.endswith("norm") and ".linear_attn." not in name:
        tensor = tensor + 1
    if architecture == "nemotron" and module.endswith("norm") and leaf == "weight":
        tensor = tensor + 1
    if module in ("W_pack", "query_key_value") and architecture in PAIRED:
        num_heads, num_keys = key("attention.head_count"), key("attention.head_count_kv") or key("attention.head_count")
        unit = len(tensor) // (num_heads + 2 * num_keys)
        for part, rows in zip("qkv", np.split(tensor, [unit * num_heads, unit * (num_heads + num_keys)]), strict=True):
            [(_, rows)] = _parts(architecture, key, name.replace(module, f"{part}_proj"), rows)
            yield f"{layer}.attn_{part}.{leaf}", rows
        return
    if module in ("q_proj", "k_proj") and key("rope.dimension_sections") and architecture == "glm4":
        heads = key("attention.head_count" if module == "q_proj" else "attention.head_count_kv")
        rotated, rest = np.split(tensor.reshape(heads, -1, *tensor.shape[1:]), [key("rope.dimension_count")], axis=1)
        tensor = np.concatenate([rotated[:, ::2], rotated[:, 1::2], rest], axis=1).reshape(tensor.shape)
    if module in ("q_proj", "k_proj") and architecture in PAIRED:
        counts = key("attention.head_count_kv") or key("attention.head_count")
        heads = key("attention.head_count") if module == "q_proj" else np.max(counts)
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    if architecture.startswith("qwen35") and ".linear_attn." in name:
        size = key("ssm.inner_size") // num_heads
        if module in ("in_proj_qkv", "conv1d"):
            first = 2 * num_keys * key("ssm.state_size")
            tensor = np.concatenate([tensor[:first], tiled(tensor[first:], size)])
        elif module == "out_proj":
            tensor = tiled(tensor.T, size).T
        elif name.rpartition("linear_attn.")[2] != "norm.weight":
            tensor = tiled(tensor, size if module == "in_proj_z" else 1)
    if module == "in_proj_qkvz":
        key_size, group = key("ssm.state_size"), tensor.reshape(num_keys, -1, tensor.shape[-1])
        sizes = np.cumsum([key_size, key_size, (group.shape[1] - 2 * key_size) // 2])
        *qkv, z = (part.reshape(-1, tensor.shape[-1]) for part in np.split(group, sizes, axis=1))
        yield f"{layer}.attn_qkv.weight", np.concatenate(qkv)
        yield f"{layer}.attn_gate.weight", z
    elif module == "input_linear" or (leaf == "gate_up_proj" and architecture not in ("gemma4", "mistral4")):
        if architecture == "llama4":
            tensor = tensor.swapaxes(1, 2)
        kind = "_exps" if tensor.ndim == 3 else "_shexp" if key("expert_count") else ""
        for part, half in zip(("gate", "up"), np.split(tensor, 2, axis=-2), strict=True):
            yield f"{layer}.ffn_{part}{kind}.weight", half
    elif module == "output_linear" and tensor.ndim == 2 and not key("expert_count"):
        yield f"{layer}.ffn_down.weight", tensor
    elif module == "router" and leaf != "weight":
        yield f"{layer}.{'ffn_gate_inp' if leaf == 'scale' else 'ffn_down_exps'}.scale", tensor
    elif ".mlp.router.gate." in name:
        yield f"{layer}.ffn_gate_inp.weight", tensor
    elif architecture == "hy_v3" and ".expert_bias" in name:
        yield f"{layer}.exp_probs_b", tensor
    elif architecture == "llama4" and tensor.ndim == 3:
        yield name, tensor.swapaxes(1, 2)
    else:
        yield f"{name}.weight" if leaf == "gate_up_proj" else name, tensor


PAIRED = (
    *("baichuan", "bailingmoe", "granitehybrid", "granitemoe", "mistral3", "nemotron_h", "nemotron_h_moe", "olmo"),
    "smollm3",
)
STATEFUL = ("qwen35", "qwen35moe", "qwen3next")


def convert_tensors(fields, tensors):
    """Convert the tensors of a Hugging Face checkpoint to llama.cpp's layout; tensors of bytes are MXFP4."""
    if fields["model_type"] == "gpt_oss":
        return convert_gpt_oss(tensors)
    converted = {}
    if fields["model_type"] == "gemma3n_text":
        tensors = stack_streams(tensors)
    for name, tensor in stack(tensors).items():
        match architecture_of(fields), name.rsplit(".", 2)[-2:]:
            case "arcee" | "llama" | "granite", [("q_proj" | "k_proj") as part, _]:
                heads = fields["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
                halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            case "gemma" | "gemma2" | "gemma3", [part, _] if part.endswith("norm"):
                tensor = tensor + 1
            case "falcon", ["query_key_value", "weight"]:
                num_heads, num_kv_heads = fields["num_attention_heads"], falcon_kv_heads(fields)
                groups = tensor.reshape(num_kv_heads, num_heads // num_kv_heads + 2, -1, tensor.shape[1])
                parts = groups[:, :-2], groups[:, -2], groups[:, -1]
                tensor = np.concatenate([part.reshape(-1, tensor.shape[1]) for part in parts])
            case "bloom" | "gptneox", ["query_key_value", _]:
                num_heads = fields.get("n_head") or fields["num_attention_heads"]
                heads = tensor.reshape(num_heads, 3, -1, *tensor.shape[1:])
                tensor = np.concatenate([heads[:, part].reshape(-1, *tensor.shape[1:]) for part in range(3)])
            case "gpt2", [("c_attn" | "c_proj" | "c_fc"), "weight"]:
                tensor = tensor.T
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        converted[convert_name(name, architecture_of(fields))] = np.ascontiguousarray(tensor)
    return split_latent_heads(fields, converted) if architecture_of(fields) == "deepseek2" else converted


def stack_streams(tensors):
    """Stack the matrices of residual streams."""
    streams = re.compile(r"(model\.altup_\w+)\.\d+\.weight")
    stacked = {}
    for name, tensor in sorted(tensors.items()):
        if match := streams.fullmatch(name):
            before = stacked.get(f"{match[1]}.weight", tensor[:0].reshape(0, *tensor.shape))
            stacked[f"{match[1]}.weight"] = np.concatenate([before, tensor[None]])
        else:
            stacked[f"{name}.weight" if name.endswith("_scale") else name] = tensor
    return stacked


def split_latent_heads(fields, tensors):
    """Split the projection from latents into those of keys and values, the former transposed."""
    split, num_keys = {}, fields["qk_nope_head_dim"]
    for name, tensor in tensors.items():
        if ".attn_kv_b." in name:
            heads = tensor.reshape(fields["num_attention_heads"], -1, tensor.shape[1])
            k, v = heads[:, :num_keys].swapaxes(1, 2), heads[:, num_keys:]
            split |= {name.replace("kv_b", "k_b"): np.ascontiguousarray(k), name.replace("kv_b", "v_b"): v.copy()}
        else:
            split[name] = tensor
    return split


def convert_gpt_oss(tensors):
    """Convert the experts, which have outputs before inputs, and gate and up apart; blocks and scales become ggml's
    blocks.
    """
    converted = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            tensor = mxfp4_rows(tensor, tensors[name.replace("_blocks", "_scales")])
        elif name.endswith(("down_proj", "gate_up_proj")):
            tensor = tensor.swapaxes(1, 2)
        if name.endswith("_scales"):
            continue
        leaf = "bias" if name.endswith("_proj_bias") else "weight"
        module = name.removesuffix("_blocks").removesuffix("_bias") if ".experts." in name else None
        if module is None:
            converted[convert_name(f"{name}.weight" if name.endswith("sinks") else name, "gpt-oss")] = tensor
        elif module.endswith("down_proj"):
            converted[convert_name(f"{module}.{leaf}", "gpt-oss")] = tensor
        else:
            for first, part in enumerate(("gate", "up")):
                part_name = f"{module.replace('gate_up', part)}.{leaf}"
                converted[convert_name(part_name, "gpt-oss")] = tensor[:, first::2]
    return {name: np.ascontiguousarray(tensor) for name, tensor in converted.items()}


def mxfp4_rows(blocks, scales):
    """Return ggml's blocks, [X, out, in / 32 * 17]: a scale, then 16 bytes whose lower halves are the first 16
    values.
    """
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    halves = values[..., :16] | (values[..., 16:] << 4)
    return np.concatenate([scales[..., None], halves], axis=-1).reshape(*scales.shape[:-1], -1)


def falcon_kv_heads(fields):
    return fields["num_kv_heads"] if fields["new_decoder_architecture"] else 1


NAMES = {
    "context_length": "seq_length max_position_embeddings n_positions",
    "embedding_length": "hidden_size n_embd",
    "feed_forward_length": "intermediate_size ffn_hidden_size n_inner",
    "block_count": "num_hidden_layers n_layer",
    "attention.head_count": "num_attention_heads n_head",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of metadata, and the fields that they are in a config.json: the first that is there."""
EXPERTS = {"expert_count": "num_experts num_local_experts", "expert_used_count": "num_experts_per_tok"}
WINDOW = {"attention.sliding_window": "sliding_window"}
DEEPSEEK = EXPERTS | {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
QWEN_MOE = EXPERTS | {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
FURTHER_NAMES = {
    "cohere": {"logit_scale": "logit_scale"},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), DEEPSEEK),
    "gemma3n_text": WINDOW
    | {
        "altup.active_idx": "altup_active_idx",
        "altup.num_inputs": "altup_num_inputs",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    },
    "gpt_neox": {"use_parallel_residual": "use_parallel_residual"},
    "gpt_oss": EXPERTS | WINDOW | {"expert_feed_forward_length": "intermediate_size"},
    "gptj": {"rope.dimension_count": "rotary_dim"},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "logit_scale": "logits_scaling",
        "residual_scale": "residual_multiplier",
    },
    "minimax_m2": EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
    "mixtral": EXPERTS,
    "olmoe": EXPERTS | {"expert_weights_norm": "norm_topk_prob"},
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), QWEN_MOE),
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
}
"""Keys that only some families have, by model_type, as in NAMES."""


def convert_fields(fields):
    """Convert a Hugging Face config to metadata, without the architecture's name before each key."""
    keys = _computed_keys(fields)
    for key, names in (NAMES | FURTHER_NAMES.get(fields["model_type"], {})).items():
        found = [fields[name] for name in names.split() if fields.get(name) is not None]
        keys |= {key: found[0]} if found and key not in keys else {}
    return keys


def _computed_keys(fields):
    """Return the keys that no field says as they are."""
    match architecture_of(fields):
        case "bloom":
            return {"feed_forward_length": 4 * fields["hidden_size"], "attention.head_count_kv": fields["n_head"]}
        case "falcon":
            return {"context_length": 2048, "attention.head_count_kv": falcon_kv_heads(fields)}
        case "gpt2" | "gptj":
            return {}
    rope = fields.get("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    keys = {"rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0))}
    match fields["model_type"]:
        case "gpt_neox":
            return keys
        case "cohere":
            keys["rope.scaling.type"] = "none"
        case "gemma3n_text":
            icdf, local = statistics.NormalDist().inv_cdf, fields["rope_parameters"]["sliding_attention"]
            pattern = fields["activation_sparsity_pattern"]
            keys["activation_sparsity_scale"] = [icdf(each) if each else float("-inf") for each in pattern]
            keys |= {"rope.freq_base_swa": local["rope_theta"], "rope.scaling.type": rope["rope_type"]}
            keys["rope.scaling.factor"] = rope["factor"]
        case "minimax_m2":
            keys["expert_gating_func"] = 2
        case "gemma2" | "gemma3_text" | "phi3":
            keys["attention.sliding_window"] = fields["sliding_window"] or 0
    if fields["model_type"] in ("gemma3n_text", "gpt_oss"):
        local = [kind == "sliding_attention" for kind in fields["layer_types"]]
        keys["attention.sliding_window_pattern"] = local
    if fields["model_type"] not in ("stablelm", "phi"):
        keys["rope.freq_base"] = rope.get("rope_theta", 10000.0)
    if architecture_of(fields) == "deepseek2":
        rotated = fields["qk_rope_head_dim"]
        keys |= {"rope.dimension_count": rotated, "attention.head_count_kv": 1}
        keys["attention.key_length"] = fields["kv_lora_rank"] + rotated
        keys["attention.key_length_mla"] = fields["qk_nope_head_dim"] + rotated
        if fields["model_type"] == "deepseek_v3":  # V2's config.json says "softmax", which transformers' does not
            keys["expert_gating_func"] = 2
        if fields["norm_topk_prob"]:
            keys["expert_weights_norm"] = True
    else:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    match rope.get("rope_type"):
        case "yarn":
            keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
            keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
            if "mscale_all_dim" in rope:
                keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
        case "longrope":
            original = rope["original_max_position_embeddings"]
            stretch = fields["max_position_embeddings"] / original
            keys["rope.scaling.original_context_length"] = original
            keys["rope.scaling.attn_factor"] = (1 + np.log(stretch) / np.log(original)) ** 0.5
    return keys


def rope_tensors(fields):
    """Return the factors of the wavelengths, as tensors."""
    rope = fields.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        kinds = ("short", "long")
        return {f"rope_factors_{kind}.weight": np.float32(rope[f"{kind}_factor"]) for kind in kinds}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim, low, high = fields["head_dim"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(rope["factor"])
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.float32(factors)}


def write(path, architecture, metadata, tensors, kinds=None):
    """Write a file with these `tensors`, those named in `kinds` quantized, and `metadata`, by full keys."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if kind := (kinds or {}).get(name, "MXFP4" if tensor.dtype == np.uint8 else None):
            kind = gguf.GGMLQuantizationType[kind]
            data = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path, fields, tensors, *, metadata=None, kinds=None):
    """Write the GGUF file of a Hugging Face config and its tensors; `metadata` adds full keys, or is all of them."""
    if metadata and "general.architecture" in metadata:
        recorded = dict(metadata)
        everything = convert_recorded(recorded, tensors) | rope_tensors(fields)
        if pairs := recorded.get("gemma4.attention.key_length", 0) // 2:
            rope = (fields["rope_parameters"] or {}).get("full_attention", {})
            rotated = int(pairs * rope.get("partial_rotary_factor", 0.25))
            everything["rope_freqs.weight"] = np.float32([1.0] * rotated + [1e30] * (pairs - rotated))
        return write(path, recorded.pop("general.architecture"), recorded, everything, kinds)
    architecture = architecture_of(fields)
    keys = {f"{architecture}.{name}": value for name, value in convert_fields(fields).items()}
    everything = convert_tensors(fields, tensors) | rope_tensors(fields)
    return write(path, architecture, keys | (metadata or {}), everything, kinds)
