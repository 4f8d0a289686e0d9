"""Map the tensors of a Hugging Face checkpoint to those of a GGUF file.

llama.cpp's converter renames the tensors of a Hugging Face checkpoint, and changes some, which is undone here: those of
q and k in Llama and Granite are reordered for rotations of neighbours, those of GLM-4V for rotations of halves, gains
of Gemma, Nemotron 4 and Qwen 3 Next have the 1 added, GPT-2's matrices are transposed, queries of Falcon, BLOOM and
GPT-NeoX come before all keys, value heads of Qwen 3.5 are in another order, A_log is stored as -exp(A_log), experts and
norms of single heads are stacked. Some tensors are whole in the file and split in the checkpoint, or vice versa.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_keys import get, head_counts, positive_integer
from jaxserve.loading.gguf_names import gguf_name, stored_name

GAINS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
"""Architectures whose files have the gains of norms with the 1 added; norms of states have no 1 in the checkpoint."""

PAIRS_OF_ROWS = (
    *("arcee", "baichuan", "bailingmoe", "granite", "granitehybrid", "granitemoe", "llama", "mistral3"),
    *("nemotron_h", "nemotron_h_moe", "olmo", "smollm3"),
)
"""Architectures whose rows of q and k are reordered for rotations of neighbours."""

TILED_HEADS = ("qwen35", "qwen35moe")
"""Architectures with value heads of states in another order: the first of each key head, the second of each, ..."""

_PROJECTION = re.compile(r"(.+\.attn_)([qkv])(\..+)")
_ACTIVATION = re.compile(r"model\.layers\.(\d+)\.mlp\.act_fn\.(\w+)")
_EXPERTS_OF_GPT_OSS = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?")


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
    if activation := _ACTIVATION.fullmatch(name):
        return _constant(file, activation[2], int(activation[1]), shape)
    if name.endswith("input_linear.weight"):
        return _gates_and_ups(file, name, shape)
    found, index = stored_name(name, file.architecture)
    if name.endswith("in_proj_qkvz.weight") and found not in file.tensors:  # older files have it whole
        return _qkvz(file, name, shape)
    if not get(file, "expert_count"):
        found = found.replace("_shexp.", ".")
    if found.endswith(".attn_kv_b.weight") and found not in file.tensors and get(file, "attention.value_length_mla"):
        return _split_latent_heads(file, found, shape)
    undo, keeps_inputs = _undo(file, found)
    if found not in file.tensors:
        projection = _PROJECTION.fullmatch(found)
        if projection and (fused := f"{projection[1]}qkv{projection[3]}") in file.tensors:
            return _rows_of_fused(file, fused, projection[2], shape, undo)
        if found.removesuffix(".weight").removesuffix(".bias").endswith(".attn_qkv"):
            return _fused_of_parts(file, found, shape)
        if index is not None and (fused := re.sub("_(gate|up)_exps", "_gate_up_exps", found)) in file.tensors:
            rows = slice(None, shape[0]) if "_gate_exps" in found else slice(shape[0], None)
            whole = (index + 1, 2 * shape[0], *shape[1:])
            return Source({fused: whole}, lambda stack: stack[index, rows], lambda stack: stack[index, rows])
    if index is not None:
        return Source({found: (index + 1, *shape)}, lambda stack: stack[index], lambda stack: stack[index])
    stored = _stored_shape(file, found, shape, undo)

    def make(tensor: np.ndarray) -> np.ndarray:
        return undo(tensor) if undo else tensor

    return Source({found: stored}, lambda tensor: make(tensor).reshape(shape), make if keeps_inputs else None)


def _constant(file: GGUFFile, name: str, layer: int, shape: tuple[int, ...]) -> Source:
    """Return a parameter of a layer's activation, which is metadata in the file."""
    values = file.require(f"xielu.{name}", list)
    if len(values) <= layer:
        raise CheckpointError(f"{file.path}: xielu.{name} has {len(values)} numbers, none for layer {layer}")
    return Source({}, lambda: np.full(shape, values[layer], np.float32))


def _qkvz(file: GGUFFile, name: str, shape: tuple[int, ...]) -> Source:
    """Return the rows of each key head together: its q, k, values and gates; the file has all of one kind together."""
    num_keys, num_values = positive_integer(file, "ssm.group_count"), positive_integer(file, "ssm.inner_size")
    key_size = positive_integer(file, "ssm.state_size")
    prefix = name.removesuffix("in_proj_qkvz.weight")
    qkv, z = (gguf_name(f"{prefix}{part}.weight", file.architecture) for part in ("in_proj_qkv", "in_proj_z"))

    def arrange(qkv: np.ndarray, z: np.ndarray) -> np.ndarray:
        q, k, v = np.split(qkv, (num_keys * key_size, 2 * num_keys * key_size))
        heads = [part.reshape(num_keys, -1, *part.shape[1:]) for part in (q, k, v, z)]
        return np.concatenate(heads, axis=1).reshape(-1, *qkv.shape[1:])

    rows = 2 * num_keys * key_size + num_values
    return Source({qkv: (rows, *shape[1:]), z: (num_values, *shape[1:])}, arrange, arrange)


def _gates_and_ups(file: GGUFFile, name: str, shape: tuple[int, ...]) -> Source:
    """Return gates before ups, of all experts or of one that is shared; the file has them apart."""
    has_experts, prefix = bool(get(file, "expert_count")), name.removesuffix("input_linear.weight")
    kind = "_exps" if len(shape) == 3 else "_shexp" if has_experts else ""
    down = gguf_name(f"{prefix}output_linear.weight", file.architecture)
    block = down.split(".ffn_")[0]
    half = (*shape[:-2], shape[-2] // 2, shape[-1])

    def arrange(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.concatenate([gate, up], axis=-2)

    return Source({f"{block}.ffn_{part}{kind}.weight": half for part in ("gate", "up")}, arrange, arrange)


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


def _rows_of_fused(
    file: GGUFFile, fused: str, part: str, shape: tuple[int, ...], undo: Callable[..., np.ndarray] | None
) -> Source:
    """Return the rows of q, k or v, of a tensor that has those of q first, then k's and v's."""
    num_heads, num_kv_heads = head_counts(file, layer=int(fused.split(".")[1]))
    unit = shape[0] // (num_heads if part == "q" else num_kv_heads)
    lengths = [get(file, f"attention.{each}_length") for each in ("key", "value")]
    key_size, value_size = (unit, unit) if None in lengths or lengths[0] == lengths[1] else lengths
    sizes = {"q": num_heads * key_size, "k": num_kv_heads * key_size, "v": num_kv_heads * value_size}
    first = {"q": 0, "k": sizes["q"], "v": sizes["q"] + sizes["k"]}[part]

    def rows_of(whole: np.ndarray) -> np.ndarray:
        rows = whole[first : first + shape[0]]
        return undo(rows) if undo else rows

    return Source({fused: (sum(sizes.values()), *shape[1:])}, rows_of, rows_of)


def _fused_of_parts(file: GGUFFile, fused: str, shape: tuple[int, ...]) -> Source:
    """Return the rows of q, then of k and v, which the file has apart."""
    num_heads, num_kv_heads = head_counts(file)
    unit = shape[0] // (num_heads + 2 * num_kv_heads)
    counts = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
    names = {fused.replace("attn_qkv", f"attn_{part}"): (unit * count, *shape[1:]) for part, count in counts.items()}
    undone = [_undo(file, name)[0] for name in names]

    def arrange(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([undo(part) if undo else part for undo, part in zip(undone, parts, strict=True)])

    return Source(names, arrange, arrange)


def _stored_shape(
    file: GGUFFile, name: str, shape: tuple[int, ...], undo: Callable[[np.ndarray], np.ndarray] | None
) -> tuple[int, ...]:
    """Return the shape in the file of a tensor that has this shape in the checkpoint."""
    if name in file.tensors:
        found = file.tensors[name].shape
        if name.endswith("ssm_norm.weight"):  # by group
            return (*found[:-1], shape[0] // math.prod(found[:-1]))
        if [size for size in found if size > 1] == [size for size in shape if size > 1]:
            return found  # converters drop and add axes of 1
    return shape[::-1] if undo is np.transpose else shape


def _undo(file: GGUFFile, name: str) -> tuple[Callable[..., np.ndarray] | None, bool]:
    """Return the function that undoes the converter's change of this tensor, None if it was not changed, and whether
    rows only are moved.
    """
    is_weight, module = name.endswith(".weight"), name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    match file.architecture, module:
        case "falcon" | "bloom" | "gptneox", "attn_qkv":
            num_heads, num_kv_heads = head_counts(file)
            return functools.partial(_by_kv_head, num_heads=num_heads, num_kv_heads=num_kv_heads), True
        case architecture, "attn_qkv" if architecture in PAIRS_OF_ROWS:
            return functools.partial(_each_to_halves, head_counts=head_counts(file)), True
        case architecture, "attn_q" | "attn_k" if architecture in PAIRS_OF_ROWS:
            return functools.partial(_to_halves, num_heads=head_counts(file)[module == "attn_k"]), True
        case "glm4", "attn_q" | "attn_k" if any(get(file, "rope.dimension_sections", ())):
            of_heads = {"num_heads": head_counts(file)[module == "attn_k"]}
            return functools.partial(
                _to_pairs, **of_heads, rotated=positive_integer(file, "rope.dimension_count")
            ), True
        case architecture, _ if is_weight and architecture in GAINS_PLUS_ONE and module.endswith("norm"):
            return (None, True) if module == "ssm_norm" else (_less_one, False)
        case "gpt2", "attn_qkv" | "attn_output" | "ffn_up" | "ffn_down" if is_weight:
            return np.transpose, False
        case architecture, _ if architecture in TILED_HEADS and module in _NUM_PARTS:
            return functools.partial(_group_heads, file=file, module=module), module != "ssm_out"
        case _, "ssm_a":
            return _log_of_negative, False
    return None, True


_NUM_PARTS = {"attn_qkv": 3, "ssm_conv1d": 3, "attn_gate": 1, "ssm_beta": 1, "ssm_alpha": 1, "ssm_dt": 1} | {
    "ssm_a": 1,
    "ssm_out": 1,
}
"""Tensors with rows or inputs for each value head, and of how many parts those are the last."""


def _group_heads(tensor: np.ndarray, *, file: GGUFFile, module: str) -> np.ndarray:
    """Reorder what belongs to each value head so that those of a key head are together."""
    num_key_heads, num_heads = positive_integer(file, "ssm.group_count"), positive_integer(file, "ssm.time_step_rank")
    if module == "ssm_out":
        return _group_heads(tensor.swapaxes(0, -1), file=file, module="").swapaxes(0, -1)
    first = 0 if _NUM_PARTS.get(module, 1) == 1 else 2 * num_key_heads * positive_integer(file, "ssm.state_size")
    values = tensor[first:]
    tiled = values.reshape(num_heads // num_key_heads, num_key_heads, -1, *values.shape[1:])
    grouped = np.concatenate([tensor[:first], tiled.swapaxes(0, 1).reshape(values.shape)])
    return _log_of_negative(grouped) if module == "ssm_a" else grouped


def _log_of_negative(rates: np.ndarray) -> np.ndarray:
    return np.log(-rates)


def _to_halves(tensor: np.ndarray, *, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from (pair, half) to (half, pair)."""
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _each_to_halves(tensor: np.ndarray, *, head_counts: tuple[int, int]) -> np.ndarray:
    """Reorder the rows of q and of k, which come before those of v, as `_to_halves` does."""
    num_heads, num_kv_heads = head_counts
    heads = tensor.reshape(num_heads + 2 * num_kv_heads, -1, *tensor.shape[1:])
    rotated = heads[: num_heads + num_kv_heads]
    turned = _to_halves(rotated.reshape(-1, *tensor.shape[1:]), num_heads=len(rotated)).reshape(rotated.shape)
    return np.concatenate([turned, heads[len(rotated) :]]).reshape(tensor.shape)


def _to_pairs(tensor: np.ndarray, *, num_heads: int, rotated: int) -> np.ndarray:
    """Reorder the first rows of each head, as many as are rotated, from (half, pair) to (pair, half)."""
    heads = tensor.reshape(num_heads, -1, *tensor.shape[1:])
    halves = heads[:, :rotated].reshape(num_heads, 2, -1, *tensor.shape[1:])
    pairs = halves.swapaxes(1, 2).reshape(num_heads, rotated, *tensor.shape[1:])
    return np.concatenate([pairs, heads[:, rotated:]], axis=1).reshape(tensor.shape)


def _by_kv_head(tensor: np.ndarray, *, num_heads: int, num_kv_heads: int) -> np.ndarray:
    """Reorder the rows of all queries, all keys and all values to each KV head's queries, key and value."""
    heads = tensor.reshape(num_heads + 2 * num_kv_heads, -1, *tensor.shape[1:])
    q, k, v = np.split(heads, (num_heads, num_heads + num_kv_heads))
    grouped = q.reshape(num_kv_heads, -1, *q.shape[1:])
    return np.concatenate([grouped, k[:, None], v[:, None]], axis=1).reshape(tensor.shape)


def _less_one(gain: np.ndarray) -> np.ndarray:
    return gain.astype(np.float32) - np.float32(1)
