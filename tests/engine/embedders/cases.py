"""Models with files of sentence-transformers: a tiny Llama and a tiny GPT-2 of `classifiers/` with files around them.

`make.py` writes what sentence-transformers make of them to goldens.json.
"""

import json
import shutil

import numpy as np
import safetensors.numpy
import tiny_tokenizer
from golden_folder import CLASSIFIERS

HIDDEN_SIZE = 16
TEXTS = ["Once upon a time", "The end", "x"]
PAIRS = [["what ends?", "the end"], ["The", "Once upon"], ["a", "b c"]]
PAIR_TEMPLATE = (
    "{% for role in ('system', 'query', 'document') %}{% for message in messages if message.role == role %}"
    "<{{ role }}>: {{ message.content }}\n{% endfor %}{% endfor %}{% if add_generation_prompt %}answer: {% endif %}"
)
ST, TORCH = "sentence_transformers.models", "torch.nn.modules"
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{ST}.Transformer"}


def flags(*names):
    """Return a Pooling's config in its old form."""
    known = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": HIDDEN_SIZE, **{f"pooling_mode_{name}": name in names for name in known}}


def modes(*names):
    """Return a Pooling's config in its new form."""
    mode = names[0] if len(names) == 1 else list(names)
    return {"embedding_dimension": HIDDEN_SIZE, "pooling_mode": mode, "include_prompt": True}


def dense(num_inputs, num_outputs, activation, *, bias=True, use_residual=False, seed=0):
    """Return a Dense's config and weights."""
    random = np.random.default_rng(seed)
    shapes = {"linear.weight": (num_outputs, num_inputs)} | ({"linear.bias": (num_outputs,)} if bias else {})
    if use_residual and num_inputs != num_outputs:
        shapes["residual.weight"] = (num_outputs, num_inputs)
    weights = {name: (random.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    config = {"in_features": num_inputs, "out_features": num_outputs, "bias": bias, "activation_function": activation}
    return config | ({"use_residual": True} if use_residual else {}), weights


def layer_norm(size):
    """Return a LayerNorm's config and weights."""
    weights = {"norm.weight": np.linspace(0.5, 2, size), "norm.bias": np.linspace(-1, 1, size)}
    return {"dimension": size}, {name: values.astype(np.float32) for name, values in weights.items()}


NORMALIZE = ("Normalize", None, None)
# name: modules after the transformer (kind, config, weights), files of the top folder
EMBEDDERS = {
    "last_old": ([("Pooling", flags("lasttoken"), None), NORMALIZE], {}),
    "mean_old": ([("Pooling", flags("mean_tokens"), None)], {}),
    "cls_new": ([("Pooling", modes("cls"), None)], {}),
    "max_new": ([("Pooling", modes("max"), None)], {}),
    "weighted_old": ([("Pooling", flags("weightedmean_tokens"), None), NORMALIZE], {}),
    "root_new": ([("Pooling", modes("mean_sqrt_len_tokens"), None)], {}),
    "several_old": ([("Pooling", flags("lasttoken", "cls_token", "mean_tokens"), None), NORMALIZE], {}),
    "several_new": ([("Pooling", modes("weightedmean", "max"), None)], {}),
    "dense": (
        [
            ("Pooling", modes("mean"), None),
            ("Dense", *dense(16, 24, f"{TORCH}.activation.Tanh")),
            ("Dense", *dense(24, 8, f"{TORCH}.linear.Identity", bias=False)),
            NORMALIZE,
        ],
        {},
    ),
    "residuals": (
        [
            ("Pooling", flags("lasttoken"), None),
            ("Dense", *dense(16, 12, f"{TORCH}.activation.GELU", use_residual=True)),
            ("Dense", *dense(12, 12, f"{TORCH}.activation.ReLU", use_residual=True, seed=1)),
            ("LayerNorm", *layer_norm(12)),
            ("Dropout", {"dropout": 0.5}, None),
        ],
        {},
    ),
    "prompt_lowercase": (
        [("Pooling", modes("mean"), None), NORMALIZE],
        {
            "sentence_bert_config.json": {"max_seq_length": 40, "do_lower_case": True},
            "config_sentence_transformers.json": {
                "prompts": {"query": "Find: ", "document": ""},
                "default_prompt_name": "query",
                "similarity_fn_name": "dot",
            },
        },
    ),
    "truncated": (
        [("Pooling", flags("mean_tokens"), None)],
        {"config_sentence_transformers.json": {"truncate_dim": 5}},
    ),
}
LOGIT_SCORE = ("LogitScore", {"true_token_id": 70, "false_token_id": 81}, None)
CROSS = {"model_type": "CrossEncoder"}
CAUSAL_LOGITS = {
    "transformer_task": "text-generation",
    "modality_config": {key: {"method": "forward", "method_output_name": "logits"} for key in ("text", "message")},
    "module_output_name": "causal_logits",
}
# name: model, modules, files, changes of config.json
RERANKERS = {
    "sigmoid": ("gpt2", [], {}, {}),
    "identity": ("gpt2", [], {}, {"sentence_transformers": {"activation_fn": f"{TORCH}.linear.Identity"}}),
    "tanh_old": ("gpt2", [], {}, {"sbert_ce_default_activation_function": f"{TORCH}.activation.Tanh"}),
    "next_token": (
        "llama",
        [LOGIT_SCORE],
        {
            "config_sentence_transformers.json": CROSS | {"activation_fn": f"{TORCH}.activation.Sigmoid"},
            "sentence_bert_config.json": CAUSAL_LOGITS
            | {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
            "chat_template.jinja": PAIR_TEMPLATE,
        },
        {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    ),
    "next_token_prompt": (
        "llama",
        [LOGIT_SCORE],
        {
            "config_sentence_transformers.json": CROSS
            | {
                "activation_fn": f"{TORCH}.linear.Identity",
                "prompts": {"web": "is it there?"},
                "default_prompt_name": "web",
            },
            "sentence_bert_config.json": CAUSAL_LOGITS,
            "chat_template.jinja": PAIR_TEMPLATE,
        },
        {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    ),
}


def write(folder, *, model="llama", modules=(), files=None, changes=None):
    """Write the model to `folder`: weights, tokenizer, modules of sentence-transformers and further files."""
    shutil.copytree(CLASSIFIERS / model, folder)
    tiny_tokenizer.byte_level(folder)
    edit(folder / "tokenizer_config.json", {"pad_token": "<|im_end|>"}, without=("chat_template",))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "config.json", changes or {})
    if (changes or {}).get("architectures"):
        weights = safetensors.numpy.load_file(folder / "model.safetensors")
        del weights["score.weight"]
        safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    entries = [TRANSFORMER]
    for index, (kind, config, weights) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        package = "sentence_transformers.cross_encoder.modules.logit_score" if kind == "LogitScore" else ST
        entries.append({"idx": index, "name": str(index), "path": path, "type": f"{package}.{kind}"})
        (folder / path).mkdir()
        if config is not None:
            (folder / path / "config.json").write_text(json.dumps(config))
        if weights is not None:
            safetensors.numpy.save_file(weights, folder / path / "model.safetensors")
    if modules:
        (folder / "modules.json").write_text(json.dumps(entries))
    for name, contents in (files or {}).items():
        (folder / name).write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return folder


def edit(file, changes, *, without=()):
    """Change fields of a JSON file."""
    fields = {name: value for name, value in json.loads(file.read_text()).items() if name not in without}
    file.write_text(json.dumps(fields | changes))
