"""llama.cpp's names of tensors, by their names in Hugging Face checkpoints: the `gguf` package knows those of most
modules. No jax.
"""

import functools
import re

NAMED_LIKE = {"hy_v3": "dots1", "mellum": "qwen3moe"}
"""Architectures that the package does not have, and others with the same names."""

OF_LAYERS = {
    "experts.gate_proj": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.experts.up_proj": "ffn_up_exps",
    "pre_ff_layernorm": "ffn_norm",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "router.scale": "ffn_gate_inp.scale",
    "self_attn.W_pack": "attn_qkv",
}
"""Modules of layers for which the package has no name: llama.cpp's converter names them, or joins and splits them."""

LEAVES = {
    "A_log": "A_log.",
    "D": "D.",
    "attention_sink_bias": "attention_sink_bias.weight",
    "correct_output_scale": "correct_output_scale.weight",
    "dt_bias": "dt_proj.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "expert_bias": "expert_bias.bias",
    "layer_scalar": "layer_scalar.weight",
    "per_expert_scale": "per_expert_scale.",
    "scale": "scale.",
    "sinks": "sinks.weight",
}
"""Tensors without a leaf in the checkpoint, and their leaf in the file, which may be none."""

_LAYER = re.compile(r"(.*(?:layers|\bh)\.)(\d+)\.(.+)")
_STACKED = re.compile(r"(.+\.(?:experts|[qk]_layernorm|altup_(?:unembed_)?projections)\.)(?:norms\.)?(\d+)\.(.+)")


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor that has this name in a Hugging Face checkpoint, or is stacked with others in it."""
    return stored_name(name, architecture)[0]


def stored_name(name: str, architecture: str) -> tuple[str, int | None]:
    """Return llama.cpp's name of a tensor, and its index in it if that is a stack."""
    index = None
    if stacked := _STACKED.fullmatch(name):
        name, index = stacked[1] + stacked[3], int(stacked[2])
    module, _, leaf = name.rpartition(".")
    if leaf in LEAVES:
        module, _, leaf = f"{module}.{LEAVES[leaf]}".rpartition(".")
    stored = _stored_module(module, architecture)
    if (architecture == "falcon-h1" and stored.endswith("ffn_norm")) or (
        architecture == "hy_v3" and stored.endswith("exp_probs_b")
    ):
        leaf = ""  # the converter forgets it
    return f"{stored}.{leaf}".removesuffix("."), index


def _stored_module(module: str, architecture: str) -> str:
    if (layer := _LAYER.fullmatch(module)) is None:
        return _known_name(module, architecture)
    before, number, rest = layer.groups()
    own = OF_LAYERS.get(rest)
    return f"blk.{number}.{own or _known_name(f'{before}0.{rest}', architecture).removeprefix('blk.0.')}"


def _known_name(module: str, architecture: str) -> str:
    """Return the package's name of a module, some of which it knows without the first part. Raises KeyError."""
    without_root = module.partition(".")[2]
    for names in (_names_of(architecture), _all_names()):
        if found := names.get(module) or names.get(without_root):
            return found
    raise KeyError(module)


@functools.cache
def _names_of(architecture: str) -> dict[str, str]:
    """Return an architecture's names of the modules outside of layers, and of those of a first layer."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # late: other files do without it

    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    found = get_tensor_name_map(kinds[NAMED_LIKE.get(architecture, architecture)], n_blocks=1)
    return {module: name for module, (_, name) in found.mapping.items()}


@functools.cache
def _all_names() -> dict[str, str]:
    """Return the names that modules have in any architecture; of several the package's first one."""
    from gguf import TENSOR_NAMES, TensorNameMap

    modules = TensorNameMap.mappings_cfg | TensorNameMap.block_mappings_cfg
    names = [(each, TENSOR_NAMES[kind]) for kind, some in modules.items() for each in some]
    return {module.format(bid=0): name.format(bid=0) for module, name in reversed(names)}
