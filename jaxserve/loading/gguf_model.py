"""What a GGUF file says about its model, in the words of config.json, and where it keeps which weight.

llama.cpp's converter renames the tensors of a Hugging Face checkpoint, and changes some, which is undone here: those of
q and k in Llama are reordered for rotations of neighbours, Gemmas' gains have the 1 added, GPT-2's matrices are
transposed.
"""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from jaxserve.layers.params import Params, ParamSpec, shardings
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_tokenizer import end_token_ids
from jaxserve.loading.huggingface import SourceWeight, describe_tensors, read_to_devices, source_shapes

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""Modules of Hugging Face checkpoints, those of a layer without its prefix, and llama.cpp's names for them."""

SANDWICH_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""The same where norms stand on both sides of a block."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the config: what the wavelengths of rotary embedding are multiplied by."""

NOT_SERVED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
)
"""Keys of an architecture that change what it computes, which a family here may not know."""

SERVED = {"gemma2": ("attn_logit_softcapping", "final_logit_softcapping"), "gemma3": ("final_logit_softcapping",)}
"""Those of them that some architectures may have."""

GEMMAS = ("gemma", "gemma2", "gemma3")

_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The fields of a config.json of this model. Raises CheckpointError, naming what is missing or not served."""
    file = GGUFFile(path)
    if file.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file.path}: unknown architecture {file.architecture!r}; known are {known}")
    for name in NOT_SERVED:
        if name not in SERVED.get(file.architecture, ()) and _get(file, name):
            raise CheckpointError(f"{file.path}: {file.architecture}.{name} {_get(file, name)!r} is not supported")
    if not _get(file, "attention.causal", True):
        raise CheckpointError(f"{file.path}: {file.architecture}.attention.causal False is not supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError("; ".join([f"{file.path} has no tensor token_embd.weight", *file.problems]))
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    return ARCHITECTURES[file.architecture](file) | {
        "model_type": {"gemma3": "gemma3_text"}.get(file.architecture, file.architecture),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(end_token_ids(file.metadata)),
        "dtype": _dtype(file),
    }


def load_params(
    path: str | pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool = True
) -> Params:
    """The weights that `specs` declare, from a GGUF file, cast to `dtype` and laid out over `mesh`.

    Raises CheckpointError, naming all of them, if files are missing or damaged, or tensors missing, unexpected,
    truncated, of another shape or of an unknown type, and ConfigError if a weight does not divide over the mesh; then
    no device memory has been touched.
    """
    layout = shardings(specs, mesh)
    return read_to_devices(open_weights(path, specs), layout, dtype=dtype, progress=progress)


def open_weights(path: str | pathlib.Path, specs: Params) -> Params:
    """A SourceWeight for each of `specs`. Raises CheckpointError as `load_params` does."""
    file = GGUFFile(path)
    stored = as_stored(specs, file)
    expected = source_shapes(stored)
    tensors = {name: tensor for name, tensor in file.tensors.items() if name not in ROPE_TENSORS}
    complaints = {name: tensors[name].complaint(expected[name]) for name in expected.keys() & tensors.keys()}
    problems = file.problems + describe_tensors(
        # Nobody knows which were in a file that is lost.
        missing=[] if file.problems else [name for name in expected if name not in tensors],
        unexpected=[name for name in tensors if name not in expected],
        wrong=[f"{name} {complaint}" for name, complaint in complaints.items() if complaint],
    )
    if problems:
        raise CheckpointError(f"{file.path} does not fit its metadata; " + "; ".join(problems))
    return jax.tree.map(lambda spec: SourceWeight(spec, tensors), stored)


def as_stored(specs: Params, file: GGUFFile) -> Params:
    """`specs` with the names and shapes that the file's tensors have, and transforms that begin with them."""

    def stored(spec: ParamSpec) -> ParamSpec:
        names = tuple(gguf_name(name, file.architecture) for name in spec.source)
        undo = [_undo(file, name) for name in names]

        def transform(*tensors: np.ndarray) -> np.ndarray:
            original = [change(tensor) if change else tensor for change, tensor in zip(undo, tensors, strict=True)]
            return original[0] if spec.transform is None else spec.transform(*original)

        shapes = tuple(
            shape[::-1] if change is np.transpose else shape
            for change, shape in zip(undo, spec.source_shapes, strict=True)
        )
        return dataclasses.replace(spec, source=names, source_shapes=shapes, transform=transform)

    return jax.tree.map(stored, specs)


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor that has this name in a Hugging Face checkpoint."""
    names = NAMES | SANDWICH_NAMES if architecture in ("gemma2", "gemma3") else NAMES
    module, _, leaf = name.rpartition(".")
    if layer := _LAYER.fullmatch(module):
        return f"blk.{layer[1]}.{names[layer[2]]}.{leaf}"
    return f"{names[module]}.{leaf}"


def _get(file: GGUFFile, name: str, default: Any = None) -> Any:
    return file.metadata.get(f"{file.architecture}.{name}", default)


def _integer(file: GGUFFile, name: str, default: int | None = None) -> int:
    """A positive integer; without a default it must be there."""
    if default is not None and _get(file, name) is None:
        return default
    value = file.require(f"{file.architecture}.{name}", int)
    if value < 1:
        raise CheckpointError(f"{file.path}: {file.architecture}.{name} must be positive, got {value}")
    return value


def _number(file: GGUFFile, name: str) -> float:
    return file.require(f"{file.architecture}.{name}", float)


def _dtype(file: GGUFFile) -> str:
    """The type that holds most values; what is quantized has been bfloat16 in most cases."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.kind] = sizes.get(tensor.kind, 0) + math.prod(tensor.shape)
    return {"F32": "float32", "F16": "float16"}.get(max(sizes, key=sizes.__getitem__), "bfloat16")


def _decoder_fields(file: GGUFFile) -> dict[str, Any]:
    """Of a relative of Llama, with RMS norms."""
    return _fields(file) | {"rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon")}


def _fields(file: GGUFFile) -> dict[str, Any]:
    hidden_size, num_heads = _integer(file, "embedding_length"), _integer(file, "attention.head_count")
    head_dim = _integer(file, "attention.key_length", max(hidden_size // num_heads, 1))
    if _integer(file, "attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file.path}: keys and values of different lengths are not supported")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_hidden_layers": _integer(file, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _integer(file, "context_length"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": _get(file, "attention.sliding_window") or None,
        "rope_parameters": _rope(file, head_dim),
    }


def _without_window(file: GGUFFile) -> dict[str, Any]:
    fields = _decoder_fields(file)
    if fields["sliding_window"]:
        name = f"{file.architecture}.attention.sliding_window"
        raise CheckpointError(f"{file.path}: {name} {fields['sliding_window']} is not supported")
    return fields


def _starcoder2_fields(file: GGUFFile) -> dict[str, Any]:
    epsilon = _number(file, "attention.layer_norm_epsilon")
    return _fields(file) | {"norm_epsilon": epsilon, "use_bias": "blk.0.attn_output.bias" in file.tensors}


def _gemma2_fields(file: GGUFFile) -> dict[str, Any]:
    caps = {
        "attn_logit_softcapping": _get(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _get(file, "final_logit_softcapping", 30.0),
    }
    return _decoder_fields(file) | _hybrid_fields(file, period=2, num_layers_of_27b=46) | caps


def _gemma3_fields(file: GGUFFile) -> dict[str, Any]:
    fields = _decoder_fields(file)
    if fields["sliding_window"] is None:
        raise CheckpointError(f"{file.path}: gemma3.attention.sliding_window is missing")
    local = {"rope_theta": _get(file, "rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    cap = {"final_logit_softcapping": _get(file, "final_logit_softcapping")}
    return fields | _hybrid_fields(file, period=6, num_layers_of_27b=62) | cap | {"rope_parameters": ropes}


def _hybrid_fields(file: GGUFFile, *, period: int, num_layers_of_27b: int) -> dict[str, Any]:
    """Which layers of a Gemma have the window, and what scales its scores; llama.cpp knows both by heart too.

    Every `period`-th layer attends to everything. The largest model divides scores by the root of another number.
    """
    num_layers, num_heads = _integer(file, "block_count"), _integer(file, "attention.head_count")
    hidden_size = _integer(file, "embedding_length")
    pattern = _get(file, "attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = _integer(file, "attention.sliding_window_pattern", period)
        pattern = [bool((index + 1) % period) for index in range(num_layers)]
    head_dim = _integer(file, "attention.key_length", max(hidden_size // num_heads, 1))
    return {
        "sliding_window": _integer(file, "attention.sliding_window", 4096),
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in pattern],
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == num_layers_of_27b else head_dim,
    }


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    rotated = _integer(file, "rope.dimension_count", head_dim)
    fields: dict[str, Any] = {"rope_theta": _get(file, "rope.freq_base", 10000.0)}
    if rotated != head_dim:
        # The least number above the quotient, so that its product with head_dim does not round down.
        fields["partial_rotary_factor"] = math.nextafter(rotated / head_dim, 2.0)
    # As llama.cpp does: what stretches positions is linear unless the file says otherwise, and had another name once.
    factor = _get(file, "rope.scaling.factor", _get(file, "rope.scale_linear"))
    scaling = _get(file, "rope.scaling.type", "linear" if factor else "none")
    attention_factor = _get(file, "rope.scaling.attn_factor")
    is_longrope = file.architecture == "phi3" and "rope_factors_long.weight" in file.tensors
    if not is_longrope and attention_factor not in (None, 1.0):
        name = f"{file.architecture}.rope.scaling.attn_factor"
        raise CheckpointError(f"{file.path}: {name} {attention_factor!r} is not supported")
    if "rope_freqs.weight" in file.tensors:
        factors = _rope_factors(file, "rope_freqs.weight", rotated)
        return fields | {"rope_type": "frequency_factors", "factors": factors}
    if is_longrope:
        fields |= {
            "rope_type": "longrope",
            "short_factor": _rope_factors(file, "rope_factors_short.weight", rotated),
            "long_factor": _rope_factors(file, "rope_factors_long.weight", rotated),
            "original_max_position_embeddings": _integer(file, "rope.scaling.original_context_length"),
        }
        return fields | ({} if attention_factor is None else {"attention_factor": attention_factor})
    if scaling == "linear":
        return fields | {"rope_type": "linear", "factor": factor}
    if scaling != "none":
        raise CheckpointError(f"{file.path}: rope.scaling.type {scaling!r} is not supported, only none and linear")
    return fields


def _rope_factors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}")
    if complaint := file.tensors[name].complaint((rotated // 2,)):
        raise CheckpointError(f"{file.path}: {name} {complaint}")
    return file.tensors[name].read().astype(np.float64).tolist()


def _gpt2_fields(file: GGUFFile) -> dict[str, Any]:
    return {
        "n_embd": _integer(file, "embedding_length"),
        "n_inner": _integer(file, "feed_forward_length"),
        "n_layer": _integer(file, "block_count"),
        "n_head": _integer(file, "attention.head_count"),
        "n_positions": _integer(file, "context_length"),
        "layer_norm_epsilon": _number(file, "attention.layer_norm_epsilon"),
    }


def _undo(file: GGUFFile, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """What makes of this tensor the one that the Hugging Face checkpoint had, if it was changed."""
    *_, module, leaf = name.split(".")
    match file.architecture, module:
        case "llama", "attn_q" | "attn_k":
            num_heads = _integer(file, "attention.head_count")
            num_kv_heads = _integer(file, "attention.head_count_kv", num_heads)
            return functools.partial(_to_halves, num_heads=num_heads if module == "attn_q" else num_kv_heads)
        case architecture, _ if architecture in GEMMAS and module.endswith("norm"):
            return _less_one
        case "gpt2", "attn_qkv" | "attn_output" | "ffn_up" | "ffn_down" if leaf == "weight":
            return np.transpose
    return None


def _to_halves(tensor: np.ndarray, *, num_heads: int) -> np.ndarray:
    """Rows of each head from (pair, half) to (half, pair)."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _less_one(gain: np.ndarray) -> np.ndarray:
    return gain.astype(np.float32) - np.float32(1)


ARCHITECTURES = {
    "gemma": _without_window,
    "gemma2": _gemma2_fields,
    "gemma3": _gemma3_fields,
    "gpt2": _gpt2_fields,
    "llama": _without_window,
    "phi3": _decoder_fields,
    "qwen2": _without_window,
    "qwen3": _without_window,
    "starcoder2": _starcoder2_fields,
}
"""What reads the fields of each, by llama.cpp's names, which are those of Hugging Face too; a Mistral is a llama."""
