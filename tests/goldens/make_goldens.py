"""Tiny random models of every family, and what transformers computes with them: the goldens of the parity tests.

Runs in a Python with torch (see make.sh), not in jaxserve's. Each golden is a directory with config.json, the names and
shapes of the tensors as save_pretrained writes them (weights.json, see golden_weights.py), and golden.npz: token_ids
[T], float32 logits [P, V] at POSITIONS, and the greedy continuation of the first ones. The seed draws dimensions,
weights and tokens.
"""

import argparse
import json
import pathlib
import re
import shutil
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers
from cases import CASES, FAMILIES, FIELD_NAMES, HAVE_HEAD_DIM, HAVE_NO_KV_HEADS, MXFP4, NUMBERS, ROPES, SHARDED
from golden_weights import (
    POSITIONS,
    PROMPT_LENGTH,
    SEQUENCE_LENGTH,
    WEIGHTS,
    declared_as_json,
    read_declared,
    write_weights,
)
from transformers import CONFIG_MAPPING
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

NUM_GREEDY = 10
MIN_MARGIN = 1e-3  # of the largest logit, between the best two: else rounding could decide a greedy token


def draw_config(family, heads, extras, whole, rng):
    """Return a config of two layers whose sizes are multiples of nothing in particular. `whole` has the fields beside
    a text's config, None if there are none.
    """
    num_heads, num_kv_heads, head_dim = heads
    # transformers insists that hidden_size is a multiple of the heads; head_dim need not be the quotient.
    hidden_size = num_heads * (int(rng.integers(5, 12)) if family in HAVE_HEAD_DIM else head_dim)
    fields = {
        "vocab_size": int(rng.integers(67, 131)),
        "hidden_size": hidden_size,
        "intermediate_size": int(rng.integers(30, 60)),
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5, 1e-2])),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    if whole is None:
        fields |= implementations | {"tie_word_embeddings": False}
    if family in HAVE_HEAD_DIM:
        fields["head_dim"] = head_dim
    if family not in HAVE_NO_KV_HEADS:
        fields["num_key_value_heads"] = num_kv_heads
    names = FIELD_NAMES.get(family, {})
    fields = {names.get(name, name): value for name, value in fields.items()} | extras
    if whole is not None:
        return FAMILIES[family][0](text_config=fields, **whole, **implementations)
    return FAMILIES[family][0](**fields)


def declare_mxfp4(tensors):
    """Put the names of blocks and scales in place of the experts that they encode, transposed as files have them."""
    stored = {}
    for name, (dtype, shape) in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, num_inputs, num_outputs = shape
            grid = [num_experts, num_outputs, num_inputs // 32]
            stored |= {f"{name}_blocks": ["U8", [*grid, 16]], f"{name}_scales": ["U8", grid]}
        else:
            stored[name] = [dtype, shape]
    return stored


def decode_mxfp4(path):
    """Put the values of blocks and scales in place of them in a file, for transformers without its kernels."""
    tensors = safetensors.torch.load_file(path)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def as_published(tensors):
    """Return tensors under the names of Kimi Linear's own files, in which a block without experts is called "mlp":
    transformers reads it, and writes another name.
    """
    return {re.sub(r"block_sparse_moe(?=\.(gate|up|down)_proj)", "mlp", name): each for name, each in tensors.items()}


def write_golden(model, golden, *, seed, sharded=False, mxfp4=False):
    """Write a model's config, and the names and shapes of its tensors as files have them."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model.bfloat16().save_pretrained(folder, max_shard_size="30KB" if sharded else "1GB")
        declared = {file: as_published(tensors) for file, tensors in read_declared(folder).items()}
        fields = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
    del fields["transformers_version"]  # a newer one alone changes no golden
    if mxfp4:
        declared = {file: declare_mxfp4(tensors) for file, tensors in declared.items()}
        fields["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn"],
        }
    golden.mkdir()
    (golden / WEIGHTS).write_text(declared_as_json(declared, seed))
    (golden / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def name_family(path, family):
    """Write the model type of a family that transformers has under another name only, as Kimi K2."""
    fields = json.loads(path.read_text())
    if fields["model_type"] != family and family not in CONFIG_MAPPING:
        path.write_text(json.dumps(fields | {"model_type": family}, indent=2, sort_keys=True) + "\n")


def load(golden, model_class, attention="eager"):
    """Return transformers' model of a golden, with its weights in float32."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_weights(golden, folder)
        fields = json.loads((golden / "config.json").read_text())
        if fields.pop("quantization_config", None):
            decode_mxfp4(folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(fields))
        model, info = model_class.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=attention,
            experts_implementation="eager",
            output_loading_info=True,
        )
    if wrong := [names for kind, names in info.items() if names]:
        raise RuntimeError(f"{golden.name}: transformers does not load what it has written: {wrong}")
    return model.eval()


@torch.no_grad()
def compute_logits(model, token_ids):
    return model(torch.from_numpy(token_ids)[None], use_cache=False).logits[0].float().numpy()


def continue_greedily(model, prompt):
    """Greedy tokens after `prompt`, and the smallest margin, relative to the largest logit, by which one was chosen."""
    token_ids, margin = prompt, np.inf
    for _ in range(NUM_GREEDY):
        logits = compute_logits(model, token_ids)
        second, first = np.sort(logits[-1])[-2:]
        margin = min(margin, (first - second) / np.abs(logits).max())
        token_ids = np.append(token_ids, logits[-1].argmax())
    return token_ids[len(prompt) :], margin


def make_golden(directory, name, seed):
    family, heads, extras, whole = (*CASES[name], None)[:4]
    rng = np.random.default_rng([seed, NUMBERS[name]])
    config = draw_config(family, heads, extras, whole, rng)
    model_class = FAMILIES[family][1]
    write_golden(model_class(config), directory / name, seed=seed, sharded=name in SHARDED, mxfp4=name in MXFP4)
    model = load(directory / name, model_class, config._attn_implementation)
    name_family(directory / name / "config.json", family)
    vocab_size = getattr(config.get_text_config(), FIELD_NAMES.get(family, {}).get("vocab_size", "vocab_size"))
    for _ in range(100):
        token_ids = rng.integers(vocab_size, size=SEQUENCE_LENGTH)
        greedy, margin = continue_greedily(model, token_ids[:PROMPT_LENGTH])
        if margin > MIN_MARGIN:
            break
    else:
        raise RuntimeError(f"{name}: no prompt has a clear greedy continuation")
    logits = compute_logits(model, token_ids)
    np.savez_compressed(
        directory / name / "golden.npz",
        token_ids=token_ids.astype(np.int32),
        logits=logits[POSITIONS],
        greedy=greedy.astype(np.int32),
    )
    print(f"{name}: max |logit| {np.abs(logits).max():.1f}, smallest greedy margin {margin:.1e}")


def make_ropes(path, seed):
    """Frequencies and factors of scaled rotary embeddings, as JSON."""
    rng = np.random.default_rng(seed)
    ropes = {}
    for name, (parameters, length) in ROPES.items():
        fields = {"max_position_embeddings": 1024, "head_dim": 2 * int(rng.integers(4, 20))}
        parameters = parameters | {"rope_theta": round(float(10 ** rng.uniform(2, 6)), 1)}
        config = transformers.LlamaConfig(**fields, rope_parameters=dict(parameters))
        frequencies, length_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
        ropes[name] = {
            "fields": fields | {"rope_parameters": parameters},
            "length": length,
            "frequencies": frequencies.tolist(),
            "attention_factor": length_factor,
            "score_factor": yarn_apply_mscale(parameters, 1.0) if parameters["factor"] else None,
        }
    path.write_text(json.dumps(ropes, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument("--only", default="", help='make models whose name begins so, or "ropes", and nothing else')
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    names = [name for name in CASES if name.startswith(arguments.only)]
    if not names and arguments.only != "ropes":
        raise SystemExit(f"there is no model whose name begins with {arguments.only!r}: {', '.join(CASES)}")
    for name in names:
        shutil.rmtree(arguments.output / name, ignore_errors=True)
        make_golden(arguments.output, name, arguments.seed)
    if arguments.only in ("", "ropes"):
        make_ropes(arguments.output / "ropes.json", arguments.seed)


if __name__ == "__main__":
    main()
