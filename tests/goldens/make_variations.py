"""What transformers makes of each field that a model directory may have: `variations.json`.

Runs in a Python with torch (see make.sh). Each row of `variations.py` changes the config of a golden model, which is
loaded with its weights as `AutoModelForCausalLM` does. A row is "refused" if that fails or other weights are needed, or
has the logits that changed most; the rows that are not listed change nothing.
"""

import argparse
import json
import logging
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from golden_weights import write_checkpoint
from transformers.configuration_utils import PreTrainedConfig
from variations import DRAWN, FIELDS, GENERATION, changed, rows

MODELS = (
    *("llama_untied", "ministral_windows_by_layer", "mistral_window", "qwen2_window", "qwen3_biases_window"),
    *("gemma_biases_relu", "gemma2_biases_no_caps", "gemma2_caps", "gemma3_two_thetas", "phi3_fused"),
    *("phi3_long_factors", "granite_biases", "olmo2_tied_biases", "olmo3_windows_yarn"),
    *("starcoder2_tied_window", "cohere_biases", "cohere_qk_norm", "glm4_tied", "glm_tied", "gpt2_scales"),
    *("gpt_neox_sequential", "phi_tied_qk_norm", "stablelm_qk_norm", "gptj_untied", "opt_tied", "bloom_tied"),
    *("falcon_grouped", "falcon_multi_query", "mixtral_window", "qwen2_moe_windows_some_dense"),
    *("smollm3_untied_biases", "cohere2_untied_biases", "exaone4_windows", "arcee_biases"),
    *("glm4_moe_qk_norm", "minimax_m2_half_rotated", "glm4_moe_lite_dense_last", "ernie4_5_moe_biases", "olmoe_biases"),
    *("granitemoe_multipliers", "dots1_windows", "hy_v3_biases"),
    *("seed_oss_biases", "ernie4_5_biases", "hunyuan_v1_dense_alpha", "hunyuan_v1_moe_alpha", "mellum_windows"),
    *("apertus_llama3_rope", "internlm3_dynamic", "phimoe_short", "ministral3_beyond_original"),
    *(
        "qwen3_next_biases",
        "olmo_hybrid_biases",
        "kimi_linear_latent_queries",
        "bailing_hybrid_bounded",
        "lfm2_tied",
        "lfm2_moe_biases",
    ),
    *("nemotron_h_experts", "mamba2_limits", "granitemoehybrid_experts", "bamba_biases", "falcon_h1_multipliers"),
    *("gemma3n_shared", "gemma4_shared", "llama4_chunks", "afmoe_windows"),
    *("cohere2_moe_average", "mimo_v2_flash_windows", "laguna_windows", "solar_open_biases"),
    *("exaone_moe_windows",),
    *("olmo_clipped", "nemotron_half_rotated", "granite_swa_thetas"),
    *("granitemoe_swa_shared", "cwm_windows", "jais2_biases"),
    *("hyperclovax_multipliers", "helium_biases"),
    *("qwen3_moe_biases_window_some_dense", "gpt_oss_clamped", "deepseek_v2_groups", "deepseek_v3_groups"),
)
"""Golden models whose configs are varied: of each family those that use its options."""
NUM_KEPT = 2
"""Logits that are kept of a row: those that changed most."""
THRESHOLD = 1e-5
"""A change of this part of the largest logit, or less, is none."""
HARNESS = {
    *("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation"),
    *("output_cross_attentions", "num_labels", "fusion_config", "auto_map", "vision_aspect_ratio"),
    *("vision_feature_layer", "vision_feature_select_strategy", "text_config", "decoder", "generator"),
    *("default_rope_type", "ignore_keys_at_rope_validation", "is_heterogeneous", "name_or_path", "sub_configs"),
    *(
        "kv_sharing_modes",
        "model_type",
        "base_model_ep_plan",
        "base_model_fsdp_plan",
        "base_model_pp_plan",
        "base_model_tp_plan",
    ),
}
"""What transformers looks up in a config without a say of the checkpoint in a text's logits: how it computes, parts of
other kinds of models, and plans of its classes.
"""


def record_reads():
    """Record the fields that transformers' models (not its handling of configs) read. Returns the growing set."""
    found, original = set(), PreTrainedConfig.__getattribute__

    def get(config, name):
        reader = pathlib.Path(sys._getframe(1).f_code.co_filename).name
        if not name.startswith("__") and reader != "configuration_utils.py":
            value = original(config, name)
            if not callable(value):
                found.add(name)
            return value
        return original(config, name)

    PreTrainedConfig.__getattribute__ = get
    return found


@torch.no_grad()
def run(directory, token_ids, implementation):
    """Return the logits of a directory's model, or None if transformers does not load it with its weights."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=implementation,
            experts_implementation="eager",
            output_loading_info=True,
        )
        if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
            return None
        logits = model.eval()(torch.from_numpy(token_ids).long()[None], use_cache=False).logits[0].numpy()
    except Exception:  # whatever a config makes it fail with
        return None
    return logits if np.isfinite(logits).all() else None


def vary(golden, folder, names, known):
    """Return the outcome of each row of a golden that changes something, which is tried in `folder`, which is made.

    `names` are the fields that are tried, None for all; the outcomes of other fields' rows are those that are `known`.
    """
    write_checkpoint(golden, folder)
    fields = json.loads((golden / "config.json").read_text())
    token_ids = np.load(golden / "golden.npz")["token_ids"]
    # Falcon's eager attention adds the biases of ALiBi twice.
    implementation = "sdpa" if fields["model_type"] == "falcon" else "eager"

    def logits_of(fields):
        (folder / "config.json").write_text(json.dumps(fields))
        return run(folder, token_ids, implementation)

    base = logits_of(fields)
    largest = np.abs(base).max()
    every = rows(fields)
    tried = {label: change for label, change in every.items() if names is None or label.split()[0] in names}
    kept = every.keys() - tried.keys()
    changing = {label: outcome for label, outcome in known["changed"].items() if label in kept}
    refused = [label for label in known["refused"] if label in kept]

    def outcome(label, change):
        """Record what one row does."""
        logits = logits_of(changed(fields, change))
        if logits is None or logits.shape != base.shape:
            refused.append(label)
        elif (difference := np.abs(logits - base)).max() > THRESHOLD * largest:
            most = np.argsort(difference, axis=None)[-NUM_KEPT:]
            changing[label] = [[int(index), float(f"{logits.flat[index]:.6g}")] for index in most]

    def outcomes(labels):
        """Record what rows of different fields do, by halves unless all together do nothing."""
        if len(labels) > 1:
            together = {name: value for label in labels for name, value in tried[label].items()}
            logits = logits_of(changed(fields, together))
            if logits is not None and logits.shape == base.shape and np.abs(logits - base).max() <= THRESHOLD * largest:
                return
            outcomes(labels[: len(labels) // 2])
            outcomes(labels[len(labels) // 2 :])
        elif labels:
            outcome(labels[0], tried[labels[0]])

    added = {}
    for label, change in tried.items():
        [name, *others] = change
        if others or name in fields:
            outcome(label, change)
        else:
            added.setdefault(name, []).append(label)
    for index in range(max(map(len, added.values()), default=0)):
        outcomes([labels[index] for labels in added.values() if index < len(labels)])
    print(
        f"{golden.name}: of {len(tried)} rows {len(changing)} change the logits, {len(refused)} are refused", flush=True
    )
    return {
        "num_rows": len(every),
        "changed": {label: changing[label] for label in every if label in changing},
        "refused": [label for label in every if label in refused],
    }


def draw(model, changes, prompt):
    """Return the tokens that transformers draws with a generation_config.json, and their distributions; None if it
    refuses it.
    """
    torch.manual_seed(0)
    try:
        config = transformers.GenerationConfig.from_dict(DRAWN | changes)
        drawn = model.generate(
            prompt, generation_config=config, return_dict_in_generate=True, output_scores=True, tokenizer=None
        )
    except Exception:  # whatever a config makes it fail with
        return None
    return drawn.sequences, torch.stack(drawn.scores).softmax(-1)


def vary_generation(golden, folder):
    """Return which fields of generation_config.json change what is drawn, and which are refused as they are here."""
    write_checkpoint(golden, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.from_numpy(np.load(golden / "golden.npz")["token_ids"][:12]).long()[None]
    base = draw(model, {}, prompt)
    drawn = {name: draw(model, {name: value}, prompt) for name, value in GENERATION.items()}
    refused = [name for name, found in drawn.items() if found is None]

    def is_base(found):
        shapes = [each.shape for each in found] == [each.shape for each in base]
        return shapes and torch.equal(found[0], base[0]) and torch.allclose(found[1], base[1], atol=1e-4)

    changed = [name for name, found in drawn.items() if found is not None and not is_base(found)]
    return {"changed": changed, "refused": refused}


def as_lines(value, depth=4):
    """Return JSON with a line for each row of each model."""
    if not isinstance(value, dict) or depth == 0:
        return json.dumps(value)
    lines = (f"{json.dumps(name)}: {as_lines(each, depth - 1)}" for name, each in value.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goldens", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument("--only", nargs="*", help="these models instead of all")
    parser.add_argument("--fields", nargs="*", help="these fields instead of all; what is known of others is kept")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.ERROR)
    read = record_reads()
    path = arguments.goldens / "variations.json"
    found = json.loads(path.read_text()) if arguments.only or arguments.fields else {"read": [], "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        found["generation"] = vary_generation(arguments.goldens / MODELS[0], pathlib.Path(folder, "model"))
    for name in arguments.only or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            known = found["models"].get(name, {"changed": {}, "refused": []})
            found["models"][name] = vary(arguments.goldens / name, pathlib.Path(folder, name), arguments.fields, known)
        found["read"] = sorted({*found["read"], *read} & FIELDS.keys())
        found["transformers"] = transformers.__version__
        path.write_text(as_lines(found) + "\n")
    if unknown := sorted(read - FIELDS.keys() - HARNESS):
        raise SystemExit(f"read by transformers, and not in variations.py: {', '.join(unknown)}")


if __name__ == "__main__":
    main()
