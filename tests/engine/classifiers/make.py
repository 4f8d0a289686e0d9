"""Make the classifiers of this folder with transformers: run by an interpreter that has torch, as tests/goldens/make.sh
makes one, with PYTHONPATH=tests/support:tests/goldens. Tiny models with random weights, and the logits of some
prompts.
"""

import json
import pathlib
import shutil

import torch
import transformers as hf
from make_goldens import load, write_golden

FOLDER = pathlib.Path(__file__).parent
SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
PROMPTS = [[5, 17, 250], [1], [9, 9, 9, 9, 9, 9, 30, 31]]
CASES = {
    "llama": hf.LlamaConfig(**SIZES, **HEADS, num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"}),
    "qwen2_tied": hf.Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True, num_labels=2),
    "gemma2": hf.Gemma2Config(**SIZES, **HEADS, head_dim=8, num_labels=4, problem_type="multi_label_classification"),
    "gpt2": hf.GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=64, pad_token_id=0, num_labels=1),
}

goldens = {}
for name, config in CASES.items():
    model_class = hf.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    write_golden(model_class(config), FOLDER / name, seed=0)
    model = load(FOLDER / name, model_class)
    with torch.no_grad():
        goldens[name] = [model(torch.tensor([ids])).logits[0].tolist() for ids in PROMPTS]
(FOLDER / "goldens.json").write_text(json.dumps({"prompts": PROMPTS, "logits": goldens}) + "\n")
