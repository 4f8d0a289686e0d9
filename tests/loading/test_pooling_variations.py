"""Each field of files of sentence-transformers changes how vectors are made, or is refused or logged.

`goldens/pooling_variations.py` has other values of each field and what they do.
"""

import json
import re

import numpy as np
import pytest
import safetensors.numpy
from pooling_variations import CHANGES, FILES, LOGGED, MODULE, OLD_POOLING, REFUSED, SAME, ST, TORCH

from jaxserve.errors import CheckpointError
from jaxserve.loading.sentence_transformers import read_embedder

SIZE = 16
BASE = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": f"{ST}.Transformer"},
        *(
            {"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": f"{ST}.{kind}"}
            for index, kind in enumerate(("Pooling", "Dense", "LayerNorm", "Normalize"), 1)
        ),
    ],
    "1_Pooling/config.json": {"embedding_dimension": SIZE, "pooling_mode": "mean", "include_prompt": True},
    "2_Dense/config.json": {
        "in_features": SIZE,
        "out_features": SIZE,
        "bias": True,
        "activation_function": f"{TORCH}.activation.Tanh",
    },
    "3_LayerNorm/config.json": {"dimension": SIZE},
    "4_Normalize/config.json": {},
    "sentence_bert_config.json": {},
    "config_sentence_transformers.json": {"prompts": {"query": "find: ", "document": ""}},
    "tokenizer_config.json": {},
}
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "2_Dense": {"linear.weight": RANDOM.standard_normal((SIZE, SIZE)), "linear.bias": RANDOM.standard_normal(SIZE)},
    "3_LayerNorm": {"norm.weight": RANDOM.standard_normal(SIZE), "norm.bias": RANDOM.standard_normal(SIZE)},
}
VECTOR = RANDOM.standard_normal(SIZE).astype(np.float32)


@pytest.fixture
def base(tmp_path):
    for name, contents in BASE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(contents))
    for folder, weights in WEIGHTS.items():
        weights = {name: values.astype(np.float32) for name, values in weights.items()}
        safetensors.numpy.save_file(weights, tmp_path / folder / "model.safetensors")
    return tmp_path


def seen(folder):
    """Return all that an Embedder does to texts and vectors."""
    embedder = read_embedder(folder, hidden_size=SIZE)
    vector = VECTOR
    for layer in embedder.layers:
        vector = layer(vector)
    texts = [embedder.text("The End", name) for name in (None, *embedder.prompts)]
    options = (embedder.normalizes, embedder.dimensions, embedder.similarity, embedder.max_length)
    return embedder.pooling, vector.tolist(), texts, options


def outcome(folder, expected, name, value, caplog):
    """Return what the files of a folder do, where `name` is the field that differs from the base."""
    caplog.clear()
    try:
        found = seen(folder)
    except CheckpointError as error:
        # A module, and what a Dense is left with, are named in place of the field.
        words = [
            name,
            "the module",
            "no model",
            "in_features",
            "linear.bias",
            *re.findall(r"\w{5,}", json.dumps(value)),
        ]
        return REFUSED if str(folder) in str(error) and any(word in str(error) for word in words) else str(error)
    if name in caplog.text:
        return LOGGED
    return SAME if found == expected else CHANGES


def compare(folder, file, rows, caplog, *, contents):
    """Require of each row what it says; `contents` returns the whole file for some fields."""
    before = (folder / file).read_text()
    (folder / file).write_text(json.dumps(contents({})))
    expected = seen(folder)
    wrong = []
    for name, values in rows.items():
        for value, means in values:
            (folder / file).write_text(json.dumps(contents({name: value})))
            if (found := outcome(folder, expected, name, value, caplog)) != means:
                wrong.append((name, value, means, found))
    (folder / file).write_text(before)
    assert wrong == []


@pytest.mark.parametrize("file", FILES)
def test_each_field_does_what_its_row_says(base, file, caplog):
    compare(base, file, FILES[file], caplog, contents=lambda fields: BASE[file] | fields)


def test_old_poolings(base, caplog):
    own = {"word_embedding_dimension": SIZE}
    compare(base, "1_Pooling/config.json", OLD_POOLING, caplog, contents=lambda fields: own | fields)


def test_each_field_of_a_module(base, caplog):
    *others, last = BASE["modules.json"]
    compare(base, "modules.json", MODULE, caplog, contents=lambda fields: [*others, last | fields])


def test_the_length_that_wins(base):
    """Arguments of the tokenizer, then max_seq_length, then the tokenizer's own."""
    (base / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 9}))
    arguments = {"processor_kwargs": {"model_max_length": 7}}
    own = {"max_seq_length": 8}
    for fields, expected in (({}, 9), (own, 8), (arguments, 7), (own | arguments, 7)):
        (base / "sentence_bert_config.json").write_text(json.dumps(fields))
        assert read_embedder(base, hidden_size=SIZE).max_length == expected
    (base / "modules.json").unlink()
    (base / "sentence_bert_config.json").unlink()
    assert read_embedder(base, hidden_size=SIZE).max_length is None
