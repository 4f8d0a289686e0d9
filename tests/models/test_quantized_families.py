"""A quantized checkpoint of each family, with the names that published ones have, computes what its values do."""

import json
import re

import jax
import msgspec
import numpy as np
import pytest
import stored_matrices as stored
from depths import quick_only
from golden_models import GOLDENS, ONE_OF_EACH, relative_error
from naive import naive_logits
from safetensors.numpy import load_file

from jaxserve.layers.params import path_name
from jaxserve.loading.expected_weights import expected_weights
from jaxserve.loading.huggingface import source_shapes
from jaxserve.loading.multimodal import text_name
from jaxserve.loading.weights import load_config, load_weights, open_weights, stored_specs
from jaxserve.models import get_family
from jaxserve.quantization.scheme import Scheme

FLOAT32 = np.dtype(np.float32)
FUSED = "fp8, experts in one"
PUBLISHED = "fp8 with static scales, experts in one"
"""The form of Mistral Small 4: one scale for a matrix, or for gate and up of an expert, and others for activations."""
IN_ONE = ("mistral4_b", "qwen3_5_moe", "gemma4_e", "llama4", "qwen3_vl_moe", "granitemoe_swa", "deepseek_v3")
"""Beginnings of names of goldens of families that transformers saves with a layer's experts in one tensor."""
NAMES = [path.name for path in ONE_OF_EACH]
CASES = quick_only(
    [(name, form) for name in NAMES for form in ("fp8", "int4", FUSED) if form != FUSED or name.startswith(IN_ONE)],
    *(("qwen3_next_biases", "fp8"), ("kimi_k2_one_group", "int4")),
)
CASES += [("mistral4_beyond_original", PUBLISHED)]
TOKENS = np.random.default_rng(0).integers(0, 30, 41).astype(np.int32)
BLOCK = (16, 64)
GROUP = 8
FLOATS = re.compile(
    r"embed|wte|wpe|lm_head|embed_out|output_layer|norm|conv|\.ln_|visual|vision|multi_modal|altup|laurel|per_layer"
    r"|(gate|wg|router|router\.layer|router\.proj|shared_expert_gate|in_proj_ba|in_proj_a|in_proj_b|b_proj)\.weight$"
)
"""What no package quantizes: embeddings, heads, routers, gates of one row, convolutions, towers."""


def fp8(values):
    """Return (tensors of blocks with scales that multiply, the values that they stand for)."""
    if values.ndim == 3:  # one scale for each output, as Granite's experts have them
        scales = np.abs(values).max(-1, keepdims=True) / 448
        codes = (values / scales).astype(stored.F8)
        return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * scales
    outputs, inputs = values.shape
    padded = np.pad(values, [(0, -size % block) for size, block in zip(values.shape, BLOCK, strict=True)])
    blocks = padded.reshape(padded.shape[0] // BLOCK[0], BLOCK[0], padded.shape[1] // BLOCK[1], BLOCK[1])
    scales = np.maximum(np.abs(blocks).max((1, 3)), 1e-6).astype(np.float32) / 448
    each = np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)[:outputs, :inputs]
    codes = (values / each).astype(stored.F8)
    return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32) * each


def fp8_by_tensor(values):
    """Return (tensors with one scale, which is the same in all matrices, the values that they stand for)."""
    scale = np.float32(0.01)
    codes = (values / scale).astype(stored.F8)
    tensors = {"weight": codes, "weight_scale_inv": np.full((1, 1), scale), "activation_scale": np.float32(0.5)}
    return tensors, codes.astype(np.float32) * scale


def int4(values):
    """Return (tensors of packed integers in groups, or with a scale for each output, the values)."""
    outputs, inputs = values.shape
    group = GROUP if inputs % GROUP == 0 else inputs
    groups = values.reshape(outputs, -1, group)
    scales = np.maximum(np.abs(groups).max(-1), 1e-6).astype(np.float32) / 7
    codes = np.clip(np.round(groups / scales[..., None]), -8, 7).reshape(outputs, inputs)
    tensors = {
        "weight_packed": stored.pack(codes.astype(np.int64) + 8, 4, axis=1),
        "weight_scale": scales,
        "weight_shape": np.array([outputs, inputs], np.int64),
    }
    return tensors, codes.astype(np.float32) * np.repeat(scales, group, 1)


def config_of(make, floats, odd, skipped):
    """Return what config.json says of these modules that are floats, and of those whose inputs are in no groups."""
    if make is fp8_by_tensor:
        return {"quant_method": "fp8", "activation_scheme": "static", skipped: floats}
    if make is fp8:
        return {"quant_method": "fp8", "weight_block_size": list(BLOCK), skipped: floats}
    weights = {"num_bits": 4, "type": "int", "symmetric": True}
    groups = {
        "group_0": {"targets": odd or ["none"], "weights": weights | {"strategy": "channel"}},
        "group_1": {"targets": ["Linear"], "weights": weights | {"strategy": "group", "group_size": GROUP}},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": floats,
    }


def has_inputs_first(part, tensor, fields):
    """Return whether a tensor of all experts has inputs before outputs."""
    return tensor.shape[1 if part == "gate_up_proj" else 2] == fields["hidden_size"]


def matrices(name, tensor, fields, make):
    """Return the matrices of a tensor by the names of their modules: one, or those of each expert."""
    model_type = fields["model_type"]
    if FLOATS.search(name):
        return {}
    if tensor.ndim == 2 and name.endswith(".weight"):
        return {name.removesuffix(".weight"): tensor.T if model_type == "gpt2" else tensor}
    if tensor.ndim == 3 and name.endswith("_linear.weight") and make is fp8:
        return {name.removesuffix(".weight"): tensor}
    base, _, part = name.rpartition(".")
    if tensor.ndim != 3 or not base.endswith(".experts") or model_type == "gpt_oss":
        return {}
    tensor = tensor.swapaxes(1, 2) if has_inputs_first(part, tensor, fields) else tensor
    names = ["gate_proj", "up_proj"] if part == "gate_up_proj" else ["down_proj"]
    parts = zip(names, np.split(tensor, len(names), axis=1), strict=True)
    return {f"{base}.{index}.{own}": matrix for own, each in parts for index, matrix in enumerate(each)}


def in_one(quantized, *, turned, is_shared):
    """Return tensors in FP8 with those of all experts as one, `turned` if inputs come first; `is_shared`: gate and up
    have a scale in common.
    """
    found = {}
    for name, tensor in quantized.items():
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.(?:weight)?(_?\w*)", name)
        if match is None:
            found[name] = tensor
            continue
        part = "down_proj" if match[2] == "down" else "gate_up_proj"
        leaf = f"_{match[3]}".replace("__", "_") if match[3] else ""
        found.setdefault(f"{match[1]}.{part}{leaf}", {}).setdefault(match[2], []).append(tensor)
    joined = {
        name: np.concatenate(
            [*map(np.stack, each.values())][: 1 if is_shared and "_scale" in name else 2],
            -1 if "activation" in name else 1,
        )
        for name, each in found.items()
        if isinstance(each, dict)
    }
    return found | {name: each.swapaxes(1, 2) if turned else each for name, each in joined.items()}


def write(golden, folder, make, *, is_fused=False):
    """Write a golden with its matrices quantized, and with their values; return the modules that are codes."""
    tensors = {name: each for path in golden.glob("*.safetensors") for name, each in load_file(path).items()}
    fields = json.loads((golden / "config.json").read_text())
    text = fields.get("text_config", fields)
    turned = [
        has_inputs_first(name[-12:], each, text) for name, each in tensors.items() if name.endswith("gate_up_proj")
    ]
    quantized, values, modules, floats, odd = {}, {}, [], [], []
    for name, tensor in tensors.items():
        tensor = tensor.astype(np.float32)
        found = matrices(name, tensor, text, make)
        if not found:
            quantized[name] = values[name] = tensor
            floats += [name.removesuffix(".weight")] * (tensor.ndim > 1)
        for module, matrix in found.items():
            parts, exact = make(matrix)
            quantized |= {f"{module}.{leaf}": part for leaf, part in parts.items()}
            values[f"{module}.weight"] = exact.T if text["model_type"] == "gpt2" else exact
            modules.append(module)
            odd += [f"re:.*{re.escape(re.sub('^model.|language_model.', '', module))}$"] * (
                matrix.shape[-1] % GROUP != 0
            )
    if is_fused:
        quantized = in_one(quantized, turned=any(turned), is_shared=make is fp8_by_tensor)
    config = {
        "quantization_config": config_of(make, floats, odd, "ignored_layers" if is_fused else "modules_to_not_convert")
    }
    for path, given, says in ((folder / "q", quantized, config), (folder / "f", values, {})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(fields | says))
        stored.save(given, path / "model.safetensors")
    return modules


def schemes(weights):
    """Return the scheme of each matrix that is held as codes, whatever the type of its scales."""
    found = jax.tree_util.tree_leaves_with_path(weights)
    held = {path_name(at): each.stored_scheme() for at, each in found if each.spec.num_inputs}
    return {
        name: msgspec.structs.replace(each, scale_dtype="float32")
        for name, each in held.items()
        if isinstance(each, Scheme)
    }


def loaded(path, *, is_held):
    """Return (params, config, family, mesh), with codes of a checkpoint or with its values."""
    fields = load_config(path)
    family = get_family(fields)
    config = family.config(fields)
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    specs = stored_specs(path, family.param_specs(config), dtype=FLOAT32, quantization=None, dequantizes=not is_held)
    return load_weights(path, specs, dtype=FLOAT32, mesh=mesh, progress=False), config, family, mesh


def logits(params, config, family, mesh):
    with jax.set_mesh(mesh):
        return np.asarray(naive_logits(params, config, family, TOKENS))


@pytest.mark.parametrize(("golden", "form"), CASES, ids=str)
def test_a_quantized_checkpoint(golden, form, tmp_path):
    """Its logits are those of its values, whether it is held as codes or not, and config.json tells what is codes."""
    path = GOLDENS[0].with_name(golden)
    make = {"int4": int4, PUBLISHED: fp8_by_tensor}.get(form, fp8)
    modules = write(path, tmp_path, make, is_fused=form in (FUSED, PUBLISHED))
    want = logits(*loaded(tmp_path / "f", is_held=False))
    _, config, family, _ = held = loaded(tmp_path / "q", is_held=True)
    assert relative_error(logits(*held), want) < 2e-5
    specs = family.param_specs(config)
    assert {f"{text_name(module)}.weight" for module in modules} <= source_shapes(specs).keys()
    with open_weights(tmp_path / "q", specs) as weights:
        of_files = schemes(weights)
    assert of_files or golden.startswith("gpt2")  # whose codes would have inputs before outputs
    (tmp_path / "q" / "model.safetensors").unlink()
    assert schemes(expected_weights(tmp_path / "q", specs)) == of_files
