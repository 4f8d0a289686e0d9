"""Fields of config.json that the metadata of many architectures of GGUF files say in the same way. No jax."""

from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_keys import get, head_counts, num_layers, number, positive_integer, refuse
from jaxserve.loading.gguf_rope import rope_fields

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Values of expert_gating_func."""

ATTENTION, STATE = "full_attention", "linear_attention"
"""Types of layers."""


def has(file: GGUFFile, name: str) -> bool:
    """Return true if some layer has this tensor."""
    return any(tensor.endswith(f".{name}") for tensor in file.tensors)


def decoder_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a relative of Llama with RMS norms."""
    return common_fields(file) | {"rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon")}


def sizes(file: GGUFFile) -> dict[str, Any]:
    """Return the sizes that all decoders with attention have."""
    return {
        "hidden_size": positive_integer(file, "embedding_length"),
        "num_hidden_layers": num_layers(file),
        "num_attention_heads": positive_integer(file, "attention.head_count"),
        "max_position_embeddings": positive_integer(file, "context_length"),
    }


def common_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a decoder but for its norms."""
    fields, (num_heads, num_kv_heads) = sizes(file), head_counts(file)
    head_dim = positive_integer(file, "attention.key_length", max(fields["hidden_size"] // num_heads, 1))
    if positive_integer(file, "attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: keys and values of different lengths are not supported")
    return fields | {
        "intermediate_size": positive_integer(file, "feed_forward_length"),
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "attention_bias": has(file, "attn_q.bias"),
        "mlp_bias": has(file, "ffn_up.bias"),
        "sliding_window": get(file, "attention.sliding_window") or None,
        "rope_parameters": rope_fields(file, head_dim),
    }


def without_window(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a relative of Llama with RMS norms in which all layers see everything."""
    return refuse_window(file, decoder_fields(file))


def layer_norm_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of a relative of Llama with layer norms."""
    return refuse_window(file, common_fields(file) | {"layer_norm_eps": number(file, "attention.layer_norm_epsilon")})


def refuse_window(file: GGUFFile, fields: dict[str, Any]) -> dict[str, Any]:
    """Return these fields. Raises CheckpointError if they have a window."""
    if fields["sliding_window"]:
        name = f"{file.architecture}.attention.sliding_window"
        raise CheckpointError(f"{file.path}: {name} {fields['sliding_window']} is not supported")
    return fields


def routing_fields(file: GGUFFile, *, gating: int = SOFTMAX) -> dict[str, Any]:
    """Return how experts are chosen where weights are not scaled and all layers have experts."""
    refuse(file, expert_gating_func=gating, expert_group_count=1, expert_weights_scale=1.0, leading_dense_block_count=0)
    return {
        "num_experts": positive_integer(file, "expert_count"),
        "num_experts_per_tok": positive_integer(file, "expert_used_count"),
    }


def layer_types(file: GGUFFile, period: int) -> list[str]:
    """Return the type of each layer; every `period`-th attends to everything unless the file says otherwise."""
    pattern = get(file, "attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = positive_integer(file, "attention.sliding_window_pattern", period)
        pattern = [(index + 1) % period for index in range(num_layers(file))]
    return ["sliding_attention" if is_local else "full_attention" for is_local in pattern[: num_layers(file)]]
