"""GGUF files of Hugging Face models, as llama.cpp's converter writes them, by the `gguf` package."""

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
SANDWICH_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def architecture_of(fields):
    return fields["model_type"].removesuffix("_text")


def convert_name(name, architecture):
    module, leaf = name.rsplit(".", 1)
    if module in NAMES:
        return f"{NAMES[module]}.{leaf}"
    _, _, layer, rest = module.split(".", 3)
    names = SANDWICH_NAMES if architecture in ("gemma2", "gemma3") else LAYER_NAMES
    return f"blk.{layer}.{names[rest]}.{leaf}"


def convert_tensors(fields, tensors):
    """The tensors of a Hugging Face checkpoint as llama.cpp wants them."""
    converted = {}
    for name, tensor in tensors.items():
        match architecture_of(fields), name.rsplit(".", 2)[-2:]:
            case "llama", [("q_proj" | "k_proj") as part, _]:
                heads = fields["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
                halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            case "gemma" | "gemma2" | "gemma3", [part, _] if part.endswith("norm"):
                tensor = tensor + 1
            case "gpt2", [("c_attn" | "c_proj" | "c_fc"), "weight"]:
                tensor = tensor.T
        converted[convert_name(name, architecture_of(fields))] = np.ascontiguousarray(tensor)
    return converted


def convert_fields(fields):
    """The metadata of a Hugging Face config, without the architecture's name before each key."""
    if fields["model_type"] == "gpt2":
        return {
            "embedding_length": fields["n_embd"],
            "feed_forward_length": fields["n_inner"],
            "block_count": fields["n_layer"],
            "attention.head_count": fields["n_head"],
            "context_length": fields["n_positions"],
            "attention.layer_norm_epsilon": fields["layer_norm_epsilon"],
        }
    num_heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // num_heads
    rope = fields.get("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    keys = {
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields["intermediate_size"],
        "block_count": fields["num_hidden_layers"],
        "attention.head_count": num_heads,
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "context_length": fields["max_position_embeddings"],
        **_norm_keys(fields),
        "rope.freq_base": rope.get("rope_theta", 10000.0),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if fields["model_type"] in ("phi3", "gemma2", "gemma3_text"):
        keys["attention.sliding_window"] = fields["sliding_window"] or 0
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(cap):
            keys[cap] = fields[cap]
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = fields["max_position_embeddings"] / original
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = (1 + np.log(stretch) / np.log(original)) ** 0.5
    return keys


def _norm_keys(fields):
    if fields["model_type"] == "starcoder2":
        return {"attention.layer_norm_epsilon": fields["norm_epsilon"]}
    return {"attention.layer_norm_rms_epsilon": fields["rms_norm_eps"]}


def rope_tensors(fields):
    """What multiplies the wavelengths, as tensors."""
    rope = fields.get("rope_parameters", {})
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
    """A file of whole `tensors`, those named in `kinds` quantized, and of `metadata`, by whole keys."""
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
        if kind := (kinds or {}).get(name):
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
    """The GGUF file of a Hugging Face config and its tensors; `metadata` adds or replaces whole keys."""
    architecture = architecture_of(fields)
    keys = {f"{architecture}.{name}": value for name, value in convert_fields(fields).items()}
    everything = convert_tensors(fields, tensors) | rope_tensors(fields)
    write(path, architecture, keys | (metadata or {}), everything, kinds)
