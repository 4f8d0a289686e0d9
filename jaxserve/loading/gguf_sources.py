"""Map the tensors of a Hugging Face checkpoint to those of a GGUF file.

llama.cpp's converter renames the tensors of a Hugging Face checkpoint, and changes some, which is undone here: those of
q and k in Llama and Granite are reordered for rotations of neighbours, Gemmas' gains have the 1 added, GPT-2's matrices
are transposed, queries of Falcon, BLOOM and GPT-NeoX come before all keys, experts and norms of single heads are
stacked. Some tensors are whole in the file and split in the checkpoint, or vice versa.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import numpy as np

from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_keys import get, positive_integer

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
    "model.final_layernorm": "output_norm",
    "self_attn.dense": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.out_proj": "attn_output",
    "mlp.fc_in": "ffn_up",
    "mlp.fc_out": "ffn_down",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.e_score_correction": "exp_probs_b",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
}
"""Modules of Hugging Face checkpoints, those of a layer without its prefix, and llama.cpp's names for them."""

SANDWICH_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names in architectures with norms on both sides of a block, or after it."""

SANDWICHES = ("gemma2", "gemma3", "gpt-oss", "olmo2", "seed_oss")
"""Architectures that have some of these names; GPT-OSS and Seed-OSS have them though their norms are before blocks."""

GEMMAS = ("gemma", "gemma2", "gemma3")

LEAVES = {"e_score_correction_bias": "e_score_correction.bias", "sinks": "sinks.weight"}
"""Tensors without a leaf in the checkpoint, and their leaf in the file."""

_LAYER = re.compile(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.+)")
_PROJECTION = re.compile(r"(.+\.attn_)([qkv])(\..+)")
_EXPERTS_OF_GPT_OSS = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?")
_STACKED = re.compile(r"(.+\.(?:experts|[qk]_layernorm)\.)(?:norms\.)?(\d+)\.(.+)")


@dataclasses.dataclass(frozen=True)
class Source:
    """How one tensor of the checkpoint is stored in the file.

    Attributes:
        shapes: the tensors of the file that it is composed of, and their shapes.
        make: composes it of these, in their order.
        arrange: reorders any values of these tensors' rows, [*rows, values of a row], into those of the tensor's rows,
            with outputs before inputs; None if more than rows are moved.
    """

    shapes: dict[str, tuple[int, ...]]
    make: Callable[..., np.ndarray]
    arrange: Callable[..., np.ndarray] | None = None


def source_of(file: GGUFFile, name: str, shape: tuple[int, ...]) -> Source:
    """Return where the checkpoint's tensor of this name and shape is in the file."""
    if file.architecture == "gpt-oss" and (experts := _EXPERTS_OF_GPT_OSS.fullmatch(name)):
        return _experts_of_gpt_oss(experts[1], experts[2], shape, leaf="bias" if experts[3] else "weight")
    found, index = _stored_name(name, file.architecture)
    if found.endswith(".attn_kv_b.weight") and found not in file.tensors and get(file, "attention.value_length_mla"):
        return _split_latent_heads(file, found, shape)
    if file.architecture == "chatglm" and (projection := _PROJECTION.fullmatch(found)):
        fused = f"{projection[1]}qkv{projection[3]}"
        if fused in file.tensors:
            return _rows_of_fused(file, fused, projection[2], shape)
    if index is not None:
        return Source({found: (index + 1, *shape)}, lambda stack: stack[index], lambda stack: stack[index])
    undo = _undo(file, found)
    stored = _stored_shape(file, found, shape, undo)

    def make(tensor: np.ndarray) -> np.ndarray:
        return undo(tensor) if undo else tensor

    moves_rows = undo is not np.transpose and undo is not _less_one
    return Source({found: stored}, lambda tensor: make(tensor).reshape(shape), make if moves_rows else None)


def _experts_of_gpt_oss(experts: str, part: str, shape: tuple[int, ...], *, leaf: str) -> Source:
    """Return matrices with outputs before inputs, gate and up apart; the checkpoint has inputs first, gate and up
    interleaved.

    The memory layout of the result is that of the checkpoint's MXFP4, outputs first, so that only rows are moved.
    """
    X, *inputs, outputs = shape
    parts = ("gate", "up") if part == "gate_up" else ("down",)
    names = [gguf_name(f"{experts}.{part}_proj.{leaf}", "gpt-oss") for part in parts]

    def arrange(*tensors: np.ndarray) -> np.ndarray:
        if len(tensors) == 1:
            return tensors[0]
        return np.stack(tensors, axis=2).reshape(X, outputs, *tensors[0].shape[2:])

    return Source(
        dict.fromkeys(names, (X, outputs // len(parts), *inputs)),
        lambda *tensors: arrange(*tensors).swapaxes(1, -1),
        arrange,
    )


def _split_latent_heads(file: GGUFFile, found: str, shape: tuple[int, ...]) -> Source:
    """Return the projection [H * (N + V), R] from latents to keys and values, stored as [H, R, N] and [H, V, R].

    Newer files split it; older ones have it whole.
    """
    num_heads, latent_size = positive_integer(file, "attention.head_count"), shape[1]
    value_size = positive_integer(file, "attention.value_length_mla")
    key_size = shape[0] // num_heads - value_size

    def make(k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return np.concatenate([k.swapaxes(1, 2), v], axis=1).reshape(shape)

    k, v = (found.replace("attn_kv_b", name) for name in ("attn_k_b", "attn_v_b"))
    return Source({k: (num_heads, latent_size, key_size), v: (num_heads, value_size, latent_size)}, make)


def _rows_of_fused(file: GGUFFile, fused: str, part: str, shape: tuple[int, ...]) -> Source:
    """Return the rows of q, k or v, of a tensor that has those of q first, then k's and v's."""
    num_heads, num_kv_heads = _num_heads(file)
    rows = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    unit = shape[0] // rows[part]
    first = unit * {"q": 0, "k": num_heads, "v": num_heads + num_kv_heads}[part]

    def rows_of(whole: np.ndarray) -> np.ndarray:
        return whole[first : first + shape[0]]

    return Source({fused: (unit * sum(rows.values()), *shape[1:])}, rows_of, rows_of)


def _stored_shape(
    file: GGUFFile, name: str, shape: tuple[int, ...], undo: Callable[[np.ndarray], np.ndarray] | None
) -> tuple[int, ...]:
    """Return the shape in the file of a tensor that has this shape in the checkpoint."""
    if name in file.tensors and shape[0] == 1 and file.tensors[name].shape == shape[1:]:
        return shape[1:]  # some converters drop axes of 1
    return shape[::-1] if undo is np.transpose else shape


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor that has this name in a Hugging Face checkpoint, or is stacked with others in it."""
    return _stored_name(name, architecture)[0]


def _stored_name(name: str, architecture: str) -> tuple[str, int | None]:
    """Return llama.cpp's name of a tensor, and its index in it if that is a stack."""
    index = None
    if stacked := _STACKED.fullmatch(name):
        name, index = stacked[1] + stacked[3], int(stacked[2])
    names = NAMES | SANDWICH_NAMES if architecture in SANDWICHES else NAMES
    module, _, leaf = name.rpartition(".")
    if leaf in LEAVES:
        module, _, leaf = f"{module}.{LEAVES[leaf]}".rpartition(".")
    if layer := _LAYER.fullmatch(module):
        return f"blk.{layer[1]}.{names[layer[2]]}.{leaf}", index
    return f"{names[module]}.{leaf}", index


def _undo(file: GGUFFile, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function that undoes the converter's change of this tensor, if it was changed."""
    *_, module, leaf = name.split(".")
    num_heads, num_kv_heads = _num_heads(file)
    match file.architecture, module:
        case "falcon" | "bloom" | "gptneox", "attn_qkv":
            return functools.partial(_by_kv_head, num_heads=num_heads, num_kv_heads=num_kv_heads)
        case "arcee" | "llama" | "granite", "attn_q" | "attn_k":
            return functools.partial(_to_halves, num_heads=num_heads if module == "attn_q" else num_kv_heads)
        case architecture, _ if architecture in GEMMAS and module.endswith("norm"):
            return _less_one
        case "gpt2", "attn_qkv" | "attn_output" | "ffn_up" | "ffn_down" if leaf == "weight":
            return np.transpose
    return None


def _num_heads(file: GGUFFile) -> tuple[int, int]:
    """Return the number of query heads, and of KV heads."""
    num_heads = positive_integer(file, "attention.head_count")
    return num_heads, positive_integer(file, "attention.head_count_kv", num_heads)


def _to_halves(tensor: np.ndarray, *, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from (pair, half) to (half, pair)."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _by_kv_head(tensor: np.ndarray, *, num_heads: int, num_kv_heads: int) -> np.ndarray:
    """Reorder the rows of all queries, all keys and all values to each KV head's queries, key and value."""
    heads = tensor.reshape(num_heads + 2 * num_kv_heads, -1, *tensor.shape[1:])
    q, k, v = np.split(heads, (num_heads, num_heads + num_kv_heads))
    grouped = q.reshape(num_kv_heads, -1, *q.shape[1:])
    return np.concatenate([grouped, k[:, None], v[:, None]], axis=1).reshape(tensor.shape)


def _less_one(gain: np.ndarray) -> np.ndarray:
    return gain.astype(np.float32) - np.float32(1)
